"""The code of a run as a commit of its own, under `refs/runs/<id>`: branch, index and working tree stay as they are.

The commit's parent is HEAD, its tree what was shipped: HEAD with the changes and the new files of the working tree. A
ref outside refs/heads is seen by no `git branch` and pushed by no plain `git push`; `git push origin 'refs/runs/*'`
sends it.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

WHO = {
    "GIT_AUTHOR_NAME": "slipway",
    "GIT_AUTHOR_EMAIL": "slipway@localhost",
    "GIT_COMMITTER_NAME": "slipway",
    "GIT_COMMITTER_EMAIL": "slipway@localhost",
}


def ref_of(run_id: str) -> str:
    return f"refs/runs/{run_id}"


def keep(root: Path, files: Iterable[str], changed: Iterable[str], run_id: str) -> str | None:
    """Commit what is shipped from `root`; returns the commit, None where `root` is no repository of its own.

    Args:
        files: what is shipped, relative to the root.
        changed: further names that differ from HEAD, deleted ones included.
    """
    top = _git(root, "rev-parse", "--show-toplevel")
    if not top or Path(top).resolve() != root.resolve():
        return None
    head = _git(root, "rev-parse", "--verify", "--quiet", "HEAD^{commit}")
    with tempfile.TemporaryDirectory(prefix="slipway-index-") as folder:
        extra = {**WHO, "GIT_INDEX_FILE": str(Path(folder) / "index")}
        if head:
            _git(root, "read-tree", head, extra=extra)
        names = "".join(f"{name}\0" for name in sorted({*files, *changed}))
        _git(root, "update-index", "--add", "--remove", "-z", "--stdin", extra=extra, stdin=names)
        tree = _git(root, "write-tree", extra=extra)
        if not tree:
            return None
        parent = ["-p", head] if head else []
        commit = _git(root, "commit-tree", tree, *parent, "-m", f"The code of {run_id}", extra=extra)
    return commit if commit and _git(root, "update-ref", ref_of(run_id), commit) is not None else None


def changes(root: Path, old: str, new: str) -> str:
    """`git diff --stat` between the commits of two runs, empty where this repository does not have both."""
    return _git(root, "diff", "--stat", "--no-color", ref_of(old), ref_of(new)) or ""


def _git(root: Path, *words: str, extra: dict[str, str] | None = None, stdin: str = "") -> str | None:
    """What git prints; None where it fails or is not installed."""
    try:
        done = subprocess.run(
            ["git", *words], cwd=root, env={**os.environ, **(extra or {})}, input=stdin.encode(), capture_output=True,
            check=False,
        )  # fmt: skip
    except FileNotFoundError:
        return None
    return done.stdout.decode(errors="replace").strip() if done.returncode == 0 else None

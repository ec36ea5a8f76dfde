"""Git status of the shipped code, kept beside a run's results to record their origin."""

import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from controller.inputs.git import strip_password

MAX_FILE_BYTES = 1_000_000
MAX_FILES = 2_000
MAX_DIFF_BYTES = 10_000_000


def collect_git_status(root: Path, exclude: tuple[str, ...], secrets: Iterable[str]) -> tuple[dict[str, Any], str]:
    """Return the document for git.json, and the changes since the commit as a patch.

    Args:
        root: the repository.
        exclude: patterns as in .gitignore; matching files are neither shown nor named.
        secrets: values that are removed from the patch.
    """
    top = _git(root, "rev-parse", "--show-toplevel").strip()
    if not top or Path(top).resolve() != root.resolve():
        return {"commit": None, "why": "the code is not in a git repository of its own"}, ""
    commit = _git(root, "rev-parse", "--verify", "--quiet", "HEAD").strip() or None
    changed = _changed_files(root, exclude, "diff", "--name-only", "-z", "HEAD") if commit else []
    shown = [name for name in changed if _size(root / name) <= MAX_FILE_BYTES][:MAX_FILES]
    diff = _git(root, "diff", "--no-color", "--no-ext-diff", "--no-textconv", "HEAD", "--", *shown) if shown else ""
    if len(diff) > MAX_DIFF_BYTES:
        shown, diff = [], ""
    for secret in secrets:
        diff = diff.replace(secret, "*" * len(secret))
    document = {
        "commit": commit,
        "branch": _git(root, "symbolic-ref", "--quiet", "--short", "HEAD").strip() or None,
        "remote": strip_password(_git(root, "remote", "get-url", "origin").strip()) or None,
        "dirty": bool(changed),
        "changed": changed[:MAX_FILES],
        "untracked": _changed_files(root, exclude, "ls-files", "--others", "--exclude-standard", "-z")[:MAX_FILES],
        "patch": "diff.patch" if diff else None,
        "not_in_patch": sorted(set(changed) - set(shown))[:MAX_FILES],
    }
    return document, diff


def _changed_files(root: Path, exclude: tuple[str, ...], *arguments: str) -> list[str]:
    import pathspec

    spec = pathspec.GitIgnoreSpec.from_lines(exclude)
    return sorted(name for name in _git(root, *arguments).split("\0") if name and not spec.match_file(name))


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _git(root: Path, *arguments: str) -> str:
    """Return git's output; empty if git fails or is not installed."""
    try:
        done = subprocess.run(
            ["git", "-c", "core.quotepath=off", *arguments], cwd=root, capture_output=True, check=False
        )
    except FileNotFoundError:
        return ""
    return done.stdout.decode(errors="replace") if done.returncode == 0 else ""

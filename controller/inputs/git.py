"""Git: clone repositories at a commit into the state folder, and the status of the shipped code."""

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from conf.schema.run.program import Repository
from controller.core.errors import ConfigError


class UnreachableError(ConfigError):
    """A repository that cannot be reached now, though it may exist."""


def checkout(repository: Repository, state: Path) -> Path:
    """Return the folder of a repository at its commit, cloned on first use.

    Raises:
        UnreachableError: it cannot be cloned.
        ConfigError: it has no such commit.
    """
    name = hashlib.sha256(repository.url.encode()).hexdigest()[:12]
    folder = state / "repositories" / f"{name}-{repository.commit[:12]}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder.parent))
    try:
        clone(repository.url, repository.commit, draft, "code.repository")
        draft.rename(folder)
    except OSError:
        if not folder.is_dir():  # another process may have been faster
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def clone(url: str, ref: str | None, folder: Path, key: str) -> str:
    """Clone a commit, branch or tag into an empty folder and return the commit; shallow where the server allows it.

    Raises:
        ConfigError: the clone failed; names `key`. UnreachableError if the server could not be reached.
    """
    message = f"{key}: {strip_password(url)}"
    if ref and ref.startswith("-"):  # git would take it for an option, and some of them run programs
        raise ConfigError(f"{message}: {ref!r} is not a valid branch, tag or commit")
    for argv in (["init", "--quiet"], ["remote", "add", "--", "origin", url]):
        run_git(argv, folder)
    one = run_git(["fetch", "--quiet", "--depth=1", "origin", ref or "HEAD"], folder)
    if one.returncode and ref:  # a server may refuse to send a commit that no branch ends with
        everything = ["fetch", "--quiet", "--tags", "origin", "+refs/heads/*:refs/remotes/origin/*"]
        one = run_git(everything, folder)
    if one.returncode:
        raise UnreachableError(f"{message}: cannot clone: {_last_line(one.stderr)}")
    for target in ("FETCH_HEAD", ref, f"origin/{ref}"):
        commit = run_git(["rev-parse", "--verify", "--quiet", f"{target}^{{commit}}"], folder).stdout.strip()
        if commit and (ref is None or target != "FETCH_HEAD" or len(ref) != 40 or commit == ref):
            break
    else:
        raise ConfigError(f"{message}: commit {ref} does not exist")
    if (done := run_git(["checkout", "--quiet", "--detach", commit], folder)).returncode:
        raise ConfigError(f"{message}: cannot check out: {_last_line(done.stderr)}")
    return commit


def strip_password(url: str) -> str:
    """Return a URL without credentials, safe to print: an HTTPS URL may contain a token."""
    scheme, separator, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    user, at, name = host.rpartition("@")
    if not separator or not at or scheme == "ssh":
        return url
    return f"{scheme}://{name}{slash}{path}" if user else url


def run_git(arguments: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run git in a folder and return its output; exit code 127 and a message in stderr where it is not installed."""
    environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    command = ["git", *arguments]
    try:
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        if not folder.is_dir():
            raise
        return subprocess.CompletedProcess(
            command, 127, "", "error: git is not installed: https://git-scm.com/downloads"
        )


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return next((line for line in lines if line.startswith(("fatal:", "error:"))), lines[-1] if lines else "git failed")


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

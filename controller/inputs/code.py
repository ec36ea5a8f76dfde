"""The code to ship: its files, their hash, one reproducible archive, and what git knows of it.

`program=trainer` ships the bundled `trainer/` and `conf/`, and in `modules/` the user's own, if the config names any.
`program=command` ships the git repository around the current folder, or `code.repository`: tracked and untracked files,
except ignored ones and those that `code.exclude` names.
"""

import gzip
import hashlib
import io
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import conf
from conf.schema.config import Config
from conf.schema.program import Repository
from controller.agent.fs import files_hash
from controller.core.errors import ConfigError
from controller.inputs.modules import shipped_modules


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


MAX_FILES_SHOWN = 5


@dataclass(frozen=True)
class CodeSnapshot:
    """Files below a root, as sorted relative paths."""

    root: Path
    files: tuple[str, ...]
    elsewhere: tuple[tuple[str, Path], ...] = field(default=(), kw_only=True)
    """Files outside the root, by their path in the tree: the user's modules beside the trainer."""

    @property
    def paths(self) -> dict[str, Path]:
        """Every file, by its path in the tree."""
        return {name: self.root / name for name in self.files} | dict(self.elsewhere)

    @property
    def size(self) -> str:
        """Size for people."""
        count = len(self.paths)
        return f"{count} file{'' if count == 1 else 's'}"

    @cached_property
    def sha256(self) -> str:
        """Hash of the tree: paths, executable bits and contents. A worker's copy must have the same hash."""
        return files_hash(self.paths)

    @cached_property
    def archive(self) -> bytes:
        """Return a gzipped tar; the same files give the same bytes on every host."""
        buffer = io.BytesIO()
        with (
            gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0, compresslevel=6) as zipped,
            tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as tar,
        ):
            for name, path in sorted(self.paths.items()):
                entry = tarfile.TarInfo(name)
                content = path.read_bytes()
                entry.size = len(content)
                entry.mode = 0o755 if path.stat().st_mode & 0o100 else 0o644
                tar.addfile(entry, io.BytesIO(content))
        return buffer.getvalue()

    @cached_property
    def archive_sha256(self) -> str:
        return hashlib.sha256(self.archive).hexdigest()


@dataclass(frozen=True)
class UnfetchedSnapshot(CodeSnapshot):
    """Code of another repository that could not be fetched yet: enough for a plan, and for nothing else."""

    commit: str

    @property
    def size(self) -> str:
        return "not fetched yet"

    @cached_property
    def sha256(self) -> str:
        return self.commit


def unfetched_snapshot(config: Config) -> UnfetchedSnapshot:
    """Return a placeholder for `code.repository` in a plan made without it."""
    assert config.code.repository is not None
    return UnfetchedSnapshot(Path(config.run.state_dir).expanduser(), (), config.code.repository.commit)


def take_snapshot(config: Config, folder: Path) -> CodeSnapshot:
    """Return the code that `config` ships if run from `folder`.

    Raises ConfigError if there is none, more than code.max_mb, or a repository that cannot be fetched.
    """
    if config.program.kind == "trainer":
        root = Path(conf.__file__).parents[1]
        found = [p for package in ("conf", "trainer") for p in (root / package).rglob("*") if _is_source(p)]
    elif config.code.stand_in:
        root = Path(conf.__file__).parents[1] / "controller" / "rehearsal" / "standins"
        found = [p for p in root.rglob("*.py") if _is_source(p)]
    else:
        state = Path(config.run.state_dir).expanduser()
        other = config.code.repository
        root = checkout(other, state) if other else repository_root(folder)
        found = _filter_excluded(root, _list_files(root, tracked_only=other is not None), config.code.exclude)
        if other is None:  # clones of other repositories are there
            found = [path for path in found if not path.is_relative_to(state.resolve())]
    files = tuple(sorted(p.relative_to(root).as_posix() for p in found))
    if not files:
        raise ConfigError(f"program: {root} has no files to ship; run from your repository, or use program=trainer")
    own = shipped_modules(config, folder) if config.program.kind == "trainer" else {}
    snapshot = CodeSnapshot(root, files, elsewhere=tuple(sorted(own.items())))
    _refuse_large(snapshot.paths, config.code.max_mb)
    return snapshot


def _is_source(path: Path) -> bool:
    return path.is_file() and "__pycache__" not in path.parts


def repository_root(folder: Path) -> Path:
    """Return the top of the git repository around a folder; the folder itself if there is none."""
    git = run_git(["rev-parse", "--show-toplevel"], folder)
    return Path(git.stdout.strip()) if git.returncode == 0 else folder


def _list_files(root: Path, *, tracked_only: bool = False) -> list[Path]:
    """List regular files that git tracks or would add; without git, all files except those in the root's .gitignore."""
    git = run_git(["ls-files", "-z", "--cached", *(() if tracked_only else ("--others", "--exclude-standard"))], root)
    names = set(filter(None, git.stdout.split("\0"))) if git.returncode == 0 else _unignored(root)
    return [root / name for name in names if (root / name).is_file() and not (root / name).is_symlink()]


def _filter_excluded(root: Path, found: list[Path], exclude: tuple[str, ...]) -> list[Path]:
    import pathspec

    spec = pathspec.GitIgnoreSpec.from_lines(exclude)
    return [path for path in found if not spec.match_file(path.relative_to(root).as_posix())]


def _unignored(root: Path) -> set[str]:
    import pathspec

    ignore = root / ".gitignore"
    spec = pathspec.GitIgnoreSpec.from_lines(ignore.read_text().splitlines() if ignore.is_file() else [])
    return set(spec.match_tree_files(root, negate=True, follow_links=False))


def _refuse_large(files: dict[str, Path], max_mb: float) -> None:
    sizes = sorted(((path.stat().st_size, name) for name, path in files.items()), reverse=True)
    total = sum(size for size, _ in sizes) / 1e6
    if total > max_mb:
        largest = ", ".join(f"{name} ({size / 1e6:.1f} MB)" for size, name in sizes[:MAX_FILES_SHOWN])
        raise ConfigError(
            f"code.max_mb: {total:.1f} MB of code exceed the limit of {max_mb:g} MB; largest: {largest}; list what is "
            "not needed in code.exclude or .gitignore"
        )

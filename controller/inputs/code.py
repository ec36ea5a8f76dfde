"""The code to ship: its files, their hash, and one reproducible archive.

`program=trainer` ships the bundled `trainer/` and `conf/`, and in `modules/` the user's own, if the config names any.
`program=command` ships the git repository around the current folder, or `code.repository`: tracked and untracked files,
except ignored ones and those that `code.exclude` names.
"""

import gzip
import hashlib
import io
import tarfile
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import conf
from conf.schema.config import Config
from controller.agent.tree_hash import files_hash
from controller.core.errors import ConfigError
from controller.inputs.git import checkout, run_git
from controller.inputs.modules import shipped_modules

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

"""The code to ship: its files and links, their hash, and one reproducible archive.

`program=trainer` ships the bundled `trainer/` and `conf/`, and in `modules/` the user's own, if the config names any.
`program=command` ships the git repository around the current folder, or `code.repository`: tracked and untracked files,
except ignored ones and those that `code.exclude` names. `.slipway_modules/` has the user's own, if a tracker is one.
"""

import gzip
import hashlib
import io
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import conf
from conf.schema.config import Config
from controller.agent.commands.run_inputs import MAX_FILES
from controller.agent.fs import files_hash
from controller.core.errors import ConfigError
from controller.core.text import plural
from controller.inputs.code_files import EXPECTED, list_code
from controller.inputs.git import checkout, repository_root
from controller.inputs.modules import shipped_modules

MAX_FILES_SHOWN = 5


@dataclass(frozen=True)
class CodeSnapshot:
    """Files below a root, as sorted relative paths."""

    root: Path
    files: tuple[str, ...]
    elsewhere: tuple[tuple[str, Path], ...] = field(default=(), kw_only=True)
    """Files outside the root, by their path in the tree: the user's modules beside the trainer."""
    links: tuple[tuple[str, str], ...] = field(default=(), kw_only=True)
    """Links in the tree, with the path from the link's folder to what they lead to, which is shipped too."""
    left_out: Mapping[str, str] = field(default_factory=dict, kw_only=True, compare=False)
    """What is below the root and not shipped, with the reason."""

    @property
    def paths(self) -> dict[str, Path]:
        """Every file, by its path in the tree. One that an installer or the user has linked is shipped as a file."""
        found = {name: self.root / name for name in self.files} | dict(self.elsewhere)
        return {name: path.resolve() if path.is_symlink() else path for name, path in found.items()}

    @property
    def count(self) -> int:
        """Number of files and links in the tree."""
        return len(self.files) + len(self.elsewhere) + len(self.links)

    @property
    def size(self) -> str:
        """Size for people, with the number of entries that were left out."""
        left_out = f", {len(self.left_out)} left out" if self.left_out else ""
        return f"{plural(self.count, 'file')}{left_out}"

    @property
    def unexpected(self) -> dict[str, str]:
        """Return what was left out although the program may find it here."""
        return {name: why for name, why in self.left_out.items() if why not in EXPECTED}

    @cached_property
    def sha256(self) -> str:
        """Hash of the tree: paths, executable bits and contents. A worker's copy must have the same hash."""
        return files_hash(self.paths, dict(self.links))

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
            for name, target in sorted(self.links):
                entry = tarfile.TarInfo(name)
                entry.type, entry.linkname = tarfile.SYMTYPE, target
                tar.addfile(entry)
        return buffer.getvalue()

    @cached_property
    def archive_sha256(self) -> str:
        return hashlib.sha256(self.archive).hexdigest()


@dataclass(frozen=True)
class NamedCode(CodeSnapshot):
    """Code of which only the hash is known: enough to look at its run or to end it."""

    recorded: str

    @cached_property
    def sha256(self) -> str:
        return self.recorded


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
    links, left_out = dict[str, str](), dict[str, str]()
    if config.program.kind == "trainer":
        root = Path(conf.__file__).parents[1]
        found = [p for package in ("conf", "trainer") for p in (root / package).rglob("*") if _is_source(p)]
        files = sorted(p.relative_to(root).as_posix() for p in found)
    elif config.code.stand_in:
        root = Path(conf.__file__).parents[1] / "controller" / "rehearsal" / "standins"
        files = sorted(p.relative_to(root).as_posix() for p in root.rglob("*.py") if _is_source(p))
    else:
        state = Path(config.run.state_dir).expanduser()
        other = config.code.repository
        root = checkout(other, state) if other else repository_root(folder)
        own_files = state if other is None else None  # clones of other repositories are there
        code = list_code(root, config.code.exclude, tracked_only=other is not None, not_in=own_files)
        files, links, left_out = code.files, code.links, code.left_out
    if not files:
        raise ConfigError(f"program: {root} has no files to ship; run from your repository, or use program=trainer")
    own = shipped_modules(config, folder)
    snapshot = CodeSnapshot(
        root, tuple(files), elsewhere=tuple(sorted(own.items())), links=tuple(sorted(links.items())), left_out=left_out
    )
    _refuse_large(snapshot, config.code.max_mb)
    return snapshot


def _is_source(path: Path) -> bool:
    return path.is_file() and "__pycache__" not in path.parts


def _refuse_large(code: CodeSnapshot, max_mb: float) -> None:
    if code.count > MAX_FILES:
        message = f"{code.count:,} files of code are more than the {MAX_FILES:,} that workers unpack"
        raise ConfigError(f"code.exclude: {message}; list what is not needed here or in .gitignore")
    sizes = sorted(((path.stat().st_size, name) for name, path in code.paths.items()), reverse=True)
    total = sum(size for size, _ in sizes) / 1e6
    if total > max_mb:
        largest = ", ".join(f"{name} ({size / 1e6:.1f} MB)" for size, name in sizes[:MAX_FILES_SHOWN])
        raise ConfigError(
            f"code.max_mb: {total:.1f} MB of code exceed the limit of {max_mb:g} MB; largest: {largest}; list what is "
            "not needed in code.exclude or .gitignore"
        )

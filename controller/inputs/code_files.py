"""Which files of a folder are its code: what git tracks or would add, also in submodules; and what is left out, why.

Only git decides what is ignored. A folder outside any repository is asked about as if it were a new one.
"""

import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from controller.core.errors import ConfigError
from controller.inputs.git import NOT_INSTALLED, ask_git, find_repository, run_git

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

MAX_SHOWN = 5
LINK, SUBMODULE = "120000", "160000"
"""Modes in git's index: https://git-scm.com/docs/index-format."""
POINTERS = (b"version https://git-lfs.github.com/spec/", b"version https://hawser.github.com/spec/", b"/annex/objects/")
"""Beginnings of the files that Git LFS and git-annex leave in place of a content that was not fetched."""
MAX_POINTER_BYTES = 1024
"""A pointer of Git LFS is smaller: https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md."""
EXCLUDED, STATE, IGNORED = "code.exclude", "run.state_dir", "ignored by git"
OF_SYSTEM = re.compile(r"/(bin|boot|dev|etc|home|lib|lib64|proc|run|sbin|sys|usr|var)?")
"""Folders of the system, which are nobody's code."""
DELETED, SPARSE = "deleted here, tracked by git", "outside the sparse checkout"
EXPECTED = frozenset({EXCLUDED, STATE, IGNORED, DELETED, SPARSE})
"""Reasons that nobody needs to be told: the user has chosen them, and the program lacks the files here too."""


@dataclass(frozen=True)
class CodeFiles:
    """Paths below `root`, relative to it.

    Attributes:
        files: regular files.
        links: links to something that is shipped too, by the path from the link's folder to it.
        left_out: everything else, with the reason. A folder that git ignores is one entry, which ends with "/".
    """

    root: Path
    files: list[str] = field(default_factory=list)
    links: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


def list_code(
    root: Path, exclude: Iterable[str], *, tracked_only: bool = False, not_in: Path | None = None
) -> CodeFiles:
    """List the code below the top of a repository, or below a folder outside any.

    Args:
        root: that folder.
        exclude: patterns as in .gitignore.
        tracked_only: without files that git does not track.
        not_in: folder whose files are not code.

    Raises:
        ConfigError: git refuses, or a file cannot be read, or is a placeholder for a large file that was not fetched.
    """
    import pathspec

    root = root.resolve()
    if OF_SYSTEM.fullmatch(str(root)) or root in Path.home().resolve().parents:
        raise ConfigError(
            f"code: {root} is no project, and all of it would be shipped; change into your project's folder"
        )
    found = CodeFiles(root)
    listing = _Listing(found, pathspec.GitIgnoreSpec.from_lines(exclude), tracked_only, not_in and not_in.resolve())
    names = list(dict.fromkeys(listing.names("")))
    links = [name for name in names if not listing.leaves_out(name)]
    unreadable = [name for name in found.files if not os.access(root / name, os.R_OK)]
    if unreadable:
        raise ConfigError(f"code: cannot read {first_few(unreadable)}; make it readable, or name it in code.exclude")
    shipped = {*found.files, *(place.as_posix() for name in found.files for place in Path(name).parents)}
    for name in links:
        _follow(found, name, shipped)
    _refuse_pointers(found)
    _refuse_twins(found)
    found.files.sort()
    return found


@dataclass(frozen=True)
class _Listing:
    """The rules for what is taken into `found`."""

    found: CodeFiles
    spec: "GitIgnoreSpec"
    tracked_only: bool
    not_in: Path | None

    def names(self, place: str) -> Iterator[str]:
        """Yield what git tracks or would add below a folder, which is "" or ends with "/"."""
        folder = self.found.root / place
        top = find_repository(folder)
        if top is None and run_git(["--version"], folder).returncode:
            yield from self._all_names()
        elif top is None:
            with tempfile.TemporaryDirectory() as empty:
                ask_git(["init", "--quiet", empty], folder, may_warn=True)  # as of templates that are missing
                yield from self._untracked(place, f"--git-dir={empty}/.git", f"--work-tree={folder}")
        elif top.resolve() != folder.resolve():
            message = f"code: {folder} has a .git that git does not take for a repository, but for a part of {top}"
            raise ConfigError(f"{message}; repair it, remove it, or name the folder in code.exclude")
        else:
            yield from self._tracked(place)
            if not self.tracked_only:
                yield from self._untracked(place)

    def _tracked(self, place: str) -> Iterator[str]:
        for entry in _entries(ask_git(["ls-files", "-z", "-v", "--stage"], self.found.root / place)):
            facts, _, inner = entry.partition("\t")
            tag, mode, *_ = facts.split()
            name = place + inner
            if mode == SUBMODULE:
                yield from self._inner_repository(f"{name}/", "a submodule that is not checked out")
            elif mode == LINK and (self.found.root / name).is_file() and not (self.found.root / name).is_symlink():
                self.found.left_out[name] = "a link that git has written as a file (core.symlinks=false)"
            elif tag.upper() == "S" and not os.path.lexists(self.found.root / name):
                self.found.left_out[name] = SPARSE
            else:
                yield name

    def _untracked(self, place: str, *options: str) -> Iterator[str]:
        folder, others = self.found.root / place, ("ls-files", "-z", "--others", "--exclude-standard")
        for inner in _entries(ask_git([*options, *others], folder)):
            name = place + inner
            if name.endswith("/"):
                yield from self._inner_repository(name, "a git repository that cannot be read")
            else:
                yield name
        outermost = "/"
        for inner in sorted(_entries(ask_git([*options, *others, "--ignored", "--directory"], folder))):
            if not inner.startswith(outermost):
                self.found.left_out[place + inner] = IGNORED
                outermost = inner if inner.endswith("/") else "/"

    def _inner_repository(self, name: str, otherwise: str) -> Iterator[str]:
        if self._is_unwanted(name):
            return
        if os.path.lexists(self.found.root / name / ".git"):
            yield from self.names(name)
        else:
            self.found.left_out[name] = otherwise

    def _all_names(self) -> Iterator[str]:
        """Yield all names where there is no git, if nothing there is git's."""

        def refuse(error: OSError) -> None:
            raise ConfigError(f"code: cannot read {error.filename}: {error.strerror}; name it in code.exclude")

        root = self.found.root
        for parent, folders, files in os.walk(root, onerror=refuse):
            inside = Path(parent).relative_to(root)
            if own := {".git", ".gitignore"}.intersection((*folders, *files)):
                raise ConfigError(f"code: {Path(parent, *own)} says what is not shipped, and {NOT_INSTALLED}")
            links = [name for name in folders if Path(parent, name).is_symlink()]
            folders[:] = [name for name in folders if not self._is_unwanted(f"{(inside / name).as_posix()}/")]
            yield from ((inside / name).as_posix() for name in (*files, *links))

    def leaves_out(self, name: str) -> bool:
        """Sort a name into `found`; return False if it is a link, which can be judged only when all files are known."""
        path, left_out = self.found.root / name, self.found.left_out
        is_here = os.path.realpath(path.parent) == str(path.parent)  # not in a folder that is a link by now
        if not is_here or not os.path.lexists(path):
            left_out[name] = DELETED
        elif self._is_unwanted(name):
            return True
        elif any("\ud800" <= letter <= "\udfff" for letter in name):
            left_out[name.encode(errors="surrogateescape").decode(errors="backslashreplace")] = "its name is not UTF-8"
        elif path.is_symlink():
            return False
        elif path.is_file():
            if path.name == ".gitignore" and b"\0" in path.read_bytes():
                raise ConfigError(f"code: {path} is text in UTF-16, of which git reads no pattern; save it as UTF-8")
            self.found.files.append(name)
        else:
            left_out[name] = "neither a file, a folder nor a link"
        return True

    def _is_unwanted(self, name: str) -> bool:
        """Return whether the user keeps it out; it is then left out by the name of the outermost such folder."""
        if self.not_in is not None and (self.found.root / name).is_relative_to(self.not_in):
            self.found.left_out[f"{os.path.relpath(self.not_in, self.found.root)}/"] = STATE
            return True
        if not self.spec.match_file(name):
            return False
        above = [f"{place.as_posix()}/" for place in reversed(Path(name).parents) if place != Path()]
        self.found.left_out[next(filter(self.spec.match_file, above), name)] = EXCLUDED
        return True


def _entries(answer: str) -> list[str]:
    return [entry for entry in answer.split("\0") if entry]


def _follow(found: CodeFiles, name: str, shipped: set[str]) -> None:
    """Take a link if it leads to what is shipped, whatever other links are on its way."""
    path = found.root / name
    try:
        target = Path(os.path.realpath(path, strict=True))
    except OSError as error:  # also if it leads to itself
        found.left_out[name] = f"a link that leads nowhere ({error.strerror}): {path.readlink()}"
        return
    if not target.is_relative_to(found.root):
        found.left_out[name] = f"a link that leaves the code: {target}"
    elif path.is_relative_to(target):
        found.left_out[name] = f"a link to a folder that holds it: {target}"
    elif (inside := target.relative_to(found.root).as_posix()) not in shipped:
        found.left_out[name] = f"a link to {inside}, which is not shipped"
    else:
        found.links[name] = os.path.relpath(target, path.parent)


def _refuse_pointers(found: CodeFiles) -> None:
    """Raise ConfigError for files in place of large ones: a program would read them as weights or data."""
    small = [name for name in found.files if (found.root / name).stat().st_size < MAX_POINTER_BYTES]
    if pointers := [name for name in small if (found.root / name).read_bytes().startswith(POINTERS)]:
        verb = "stands for a larger file" if len(pointers) == 1 else "stand for larger files"
        raise ConfigError(
            f"code: {first_few(pointers)} {verb} that Git LFS or git-annex has not fetched; run `git lfs pull` or `git "
            f"annex get .` in {found.root}, or name them in code.exclude"
        )


def _refuse_twins(found: CodeFiles) -> None:
    """Raise ConfigError if git tracks two names that are one file on a disk that ignores case."""
    first: dict[str, str] = {}
    for name in found.files:
        other = first.setdefault(name.casefold(), name)
        paths = (found.root / other, found.root / name)
        if other != name and paths[0].samefile(paths[1]) and paths[0].stat().st_nlink == 1:
            raise ConfigError(
                f"code: {other} and {name} are two files for git and one on this disk; rename one of them"
            )


def first_few(names: Iterable[str]) -> str:
    """Return the first few names, and how many more there are."""
    every = list(names)
    more = f" and {len(every) - MAX_SHOWN} more" if len(every) > MAX_SHOWN else ""
    return f"{', '.join(every[:MAX_SHOWN])}{more}"

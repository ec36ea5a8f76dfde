"""What may happen to the state folder of a laptop. The bucket of `cloud=here`, in `here/`, is left alone."""

import errno
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

GARBAGE = b"\xff\x00{[not json\n"
SPARED = ("here", "localcloud", "keys")
"""The bucket and the pods, and the key, without which nothing reaches them."""
_WRITES = {"os.mkdir": 0, "os.rename": 1, "os.remove": 0, "os.rmdir": 0, "os.link": 1, "os.symlink": 1}
"""Audit events of changes, with the position of the path. https://docs.python.org/3/library/audit_events.html"""
_state: list[tuple[Path, int]] = []
"""The folder that takes no writes, and their error; a hook cannot be removed, so it asks this."""


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if not _state or (event != "open" and event not in _WRITES):
        return
    path = arguments[_WRITES.get(event, 0)]
    if event == "open" and not (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        return
    [(folder, number)] = _state
    if not isinstance(path, str | os.PathLike) or not Path(path).is_relative_to(folder):
        return
    if Path(path).relative_to(folder).parts[:1] not in [(name,) for name in SPARED]:
        raise OSError(number, os.strerror(number), str(path))


@contextmanager
def refusing_writes(folder: Path, number: int) -> Iterator[None]:
    """Let each change below a folder fail, also that of root, whom no mode stops."""
    if _refuse not in _installed:
        sys.addaudithook(_refuse)
        _installed.append(_refuse)
    _state[:] = [(folder, number)]
    try:
        yield
    finally:
        _state.clear()


_installed: list[Callable[..., None]] = []


def notes_of(state: Path) -> list[Path]:
    """Return the files that are this machine's notes."""
    return [file for file in state.rglob("*") if file.is_file() and file.relative_to(state).parts[0] not in SPARED]


def _each(change: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(state: Path) -> None:
        for file in notes_of(state):
            change(file)

    return damage


def _replace(file: Path, make: Callable[[Path], object]) -> None:
    file.unlink()
    make(file)


def _link_to_full(file: Path) -> None:
    """Let lines fail only as they are written; what reads whole files would read for ever."""
    file.symlink_to("/dev/full")


def _delete(state: Path) -> None:
    for path in [path for path in state.iterdir() if path.name not in SPARED]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _files_for_folders(state: Path) -> None:
    folders = [path.name for path in state.iterdir() if path.is_dir() and path.name not in SPARED]
    _delete(state)
    for name in folders:
        (state / name).write_text("in the way")


OF_LINES = "full at each write"
"""The damage that concerns files of lines alone."""
DAMAGES: dict[str, Callable[[Path], object]] = {
    OF_LINES: _each(lambda file: _replace(file, _link_to_full) if file.suffix == ".jsonl" else None),
    "deleted": _delete,
    "files in place of folders": _files_for_folders,
    "folders in place of files": _each(lambda file: _replace(file, Path.mkdir)),
    "garbage": _each(lambda file: file.write_bytes(GARBAGE)),
    "cut short": _each(lambda file: os.truncate(file, file.stat().st_size * 2 // 3)),
    "empty": _each(lambda file: os.truncate(file, 0)),
    "other json": _each(lambda file: file.write_text("[1]\n")),
    "nested": _each(lambda file: file.write_text("[" * 100_000 + "\n")),
}
"""What happens to the notes, once."""
ERRORS = {"full": errno.ENOSPC, "read-only": errno.EROFS, "broken": errno.EIO, "not ours": errno.EACCES}
"""How writes fail from then on."""


@contextmanager
def damaged(state: Path, how: str) -> Iterator[None]:
    """Damage a state folder in one of these ways while the context is open."""
    if how in DAMAGES:
        DAMAGES[how](state)
        yield
    else:
        with refusing_writes(state, ERRORS[how]):
            yield

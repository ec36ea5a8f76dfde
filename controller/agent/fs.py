"""Where the agent keeps what, and how a file appears there whole or not at all."""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from .formats import dump, format_problem


class AgentError(Exception):
    """Told to the caller as {"error", "detail"}."""

    def __init__(self, error: str, detail: str = "") -> None:
        super().__init__(error)
        self.detail = detail


def agent_root() -> Path:
    return Path.home() / ".slipway"


def safe_join(folder: str, name: str) -> Path:
    """A path below the agent's own folder, from a name that is one harmless path component."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", name):
        raise AgentError(f"not a name that something in {folder}/ can have: {name!r}")
    return agent_root() / folder / name


def attempt_folder(run_id: str, attempt: int | None) -> Path:
    """The folder of one attempt; of the latest one where `attempt` is None (attempt-0 where there is none)."""
    run = safe_join("runs", run_id)
    if attempt is None:
        attempt = max((attempt_number(path) for path in run.glob("attempt-*")), default=0)
    return run / f"attempt-{int(attempt)}"


def attempt_number(folder: Path) -> int:
    return int(folder.name.partition("-")[2])


def write_atomic(path: Path, data: bytes) -> None:
    """Replace the file, readable by its owner alone."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.touch(mode=0o600)
    draft.write_bytes(data)
    draft.replace(path)


def write_json(path: Path, body: Mapping[str, Any]) -> None:
    write_atomic(path, dump(body))


def read_json(path: Path) -> Any:
    """Return what `write_json` wrote, None where there is no file.

    Raises:
        AgentError: it has another format.
    """
    try:
        body = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    return checked(body, str(path))


def checked(body: Any, where: str) -> dict[str, Any]:
    """Return a document without its format.

    Raises:
        AgentError: it has another one, or none.
    """
    if problem := format_problem(body, where):
        raise AgentError(problem)
    return {key: value for key, value in body.items() if key != "format"}


def read_range(path: Path, offset: int, size: int) -> bytes:
    """At most `size` bytes from `offset` on; none where there is no file."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(size)
    except FileNotFoundError:
        return b""


def file_size(path: Path) -> int:
    """Bytes; 0 where there is no file."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def free_gb() -> float:
    """Space on the disk of the home folder, GB; an emulated worker may have less."""
    emulated = read_range(Path(os.environ.get("SLIPWAY_FREE_GB", "/nonexistent")), 0, 32)
    if emulated:
        return float(emulated)
    disk = os.statvfs(Path.home())
    return disk.f_bavail * disk.f_frsize / 1e9


def remove_tree(folder: Path) -> None:
    import shutil

    if folder.exists():
        shutil.rmtree(folder)


@contextmanager
def locked(name: str) -> Iterator[IO[bytes]]:
    """One process of this worker at a time. A child that inherits the file goes on holding the lock."""
    path = agent_root() / "locks" / name
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def wait_until(done: Callable[[], bool], seconds: float) -> bool:
    """Poll; says whether it came true in time."""
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True

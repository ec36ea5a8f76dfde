"""The agent's file system layout, atomic writes, and locks."""

import fcntl
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from .formats import dump, format_problem

CHUNK_BYTES = 1 << 20
"""Bytes read at a time."""


class AgentError(Exception):
    """Failure of a command, reported to the caller as {"error", "detail"}."""

    def __init__(self, error: str, detail: str = "") -> None:
        super().__init__(error)
        self.detail = detail


def agent_root() -> Path:
    """Return the agent's folder; on a machine without a pod it is not the user's own ~/.slipway."""
    return Path(os.environ.get("SLIPWAY_AGENT_ROOT") or Path.home() / ".slipway")


def write_heartbeat() -> None:
    """Tell the dead man's switch of the pod (`controller/resources/pod/dead_mans_switch.py`) that it is in use."""
    path = agent_root() / "heartbeat"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)
    except OSError as error:  # a full disk; what the command itself needs is reported by the command
        print(f"cannot write {path}: {error}", file=sys.stderr, flush=True)


def safe_join(folder: str, name: str) -> Path:
    """Return a path in a folder of the agent, after checking that `name` is a single safe path component."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", name):
        raise AgentError(f"{name!r} is not a valid name in {folder}/")
    return agent_root() / folder / name


def attempt_folder(run_id: str, attempt: int | None) -> Path:
    """Return the folder of an attempt; None means the latest one, or attempt-0 if there is none."""
    run = safe_join("runs", run_id)
    if attempt is None:
        attempt = max((attempt_number(path) for path in run.glob("attempt-*")), default=0)
    return run / f"attempt-{int(attempt)}"


def attempt_number(folder: Path) -> int:
    return int(folder.name.partition("-")[2])


def write_atomic(path: Path, data: bytes) -> None:
    """Replace the file atomically, readable by its owner only."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.touch(mode=0o600)
    draft.write_bytes(data)
    draft.replace(path)


def write_json(path: Path, body: Mapping[str, Any]) -> None:
    write_atomic(path, dump(body))


def read_json(path: Path) -> Any:
    """Return what `write_json` wrote, or None if there is no file; raise AgentError for another format."""
    try:
        body = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    return checked(body, str(path))


def checked(body: Any, where: str) -> dict[str, Any]:
    """Return a document without its format field; raise AgentError if the format is unknown or missing."""
    if problem := format_problem(body, where):
        raise AgentError(problem)
    return {key: value for key, value in body.items() if key != "format"}


def read_range(path: Path, offset: int, size: int) -> bytes:
    """Return at most `size` bytes starting at `offset`, or b"" if there is no file."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(size)
    except FileNotFoundError:
        return b""


def file_size(path: Path) -> int:
    """Return the size in bytes, or 0 if there is no file."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def free_gb() -> float:
    """Return the free space on the disk of the agent's folder in GB; an emulated worker may report less."""
    emulated = read_range(Path(os.environ.get("SLIPWAY_FREE_GB", "/nonexistent")), 0, 32)
    if emulated:
        return float(emulated)
    disk = os.statvfs(os.environ.get("SLIPWAY_AGENT_ROOT") or Path.home())
    return disk.f_bavail * disk.f_frsize / 1e9


def remove_tree(folder: Path) -> None:
    import shutil

    if folder.exists():
        shutil.rmtree(folder)


@contextmanager
def locked(name: str) -> Iterator[IO[bytes]]:
    """Hold an exclusive lock on this worker. A child that inherits the file keeps holding it."""
    path = agent_root() / "locks" / name
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def wait_until(done: Callable[[], bool], seconds: float) -> bool:
    """Poll until `done` returns true; return False on timeout."""
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True

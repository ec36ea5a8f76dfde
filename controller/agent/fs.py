"""The agent's files: their format, its layout of folders, atomic writes, locks, and hashes of trees."""

import fcntl
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

FORMAT = 1


def format_problem(body: Any, where: str) -> str:
    """Return why a document cannot be read, or "" if its format is the current one. Mirrors `conf.formats`."""
    written = body.get("format") if isinstance(body, dict) else None
    if written is None:
        return f"{where} has no format; this slipway reads format {FORMAT}: something else or an older slipway wrote it"
    if written != FORMAT:
        return f"{where} has format {written!r:.20}; this slipway reads format {FORMAT}: update slipway"
    return ""


def dump(body: Mapping[str, Any]) -> bytes:
    """Serialize a document to JSON, including its format version."""
    return json.dumps({"format": FORMAT, **body}).encode()


def say(answer: Mapping[str, Any]) -> None:
    print(dump(answer).decode(), flush=True)


def complain(message: str) -> None:
    """Print a line to the log of this process. A full disk takes none, and that ends nobody."""
    with suppress(OSError):
        print(message, file=sys.stderr, flush=True)


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


def boot_time() -> float:
    """Return the seconds since this boot, sleep included. No change of the time of day moves it, so limits use it."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))  # macOS has only the latter


def write_heartbeat() -> None:
    """Tell the dead man's switch of the pod (`controller/resources/dead_mans_switch.py`) that it is in use.

    The file's time is that of this boot: a time of day that stands still, or was set back, would look like silence.
    """
    path = agent_root() / "heartbeat"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)
        os.utime(path, (boot_time(), boot_time()))
    except OSError as error:  # a full disk; what the command itself needs is reported by the command
        complain(f"cannot write {path}: {error}")


def note_worker(index: int | None) -> None:
    """Keep which worker of the pod this is, for the dead man's switch; None: the caller does not know."""
    path, wanted = agent_root() / "worker.json", dump({"index": index})
    try:
        if index is not None and not (path.is_file() and path.read_bytes() == wanted):
            write_atomic(path, wanted)
    except OSError as error:  # as above
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


def read_json(path: Path, *keys: str) -> Any:
    """Return what `write_json` wrote, with these keys, or None if there is no file; raise AgentError if it is not."""
    try:
        body = json.loads(path.read_bytes(), object_pairs_hook=_object)
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise AgentError(f"{path} is damaged: no JSON ({error})") from None
    found = checked(body, str(path))
    if missing := [key for key in keys if key not in found]:
        raise AgentError(f"{path} is damaged: it has no {missing[0]}")
    return found


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("it has a name twice")
    return found


def checked(body: Any, where: str) -> dict[str, Any]:
    """Return a document without its format field; raise AgentError if the format is unknown or missing."""
    if problem := format_problem(body, where):
        raise AgentError(problem)
    return {key: value for key, value in body.items() if key != "format"}


MAX_DEPTH = 50
"""Levels of nesting of what a program wrote; the controller refuses a few more, and so does whoever writes JSON."""


def parse_object(text: bytes) -> dict[str, Any]:
    """Return the JSON object of a program; raise ValueError if it is none, or so deep that others cannot read it."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError("is not a JSON object") from error
    if not isinstance(found, dict):
        raise ValueError("is not a JSON object")
    if not _is_shallow(found, MAX_DEPTH):
        raise ValueError("is nested too deeply")
    return found


def _is_shallow(value: Any, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels > 0 and all(_is_shallow(each, levels - 1) for each in inner)


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


def file_hash(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def tree_files(folder: Path) -> list[str]:
    """Return the sorted relative POSIX paths of the files and links below a folder, without `__pycache__`."""
    found = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        place = Path(parent)
        links = [name for name in folders if (place / name).is_symlink()]
        found += [(place / name).relative_to(folder).as_posix() for name in files + links]
    return sorted(found)


def tree_hash(folder: Path, paths: Iterable[str] | None = None) -> str:
    """Return the SHA-256 of a tree, over the sorted lines [path, kind, SHA-256 of the content] of its files.

    The kind is "file", "exec" (executable by its owner) or "link" (its content is its target).

    Args:
        folder: root of the tree.
        paths: relative POSIX paths of the files to hash; by default all files, without `__pycache__`.
    """
    return files_hash({name: folder / name for name in (tree_files(folder) if paths is None else paths)})


def files_hash(files: Mapping[str, Path], links: Mapping[str, str] | None = None) -> str:
    """Return the `tree_hash` of a tree that is still in several places.

    Args:
        files: where its files are, by their relative POSIX path in it.
        links: the targets of its links.
    """
    digest = hashlib.sha256()
    targets = {name: os.fsencode(path.readlink()) for name, path in files.items() if path.is_symlink()}
    targets |= {name: os.fsencode(target) for name, target in (links or {}).items()}
    for name in sorted({*files, *targets}):
        if name in targets:
            kind, content = "link", hashlib.sha256(targets[name]).hexdigest()
        else:
            kind, content = "exec" if files[name].stat().st_mode & 0o100 else "file", file_hash(files[name])
        digest.update(json.dumps([name, kind, content]).encode() + b"\n")
    return digest.hexdigest()


def current_tree_hash(folder: Path) -> str | None:
    """Return the hash of the folder as it is, or None if it is missing or being replaced."""
    try:
        return tree_hash(folder) if folder.is_dir() else None
    except FileNotFoundError:
        return None

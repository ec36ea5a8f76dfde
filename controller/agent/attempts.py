"""Attempts of a run on this worker: their state, and secrets, kept in one private file while the program lives.

Masking replaces a secret in the log with asterisks of the same length, so offsets into the log never change. The log is
masked before the secrets file is deleted: if there is no secrets file, the log holds no secrets.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .fs import (
    CHUNK_BYTES,
    AgentError,
    agent_root,
    attempt_folder,
    attempt_number,
    file_size,
    parse_object,
    read_json,
    read_range,
    write_atomic,
    write_json,
)
from .worker_processes import boot_id, is_alive

if TYPE_CHECKING:
    from .protocol import Attempt, State

MIN_SECRET_LENGTH = 6
"""Shorter values are not masked: that would hide half of the log and protect nothing."""


def store_secrets(run: Path, secrets: dict[str, str]) -> None:
    """Write the secrets of the next attempt, replacing any that a lost attempt left behind."""
    delete_secrets(run)
    if secrets:
        write_json(run / "secrets", {"variables": secrets})


def secret_environment(run: Path) -> dict[str, str]:
    """Return the secret variables of the program. NETRC holds the content of a file and is replaced with its path."""
    secrets = _kept(run)
    if "NETRC" in secrets:
        write_atomic(run / "netrc", secrets["NETRC"].encode())
        secrets["NETRC"] = str(run / "netrc")
    return secrets


def delete_secrets(run: Path) -> None:
    """Delete the secrets, once the program has ended and its log is masked."""
    for name in ("netrc", "secrets"):
        (run / name).unlink(missing_ok=True)


@contextmanager
def tool_environment(secrets: dict[str, str]) -> Iterator[dict[str, str]]:
    """Yield the variables for a tool, with a temporary file for NETRC. Secrets in its error messages are masked."""
    netrc, mask = agent_root() / f".netrc-{os.getpid()}", SecretMask(secrets)
    given = dict(secrets)
    try:
        if "NETRC" in given:
            write_atomic(netrc, given["NETRC"].encode())
            given["NETRC"] = str(netrc)
        yield given
    except AgentError as error:
        message, detail = (mask.apply(text.encode()).decode() for text in (str(error), error.detail))
        raise AgentError(message, detail) from None
    finally:
        netrc.unlink(missing_ok=True)


class SecretMask:
    def __init__(self, secrets: dict[str, str]) -> None:
        secret_words = {word.encode() for name, value in secrets.items() for word in _values_to_mask(name, value)}
        self._secret_values = sorted(
            (word for word in secret_words if len(word) >= MIN_SECRET_LENGTH), key=len, reverse=True
        )
        self._pattern = re.compile(b"|".join(map(re.escape, self._secret_values))) if self._secret_values else None

    @classmethod
    def for_run(cls, run: Path) -> SecretMask:
        """Return the mask of a run. Create it before reading the log; see the module docstring."""
        return cls(_kept(run))

    def __bool__(self) -> bool:
        return bool(self._secret_values)

    @property
    def max_length(self) -> int:
        """Length of the longest secret in bytes."""
        return len(self._secret_values[0]) if self._secret_values else 0

    def apply(self, data: bytes) -> bytes:
        """Return `data` with secrets masked; the length stays the same."""
        return self._pattern.sub(lambda found: b"*" * len(found[0]), data) if self._pattern else data

    def partial_length(self, data: bytes) -> int:
        """Return how many trailing bytes may be the beginning of a secret that is not complete yet."""
        sizes = range(min(self.max_length - 1, len(data)), 0, -1)
        return next((n for n in sizes if any(len(w) > n and w.startswith(data[-n:]) for w in self._secret_values)), 0)

    def mask_file(self, path: Path, begin: int = 0) -> int:
        """Mask the log in place from `begin` on; return the offset up to which it is safe to show."""
        end, at = file_size(path), max(0, begin - self.max_length)
        if self._pattern is None or at >= end:
            return end
        rest = b""
        with path.open("r+b") as file:
            while at < end:
                data = os.pread(file.fileno(), min(CHUNK_BYTES + self.max_length, end - at), at)
                for found in self._pattern.finditer(data):
                    os.pwrite(file.fileno(), b"*" * len(found[0]), at + found.start())
                rest = self.apply(data)
                if at + len(data) >= end or not data:
                    break
                at += len(data) - self.max_length  # a secret may span two chunks
        return end - self.partial_length(rest)


def _kept(run: Path) -> dict[str, str]:
    return (read_json(run / "secrets") or {"variables": {}})["variables"]


def _values_to_mask(name: str, value: str) -> list[str]:
    """Return the strings to mask: the passwords of a netrc, or the value and each of its lines."""
    if name == "NETRC":
        return re.findall(r"\bpassword\s+(\S+)", value)
    return [value, *(line.strip() for line in value.splitlines())]


MAX_SUMMARY_BYTES = 1 << 20
TOLD_OF_END = (
    *("code", "signal", "started", "ended", "error", "oom_kills", "free_gb"),
    *("upload", "upload_error", "notice"),
)


def attempt_status(folder: Path) -> dict[str, Any]:
    """Return whether an attempt is absent, running or exited, and how it ended.

    A killed supervisor leaves no record of how its program ended: `lost` means that the end still has to be recorded.
    Liveness is checked first and exit.json last, so that an attempt that ends in between does not look lost.
    """
    begun = read_json(folder / "pid.json", "boot_id", "started", "program", "supervisor")
    if begun is None:
        return {"state": "absent"}
    same_boot = begun["boot_id"] == boot_id()
    program, supervisor = (same_boot and is_alive(begun[who]) for who in ("program", "supervisor"))
    ended = read_json(folder / "exit.json")
    if ended:
        lost = ended["upload"] == "pending" and not supervisor
        return {"state": "exited", **ended, "uploading": supervisor, "lost": lost}
    if supervisor:
        return {"state": "running", "started": begun["started"]}
    if program:
        return {"state": "running", "started": begun["started"], "error": "supervisor lost; the program still runs"}
    error = "supervisor lost" if same_boot else "the worker was restarted"
    return {"state": "exited", "started": begun["started"], "error": error, "lost": True}


def active_attempt() -> Attempt | None:
    """Return the attempt that is alive on this worker, or None."""
    for path in sorted(agent_root().glob("runs/*/attempt-*/pid.json")):
        folder = path.parent
        if not (folder / "exit.json").exists() and attempt_status(folder)["state"] == "running":
            return {"run_id": folder.parent.name, "attempt": attempt_number(folder)}
    return None


def state(run_id: str, attempt: int | None = None, tail_bytes: int = 16384) -> State:
    """Return the state of an attempt (by default the latest), with the end of its log and its summary."""
    folder = attempt_folder(run_id, attempt)
    status = attempt_status(folder)
    mask = SecretMask.for_run(folder.parent)
    size = file_size(folder / "log")
    found: Any = {
        "run_id": run_id,
        "attempt": attempt_number(folder),
        "state": status["state"],
        **{key: status.get(key) for key in TOLD_OF_END},
        "log_size": size,
        "log_tail": _log_tail(folder / "log", size, tail_bytes, mask).decode(errors="replace"),
        "summary": _read_summary(folder.parent),
    }
    return found


def _log_tail(log: Path, size: int, tail_bytes: int, mask: SecretMask) -> bytes:
    """Return the end of the log, masking secrets that begin before it or are incomplete."""
    begin = max(0, size - tail_bytes)
    early = max(0, begin - mask.max_length)
    data = mask.apply(read_range(log, early, size - early))
    return data[begin - early : len(data) - mask.partial_length(data)]


def _read_summary(run: Path) -> dict[str, Any] | None:
    """Read the program's summary, which may be malformed or huge."""
    path = run / "summary.json"
    if file_size(path) > MAX_SUMMARY_BYTES:
        return {"error": f"summary.json is larger than {MAX_SUMMARY_BYTES} bytes"}
    try:
        text = path.read_bytes()
        return None if text.strip() == b"null" else parse_object(text)
    except FileNotFoundError:
        return None
    except ValueError as error:
        return {"error": f"summary.json is not JSON that can be kept: {error.__cause__ or f'it {error}'}"}

"""Secrets of a run: kept in one private file while its program lives, and masked in its output.

Masking replaces a secret in the log with asterisks of the same length, so offsets into the log never change. The log is
masked before the secrets file is deleted: if there is no secrets file, the log holds no secrets.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .fs import CHUNK_BYTES, AgentError, agent_root, file_size, read_json, write_atomic, write_json

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
    def for_run(cls, run: Path) -> "SecretMask":
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

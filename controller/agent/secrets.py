"""The secrets of a run, for as long as its program lives: in one file of its owner's, and masked in what it prints.

A secret in the log is overwritten by as many asterisks, so that no offset into the log ever changes. The log is masked
before the file goes: whoever finds no secrets finds a log without any.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .fs import AgentError, agent_root, file_size, read_json, write_atomic, write_json
from .tree_hash import CHUNK_BYTES

MIN_SECRET_LENGTH = 6
"""Masking what is shorter would hide half of the log and protect nothing."""


def store_secrets(run: Path, secrets: dict[str, str]) -> None:
    """Put the secrets of the next attempt in their file, in place of any that a lost one may have left."""
    delete_secrets(run)
    if secrets:
        write_json(run / "secrets", {"variables": secrets})


def secret_environment(run: Path) -> dict[str, str]:
    """The variables of the program; NETRC is the content of a file, and becomes the path of one."""
    secrets = _kept(run)
    if "NETRC" in secrets:
        write_atomic(run / "netrc", secrets["NETRC"].encode())
        secrets["NETRC"] = str(run / "netrc")
    return secrets


def delete_secrets(run: Path) -> None:
    """Once the program has ended and its log is masked."""
    for name in ("netrc", "secrets"):
        (run / name).unlink(missing_ok=True)


@contextmanager
def tool_environment(secrets: dict[str, str]) -> Iterator[dict[str, str]]:
    """The variables for a tool that runs now; the file of NETRC is there for as long. Its complaints are masked."""
    netrc, mask = agent_root() / f".netrc-{os.getpid()}", SecretMask(secrets)
    given = dict(secrets)
    try:
        if "NETRC" in given:
            write_atomic(netrc, given["NETRC"].encode())
            given["NETRC"] = str(netrc)
        yield given
    except AgentError as error:
        words, detail = (mask.masked(text.encode()).decode() for text in (str(error), error.detail))
        raise AgentError(words, detail) from None
    finally:
        netrc.unlink(missing_ok=True)


class SecretMask:
    """What must not be read in a log."""

    def __init__(self, secrets: dict[str, str]) -> None:
        words = {word.encode() for name, value in secrets.items() for word in _values_to_mask(name, value)}
        self._secret_values = sorted((word for word in words if len(word) >= MIN_SECRET_LENGTH), key=len, reverse=True)
        self._pattern = re.compile(b"|".join(map(re.escape, self._secret_values))) if self._secret_values else None

    @classmethod
    def of(cls, run: Path) -> SecretMask:
        """To be made before the log is read, not after: see above."""
        return cls(_kept(run))

    def __bool__(self) -> bool:
        return bool(self._secret_values)

    @property
    def longest(self) -> int:
        """Bytes."""
        return len(self._secret_values[0]) if self._secret_values else 0

    def masked(self, data: bytes) -> bytes:
        """As long as `data`."""
        return self._pattern.sub(lambda found: b"*" * len(found[0]), data) if self._pattern else data

    def begun(self, data: bytes) -> int:
        """How many bytes at the end may be the beginning of a secret whose rest is not there yet."""
        sizes = range(min(self.longest - 1, len(data)), 0, -1)
        return next((n for n in sizes if any(len(w) > n and w.startswith(data[-n:]) for w in self._secret_values)), 0)

    def cover(self, path: Path, begin: int = 0) -> int:
        """Overwrite what a log holds from `begin` on; returns up to where it may be shown."""
        end, at = file_size(path), max(0, begin - self.longest)
        if self._pattern is None or at >= end:
            return end
        rest = b""
        with path.open("r+b") as file:
            while at < end:
                data = os.pread(file.fileno(), min(CHUNK_BYTES + self.longest, end - at), at)
                for found in self._pattern.finditer(data):
                    os.pwrite(file.fileno(), b"*" * len(found[0]), at + found.start())
                rest = self.masked(data)
                if at + len(data) >= end or not data:
                    break
                at += len(data) - self.longest  # a secret may lie across two pieces
        return end - self.begun(rest)


def _kept(run: Path) -> dict[str, str]:
    return (read_json(run / "secrets") or {"variables": {}})["variables"]


def _values_to_mask(name: str, value: str) -> list[str]:
    """Of a netrc the passwords, of a key in several lines each of them."""
    if name == "NETRC":
        return re.findall(r"\bpassword\s+(\S+)", value)
    return [value, *(line.strip() for line in value.splitlines())]

"""The bytes of objects: immutable files, hashed while they are written."""

from __future__ import annotations

import base64
import hashlib
import os
import uuid
from collections.abc import Iterable
from pathlib import Path

import google_crc32c

_CHUNK_BYTES = 1 << 20


class Digest:
    """CRC32C and MD5 over bytes as they come."""

    def __init__(self) -> None:
        self._md5 = hashlib.md5(usedforsecurity=False)
        self._crc = google_crc32c.Checksum()
        self.size = 0

    def update(self, data: bytes) -> None:
        """Takes in the next bytes."""
        self._md5.update(data)
        self._crc.update(data)
        self.size += len(data)

    def fields(self) -> dict[str, str]:
        """`size`, `md5Hash` and `crc32c` as an object's resource holds them."""
        return {
            "size": str(self.size),
            "md5Hash": base64.b64encode(self._md5.digest()).decode(),
            "crc32c": base64.b64encode(self._crc.digest()).decode(),
        }


class Blobs:
    """A folder of files named by random ids."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name in ("partial", "whole"):
            (folder / name).mkdir(parents=True, exist_ok=True)

    def path(self, blob: str) -> Path:
        """Where a finished blob lies."""
        return self._folder / "whole" / blob[:2] / blob

    def partial(self, blob: str) -> Path:
        """Where a blob lies while it is being written."""
        return self._folder / "partial" / blob

    def create(self) -> str:
        """The id of a new blob, and an empty partial file for it."""
        blob = uuid.uuid4().hex
        self.partial(blob).touch()
        return blob

    def finish(self, blob: str) -> None:
        """Partial becomes whole, atomically."""
        target = self.path(blob)
        target.parent.mkdir(exist_ok=True)
        self.partial(blob).replace(target)

    def link(self, blob: str) -> str:
        """A second id for the same bytes, at no cost."""
        copy = uuid.uuid4().hex
        self.path(copy).parent.mkdir(exist_ok=True)
        os.link(self.path(blob), self.path(copy))
        return copy

    def delete(self, blob: str) -> None:
        """Removes a whole or partial blob; who is reading it reads on."""
        self.path(blob).unlink(missing_ok=True)
        self.partial(blob).unlink(missing_ok=True)

    def digest(self, blob: str) -> Digest:
        """Hashes a partial blob. Blocking: for a thread where it may be large."""
        digest = Digest()
        with self.partial(blob).open("rb") as file:
            while piece := file.read(_CHUNK_BYTES):
                digest.update(piece)
        return digest

    def join(self, blobs: Iterable[str]) -> str:
        """A new partial blob with the bytes of others, one after another. Blocking."""
        joined = self.create()
        with self.partial(joined).open("wb") as target:
            for blob in blobs:
                with self.path(blob).open("rb") as source:
                    while piece := source.read(_CHUNK_BYTES):
                        target.write(piece)
        return joined

"""Contents of objects: immutable files, hashed while they are written."""

import base64
import hashlib
import os
import uuid
from collections.abc import Iterable
from pathlib import Path

import google_crc32c

_CHUNK_BYTES = 1 << 20


class Digest:
    """Incremental CRC32C and MD5."""

    def __init__(self) -> None:
        self._md5 = hashlib.md5(usedforsecurity=False)
        self._crc = google_crc32c.Checksum()
        self.size = 0

    def update(self, data: bytes) -> None:
        self._md5.update(data)
        self._crc.update(data)
        self.size += len(data)

    def resource_fields(self) -> dict[str, str]:
        """Return `size`, `md5Hash` and `crc32c` in the format of an object resource."""
        return {
            "size": str(self.size),
            "md5Hash": base64.b64encode(self._md5.digest()).decode(),
            "crc32c": base64.b64encode(self._crc.digest()).decode(),
        }


class Blobs:
    """Folder of files named by random IDs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name in ("partial", "whole"):
            (folder / name).mkdir(parents=True, exist_ok=True)

    def path(self, blob: str) -> Path:
        return self._folder / "whole" / blob[:2] / blob

    def partial(self, blob: str) -> Path:
        return self._folder / "partial" / blob

    def create(self) -> str:
        """Create an empty partial file and return the ID of its blob."""
        blob = uuid.uuid4().hex
        self.partial(blob).touch()
        return blob

    def finish(self, blob: str) -> None:
        """Turn a partial blob into a whole one, atomically."""
        target = self.path(blob)
        target.parent.mkdir(exist_ok=True)
        self.partial(blob).replace(target)

    def link(self, blob: str) -> str:
        """Return a second ID for the same bytes, using a hard link."""
        copy = uuid.uuid4().hex
        self.path(copy).parent.mkdir(exist_ok=True)
        os.link(self.path(blob), self.path(copy))
        return copy

    def delete(self, blob: str) -> None:
        """Delete a whole or partial blob; open readers can continue."""
        self.path(blob).unlink(missing_ok=True)
        self.partial(blob).unlink(missing_ok=True)

    def digest(self, blob: str) -> Digest:
        """Hash a partial blob. Blocking: use a thread if it may be large."""
        digest = Digest()
        with self.partial(blob).open("rb") as file:
            while piece := file.read(_CHUNK_BYTES):
                digest.update(piece)
        return digest

    def join(self, blobs: Iterable[str]) -> str:
        """Create a partial blob that concatenates others. Blocking."""
        joined = self.create()
        with self.partial(joined).open("wb") as target:
            for blob in blobs:
                with self.path(blob).open("rb") as source:
                    while piece := source.read(_CHUNK_BYTES):
                        target.write(piece)
        return joined

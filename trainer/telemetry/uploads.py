"""Files that grow, in the run's folder: a thread sends each byte once, and readers see one file.

Cloud Storage cannot append, but `compose` joins an object with a new one in the bucket, without sending it again
(https://cloud.google.com/storage/docs/composite-objects): what is new goes there as a small object, is joined and
deleted. Readers need to know nothing of it. Objects that stay apart would be thousands, or be merged by sending them
again, and TensorBoard and everybody else who reads a run would have to put them together.
"""

import base64
import logging
import os
import re
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import fsspec
import google_crc32c

from trainer.checkpoint.storage import RunStorage, first_line, is_outage

CHUNK_BYTES = 1 << 20
PARTS = "parts"
"""Folder of what is on its way: an object for each entry of the run's folder, so kills leave few."""


class Copy(NamedTuple):
    """What the run's folder holds of a file: bytes, their CRC32C, and the generation of the object."""

    size: int
    crc: int
    generation: str = ""


def finished() -> Future[None]:
    """Return an upload that is over."""
    future: Future[None] = Future()
    future.set_result(None)
    return future


class Uploads:
    """Copies files of a local folder, which only grow or are replaced, to the run's folder."""

    def __init__(self, local: Path, storage: RunStorage) -> None:
        """Prepare without a request."""
        self._local, self._storage = local, storage
        self._thread = ThreadPoolExecutor(1, "uploads")
        self._last = finished()
        self._sent: dict[Path, tuple[int, Copy]] = {}  # inode and copy of each file that has arrived up to there

    @cached_property
    def _store(self) -> "_Bucket | _Folder":
        folder = self._storage.folder
        return _Bucket(folder) if folder.startswith("gs://") else _Folder(Path(folder))

    def start(self, files: Iterable[Path]) -> Future[None]:
        """Begin to send what these files hold now, once earlier uploads are over.

        While the storage does not answer, nothing is sent: the next upload makes up for it. Raises what made an earlier
        upload fail, unless it was an outage.
        """
        if self._last.done():
            self._last.result()
        found = {path: path.stat() for path in files if path.is_file()}
        self._last = self._thread.submit(self._send_all, found, self._last)
        return self._last

    def forget(self) -> None:
        """Wait for what is on its way, and look again at what has arrived: files are about to be rewritten."""
        self._last.result()
        self._sent.clear()

    def close(self) -> None:
        self._thread.shutdown()

    def _send_all(self, files: dict[Path, os.stat_result], before: Future[None]) -> None:
        before.result()
        if self._storage.answers():
            with self._storage.tolerated("metrics.jsonl"):
                for path, known in files.items():
                    if known.st_size and path.is_file():
                        self._send(path, known.st_ino, known.st_size)

    def _send(self, path: Path, inode: int, size: int) -> None:
        name = path.relative_to(self._local).as_posix()
        sent_inode, copy = self._sent.pop(path, (0, None))  # after an error nobody knows what has arrived
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_ino != inode:
                return  # replaced since then, which the next upload sends
            if sent_inode != inode:
                copy = self._find(name, file, size)
            if copy and copy.size < size:
                copy = self._append(name, file, copy, size)
            if copy:
                self._sent[path] = inode, copy
            else:
                file.seek(0)
                self._store.write(name, file.read(size))

    def _find(self, name: str, file: BinaryIO, size: int) -> Copy | None:
        """Return what is there, or None if it is not how the file begins, as after a resume that dropped lines."""
        found = self._store.find(name)
        file.seek(0)
        return found if found and found.size <= size and found.crc == _crc(file, found.size) else None

    def _append(self, name: str, file: BinaryIO, copy: Copy, size: int) -> Copy | None:
        """Return what is there afterwards, or None if that is not the file, which must then be sent whole."""
        file.seek(copy.size)
        content = file.read(size - copy.size)
        expected, problem = Copy(size, google_crc32c.extend(copy.crc, content)), "other bytes are there"
        try:
            made: Copy | None = self._store.append(name, content, copy)
        except Exception as error:
            if is_outage(error):
                raise
            # it may be done: after an answer that was lost, the second try of the request finds another generation
            made, problem = self._store.find(name), first_line(error)
        if made and made[:2] == expected[:2]:
            return made
        logging.warning("%s is uploaded whole, since it cannot be appended to: %s", name, problem)
        return None


class _Bucket:
    """Objects in a folder of a bucket."""

    def __init__(self, folder: str) -> None:
        files, there = fsspec.core.url_to_fs(folder)
        self._files: Any = files
        self._bucket, _, self._folder = there.partition("/")

    def find(self, name: str) -> Copy | None:
        try:
            return _described(self._files.call("GET", "b/{}/o/{}", self._bucket, self._key(name), json_out=True))
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        self._files.pipe_file(f"{self._bucket}/{self._key(name)}", content)

    def append(self, name: str, content: bytes, copy: Copy) -> Copy:
        part = f"{PARTS}/{re.split('[./]', name)[0]}"  # not called like the file, which others look for by its name
        self.write(part, content)
        sources = [{"name": self._key(name), "generation": copy.generation}, {"name": self._key(part)}]
        made = self._files.call(
            "POST",
            "b/{}/o/{}/compose",
            self._bucket,
            self._key(name),
            ifGenerationMatch=copy.generation,
            headers={"Content-Type": "application/json"},
            json={"sourceObjects": sources, "destination": {"contentType": "application/octet-stream"}},
            json_out=True,
        )
        self._files.rm_file(f"{self._bucket}/{self._key(part)}")
        return _described(made)

    def _key(self, name: str) -> str:
        return f"{self._folder}/{name}"


class _Folder:
    """Files in a local folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, name: str) -> Copy | None:
        path = self._folder / name
        if not path.exists():
            return None
        with path.open("rb") as file:
            return Copy(size := path.stat().st_size, _crc(file, size))

    def write(self, name: str, content: bytes) -> None:
        path, draft = self._folder / name, self._folder / f".{name.partition('/')[0]}.{os.getpid()}"
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(content)
        draft.replace(path)

    def append(self, name: str, content: bytes, copy: Copy) -> Copy:
        with (self._folder / name).open("r+b") as file:
            if file.seek(0, os.SEEK_END) != copy.size:
                raise FileExistsError("somebody else has written it")
            file.write(content)
        return Copy(copy.size + len(content), google_crc32c.extend(copy.crc, content))


def _described(item: dict[str, Any]) -> Copy:
    """Return an object resource's facts; its CRC32C is Base64 of big-endian bytes."""
    return Copy(int(item["size"]), int.from_bytes(base64.b64decode(item["crc32c"])), item["generation"])


def _crc(file: BinaryIO, size: int) -> int:
    """Return the CRC32C of the next bytes."""
    crc = 0
    while size and (chunk := file.read(min(size, CHUNK_BYTES))):
        crc, size = google_crc32c.extend(crc, chunk), size - len(chunk)
    return crc

"""Files, local or in a bucket; whatever the trainer opens to read, it opens here."""

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fsspec
import fsspec.config
from etils import epath
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from conf.formats import HEAD_BYTES, RunFileError, packed_form
from conf.proxies import settle_proxies

BUFFER_BYTES = 1 << 16
"""Of what is read from a bucket; behind it, fsspec reads ahead by megabytes."""


def use_buckets(max_outage_hours: float = 0.0) -> None:
    """Use `buckets.BucketFileSystem` for all gs:// paths of this process; gcsfs is imported at the first of them.

    Every program of the trainer calls it before it opens a path or meets other processes, which no proxy may stand
    between. max_outage_hours: how long a read is tried again.
    """
    settle_proxies(direct=filter(None, os.environ.get("TPU_WORKER_HOSTNAMES", "").split(",")))
    for scheme in ("gs", "gcs"):
        fsspec.config.conf.setdefault(scheme, {})["max_outage_hours"] = max_outage_hours
        fsspec.register_implementation(scheme, "trainer.corpus.buckets.BucketFileSystem", clobber=True)


def expand_glob(pattern: str, key: str) -> list[str]:
    """Return the sorted files that match a path or glob. Raises RunFileError naming the key if there are none."""
    system, path = url_to_fs(pattern)
    if system.isfile(path):
        return [pattern]
    if not set(pattern) & set("*?["):
        if system.isdir(path):
            raise RunFileError(f"{key}: {pattern} is a folder; name the files in it, e.g. {pattern.rstrip('/')}/*")
        raise RunFileError(f"{key}: {pattern} does not exist")
    found = sorted(name for name, facts in system.glob(path, detail=True).items() if facts["type"] == "file")
    if not found:
        raise RunFileError(f"{key}: no file matches {pattern}")
    return [system.unstrip_protocol(name).removeprefix("file://") for name in found]


@contextmanager
def open_file(file: str | epath.Path) -> Iterator[io.BufferedReader]:
    """Open a local file or an object, as a binary stream of Python."""
    system, path = url_to_fs(str(file))
    if isinstance(system, LocalFileSystem):
        with open(path, "rb") as stream:  # noqa: PTH123
            yield stream
    else:
        with as_stream(system.open(path, "rb")) as stream:
            yield stream


def as_stream(opened: Any) -> io.BufferedReader:
    """Return what fsspec opened as a binary stream of Python; its own takes no limit in `readline`, for example."""
    return opened if isinstance(opened, io.BufferedReader) else io.BufferedReader(opened, BUFFER_BYTES)


def refuse_packed(stream: io.BufferedReader, file: str, key: str, *, is_parquet: bool = False) -> None:
    """Raise RunFileError naming the key if a file that is still at its beginning is compressed.

    is_parquet: whether Parquet is wanted; otherwise that is refused too.
    """
    head = stream.peek(HEAD_BYTES)[:HEAD_BYTES]
    told = packed_form(head)
    if told and not (is_parquet and head.startswith(b"PAR1")):
        raise RunFileError(f"{key}: {file} is {told}")


class UnchangingFiles:
    """Opens files, and objects only while their generations are those that were read first: resuming must be exact."""

    def __init__(self, key: str) -> None:
        """key: config key of the files, for messages."""
        self._key = key
        self._generations: dict[str, Any] = {}

    @contextmanager
    def open(self, file: str) -> Iterator[io.BufferedReader]:
        """Open a file. Raises RunFileError if it is an object that has been replaced since it was opened first."""
        with open_file(file) as stream:
            found = getattr(stream.raw, "details", None)
            now = found.get("generation") if isinstance(found, dict) else None
            first = self._generations.setdefault(file, now)
            if now != first:
                message = f"{file} was replaced while the run reads it: generation {now}, first {first}"
                raise RunFileError(f"{self._key}: {message}; run it again with the data under another name")
            yield stream


def file_size(file: str) -> int:
    system, path = url_to_fs(file)
    return system.size(path)

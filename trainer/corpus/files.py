"""Files, local or in a bucket; whatever the trainer opens to read, it opens here."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from conf.schema.training.run_yaml import RunFileError

BUFFER_BYTES = 1 << 16
"""Of what is read from a bucket; behind it, fsspec reads ahead by megabytes."""


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
    system.invalidate_cache()  # a file that is opened later has the generation of then
    if not found:
        raise RunFileError(f"{key}: no file matches {pattern}")
    return [system.unstrip_protocol(name).removeprefix("file://") for name in found]


@contextmanager
def open_file(file: str) -> Iterator[io.BufferedReader]:
    """Open a file as a binary stream of Python: what fsspec opens in a bucket has a `readline` without a limit."""
    system, path = url_to_fs(file)
    if isinstance(system, LocalFileSystem):
        with open(path, "rb") as stream:  # noqa: PTH123
            yield stream
    else:
        with system.open(path, "rb") as raw, io.BufferedReader(raw, BUFFER_BYTES) as stream:
            yield stream


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

"""Files of a data set, local or in a bucket."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from conf.schema.training.run_yaml import RunFileError


def expand_glob(pattern: str, key: str) -> list[str]:
    """Return the sorted files that match a path or glob. Raises RunFileError naming the key if there are none."""
    from fsspec.core import url_to_fs

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
def open_file(file: str) -> Iterator[IO[bytes]]:
    from fsspec.core import url_to_fs

    system, path = url_to_fs(file)
    with system.open(path, "rb") as stream:
        yield stream


def file_size(file: str) -> int:
    from fsspec.core import url_to_fs

    system, path = url_to_fs(file)
    return system.size(path)

"""Download the files of a run from its bucket: resumable, each file complete or absent.

A file is downloaded in parts under a temporary name, which holds the object's generation, and renamed at the end. A
second download continues after the last part, and skips files that are complete.
"""

import base64
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from controller.core.errors import CloudError, ConfigError
from controller.gcp.client import GoogleClient
from controller.gcp.errors import NotFoundError

PART_BYTES = 8 << 20


@dataclass(frozen=True)
class RemoteFile:
    """Object of a run; `path` is relative to the run's folder in the bucket."""

    name: str
    path: str
    size: int
    generation: str
    md5: str
    """MD5 in Base64; empty for composite objects."""


def list_files(google: GoogleClient, bucket: str, prefix: str, path: str) -> list[RemoteFile]:
    """List the files of a run below a path, which is a file or a folder; "" lists all.

    Raises:
        ConfigError: there are none; the message names what there is.
    """
    wanted = path.strip("/")
    every = list(_list_objects(google, bucket, f"{prefix}/"))
    found = [f for f in every if not wanted or f.path == wanted or f.path.startswith(f"{wanted}/")]
    if not found:
        top = sorted({f.path.partition("/")[0] + ("/" if "/" in f.path else "") for f in every})
        there = f"it has {', '.join(top)}" if top else "the bucket has no files of this run"
        raise ConfigError(f"get: gs://{bucket}/{prefix}/{wanted}: no such file or folder; {there}")
    return found


def _list_objects(google: GoogleClient, bucket: str, prefix: str) -> Iterator[RemoteFile]:
    fields = "items(name,size,generation,md5Hash),nextPageToken"
    try:
        for item in google.list_all("storage", "objects.list", "items", bucket=bucket, prefix=prefix, fields=fields):
            path = item["name"].removeprefix(prefix)
            if path and not path.endswith("/"):  # an empty object that stands for a folder
                size, generation = int(item["size"]), str(item["generation"])
                yield RemoteFile(item["name"], path, size, generation, item.get("md5Hash", ""))
    except NotFoundError:
        return


def local_path(folder: Path, path: str) -> Path:
    """Return where a file goes. Raises ConfigError if its name would lead out of the folder."""
    parts = PurePosixPath(path).parts
    if not parts or ".." in parts or "\0" in path or PurePosixPath(path).is_absolute():
        raise ConfigError(f"get: the object name {path!r} is no path inside a folder")
    return folder.joinpath(*parts)


def is_complete(file: RemoteFile, target: Path) -> bool:
    """Return whether the target has the object's content already; without a checksum, its size decides."""
    if not target.is_file() or target.stat().st_size != file.size:
        return False
    return not file.md5 or _md5(target) == file.md5


def fetch_file(
    google: GoogleClient, bucket: str, file: RemoteFile, target: Path, moved: Callable[[int], object]
) -> None:
    """Download a file, continuing where an earlier download of the same generation stopped.

    Args:
        google: client of the bucket's project.
        bucket: name of the bucket.
        file: object to download.
        target: where the file goes; an earlier file there is replaced at the end.
        moved: called with the number of bytes after each part.

    Raises:
        CloudError: the content is not what the object's checksum says, or the object has changed meanwhile.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{file.generation}.part")
    done = partial.stat().st_size if partial.exists() else 0
    if done > file.size:
        partial.unlink()
        done = 0
    moved(done)
    with partial.open("ab") as out:
        while done < file.size:
            end = min(done + PART_BYTES, file.size)
            try:
                part = google.download_range(bucket, file.name, file.generation, done, end)
            except NotFoundError:
                raise CloudError(f"gs://{bucket}/{file.name} was replaced during the download; try again") from None
            if len(part) != end - done:
                raise CloudError(f"gs://{bucket}/{file.name}: expected {end - done} bytes, got {len(part)}; try again")
            out.write(part)
            done = end
            moved(len(part))
    if file.md5 and _md5(partial) != file.md5:
        partial.unlink()
        raise CloudError(f"gs://{bucket}/{file.name}: the downloaded content does not match its checksum; try again")
    partial.replace(target)


def _md5(path: Path) -> str:
    with path.open("rb") as content:
        return base64.b64encode(
            hashlib.file_digest(content, lambda: hashlib.md5(usedforsecurity=False)).digest()
        ).decode()

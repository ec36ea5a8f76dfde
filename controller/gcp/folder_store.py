"""Cloud Storage in a folder, for `cloud=here`: the requests that the controller sends, answered from files.

An object is the file BUCKET/NAME, where the bucket is an absolute path. Programs read and write there without us, so
an object may be a file that this module has never seen. Generations and custom metadata are in BUCKET/.metadata.
"""

import base64
import fcntl
import hashlib
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from conf.strict_json import dumps, loads
from controller.core.errors import CloudError
from controller.core.json_documents import Document, has_format
from controller.core.this_process import Clock, boot_id, boot_time
from controller.gcp.client import GoogleClient
from controller.gcp.google_errors import ConflictError, NoCredentialsError, NotFoundError

METADATA, DRAFTS, LOCK = ".metadata", ".drafts", ".lock"
CHUNK = 1 << 20


@dataclass(frozen=True)
class ObjectMetadata(Document):
    """What a file does not hold: the generation of an object that we wrote, and its custom metadata.

    `boot_id` and `boot_seconds` say when it was written; the time of day of this machine may be set meanwhile.
    """

    generation: int
    metadata: dict[str, str] = field(default_factory=dict)
    boot_id: str = ""
    boot_seconds: float = 0.0

    @classmethod
    def from_json(cls, body: Any, where: str = "") -> Self:
        """Parse what this Slipway or an earlier one, without the time, wrote. Raises as `Document.from_json`."""
        return super().from_json({"boot_id": "", "boot_seconds": 0.0, **body} if has_format(body) else body, where)


class FolderClient(GoogleClient):
    """Answers requests to Cloud Storage from folders, and refuses all others: `cloud=here` has nothing of Google's."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(None, clock)

    def call(self, api: str, method: str, **parameters: Any) -> dict[str, Any]:
        """Answer a request to Cloud Storage.

        Raises:
            NotFoundError: the object does not exist.
            NoCredentialsError: the request is for another API.
        """
        bucket = parameters.get("bucket", parameters.get("sourceBucket", ""))
        match f"{api} {method}" if bucket.startswith("/") else "":
            case "storage objects.get":
                return _describe(bucket, parameters["object"])
            case "storage objects.list":
                return _list(bucket, parameters.get("prefix", ""), parameters.get("delimiter", ""))
            case "storage objects.delete":
                with _exclusive(bucket):
                    _existing(bucket, parameters["object"]).unlink()
                    _metadata_file(bucket, parameters["object"]).unlink(missing_ok=True)
                return {}
            case "storage objects.rewrite":
                source = _existing(parameters["sourceBucket"], parameters["sourceObject"])
                _replace(parameters["destinationBucket"], parameters["destinationObject"], _copied_from(source))
                return {"done": True}
        raise NoCredentialsError(f"cloud=here uses nothing of Google's, so there is no {api} {method}")

    def download(self, bucket: str, name: str) -> bytes:
        try:
            return _existing(bucket, name).read_bytes()
        except FileNotFoundError:  # deleted at this moment
            raise NotFoundError("objects.get", 404, "notFound", f"no such file: {bucket}/{name}") from None

    def download_range(self, bucket: str, name: str, generation: str, begin: int, end: int) -> bytes:
        with _existing(bucket, name).open("rb") as file:
            file.seek(begin)
            return file.read(end - begin)

    def object_metadata(self, bucket: str, name: str) -> tuple[dict[str, Any], float]:
        found, known = _describe(bucket, name), _metadata(bucket, name)
        if not known.boot_id or known.boot_id != boot_id():
            return found, time.time()
        return found, datetime.fromisoformat(found["updated"]).timestamp() + boot_time() - known.boot_seconds

    def upload(
        self,
        bucket: str,
        name: str,
        content: bytes,
        *,
        generation: int | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        def write(draft: Path) -> None:
            draft.write_bytes(content)

        return _replace(bucket, name, write, generation, metadata)

    def upload_file(
        self, bucket: str, name: str, path: Path, session: Path, moved: Callable[[int], None]
    ) -> dict[str, Any]:
        md5 = hashlib.md5(usedforsecurity=False)

        def write(draft: Path) -> None:
            with path.open("rb") as source, draft.open("wb") as target:
                while chunk := source.read(CHUNK):
                    md5.update(chunk)
                    target.write(chunk)
                    moved(len(chunk))

        return _replace(bucket, name, write) | {"md5Hash": base64.b64encode(md5.digest()).decode()}


def _path(bucket: str, name: str) -> Path:
    if any(part in ("", ".", "..") for part in name.split("/")) or name.startswith("."):
        raise CloudError(f"{name!r} cannot be a file in {bucket}")
    return Path(bucket) / name


def _existing(bucket: str, name: str) -> Path:
    path = _path(bucket, name)
    if not path.is_file():
        raise NotFoundError("objects.get", 404, "notFound", f"no such file: {path}")
    return path


def _metadata_file(bucket: str, name: str) -> Path:
    return Path(bucket) / METADATA / f"{name}.json"


def _metadata(bucket: str, name: str) -> ObjectMetadata:
    file = _metadata_file(bucket, name)
    try:
        return ObjectMetadata.from_json(loads(file.read_bytes()), str(file))
    except FileNotFoundError:
        return ObjectMetadata(1)  # a program wrote the file


def _describe(bucket: str, name: str) -> dict[str, Any]:
    try:
        found = _existing(bucket, name).stat()
    except FileNotFoundError:  # deleted at this moment
        raise NotFoundError("objects.get", 404, "notFound", f"no such file: {bucket}/{name}") from None
    known = _metadata(bucket, name)
    written = datetime.fromtimestamp(found.st_mtime, UTC).isoformat()
    return {
        "name": name,
        "timeCreated": written.replace("+00:00", "Z"),
        "size": str(found.st_size),
        "generation": str(known.generation),
        "updated": written,
        "metadata": known.metadata,
    }


def _list(bucket: str, prefix: str, delimiter: str) -> dict[str, Any]:
    root = Path(bucket)
    items: list[dict[str, Any]] = []
    prefixes: dict[str, None] = {}
    for name in sorted(_names(root, root / prefix.rpartition("/")[0])):
        if not name.startswith(prefix):
            continue
        cut = name.find(delimiter, len(prefix)) if delimiter else -1
        if cut >= 0:
            prefixes[name[: cut + len(delimiter)]] = None
            continue
        try:
            items.append(_describe(bucket, name))
        except NotFoundError:
            continue  # deleted in the meantime
    return {"items": items, "prefixes": list(prefixes)}


def _names(root: Path, folder: Path) -> Iterator[str]:
    for where, _, files in os.walk(folder):
        inside = Path(where).relative_to(root)
        if not inside.parts or not inside.parts[0].startswith("."):
            yield from ((inside / file).as_posix() for file in files if inside.parts or not file.startswith("."))


@contextmanager
def _exclusive(bucket: str) -> Iterator[None]:
    """Let one controller at a time compare a generation and write."""
    Path(bucket).mkdir(mode=0o700, parents=True, exist_ok=True)
    with (Path(bucket) / LOCK).open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _replace(
    bucket: str,
    name: str,
    write: Callable[[Path], object],
    generation: int | None = None,
    metadata: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Write an object under a temporary name and rename it, if it has the expected generation (0: does not exist)."""
    path = _path(bucket, name)
    draft = Path(bucket) / DRAFTS / uuid.uuid4().hex
    try:
        draft.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write(draft)
        with _exclusive(bucket):
            now = _metadata(bucket, name).generation if path.is_file() else 0
            if generation not in (None, now):
                raise ConflictError("objects.insert", 412, "conditionNotMet", f"{path} has the generation {now}")
            if metadata is not None or _metadata_file(bucket, name).is_file() or generation is not None:
                # Like Cloud Storage's, a generation is never used again, not even after the object was deleted.
                made = max(now + 1, time.time_ns() // 1000)
                written = ObjectMetadata(made, dict(metadata or {}), boot_id(), boot_time())
                _write_metadata(bucket, name, written)
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            draft.replace(path)
            return _describe(bucket, name)
    except OSError as error:
        raise CloudError(f"cannot write {path}: {error.strerror}; cloud.folder names another folder") from None
    finally:
        with suppress(FileNotFoundError, NotADirectoryError):
            draft.unlink()


def _write_metadata(bucket: str, name: str, known: ObjectMetadata) -> None:
    file = _metadata_file(bucket, name)
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = Path(bucket) / DRAFTS / uuid.uuid4().hex
    draft.write_text(dumps(known.to_json()))
    draft.replace(file)


def _copied_from(source: Path) -> Callable[[Path], object]:
    def write(draft: Path) -> None:
        shutil.copyfile(source, draft)

    return write

"""Objects of Cloud Storage: their contents, immutable files hashed while they are written, and their index by name."""

import base64
import hashlib
import json
import os
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import google_crc32c

from controller.localcloud.http.call import ApiCall, merge_patch, timestamp
from controller.localcloud.http.errors import ApiError
from controller.localcloud.settings import Settings
from controller.localcloud.store import Document, Store

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


_WRITE_SECONDS = 1.0
"""Between two writes of one object: a limit and no delay, so the same at each pace."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS objects (
    bucket TEXT, name TEXT, generation INTEGER, blob TEXT, body TEXT, PRIMARY KEY (bucket, name)
) WITHOUT ROWID
"""
_LAST_CHARACTER = "\U0010ffff"  # sorts after any continuation of a prefix
_FETCH_ROWS = 256
# Fields of a new object that clients can set; the server sets the rest.
WRITABLE_FIELDS = (
    "cacheControl",
    "contentDisposition",
    "contentEncoding",
    "contentLanguage",
    "contentType",
    "customTime",
    "metadata",
    "storageClass",
)


@dataclass(frozen=True)
class StoredObject:
    """Object resource without links, and the blob that holds its content."""

    body: Document
    blob: str

    @property
    def size(self) -> int:
        return int(self.body["size"])


class Objects:
    """Objects of all buckets, with one live generation each. `finalized` gets the name of every new object."""

    def __init__(self, store: Store, blobs: Blobs, finalized: Callable[[str], None], settings: Settings) -> None:
        self._store, self._settings, self._blobs = store, settings, blobs
        self._on_finalized = finalized
        store.database.execute(_SCHEMA)
        self._generation: int = store.database.execute("SELECT MAX(generation) FROM objects").fetchone()[0] or 0

    def find(self, bucket: str, name: str) -> StoredObject | None:
        """Return the live object, or None; raise ApiError 404 if the bucket does not exist."""
        self._check_bucket(bucket)
        wanted = "SELECT body, blob FROM objects WHERE bucket=? AND name=?"
        row = self._store.database.execute(wanted, (bucket, name)).fetchone()
        return StoredObject(json.loads(row[0]), row[1]) if row else None

    def get(self, bucket: str, name: str, query: Mapping[str, str], prefix: str = "if") -> StoredObject:
        """Return the live object (of `generation`, if given); raise ApiError 404, 304 or 412 if a condition fails."""
        generation = query.get("sourceGeneration" if prefix == "ifSource" else "generation")
        stored = self.find(bucket, name)
        if stored is None or generation not in (None, stored.body["generation"]):
            raise ApiError(404, f"No such object: {bucket}/{name}")
        check_conditions(stored, query, prefix)
        return stored

    def check_overwrite(self, call: ApiCall, bucket: str, name: str) -> None:
        """Raise ApiError 403 if the object exists and the caller may not delete it, which replacing it does."""
        if self.find(bucket, name) is not None:
            call.require_permission("storage.objects.delete", f"buckets/{bucket}")

    def put(
        self, bucket: str, name: str, metadata: Mapping[str, Any], blob: str, query: Mapping[str, str]
    ) -> StoredObject:
        """Finalize a new generation from a whole blob; delete the blob and raise ApiError 412 if a condition fails."""
        try:
            if not name or len(name.encode()) > 1024 or any(sign in name for sign in "\r\n"):
                raise ApiError(400, f"Invalid object name: {name!r}")
            with self._store.transaction():
                old = self.find(bucket, name)
                check_conditions(old, query)
                self.check_rate(bucket, name)
                body = self._describe(bucket, name, metadata)
                self._store.database.execute(
                    "INSERT OR REPLACE INTO objects VALUES (?, ?, ?, ?, ?)",
                    (bucket, name, int(body["generation"]), blob, json.dumps(body, separators=(",", ":"))),
                )
                self._on_finalized(name)
        except ApiError:
            self._blobs.delete(blob)
            raise
        if old:
            self._blobs.delete(old.blob)
        return StoredObject(body, blob)

    def check_rate(self, bucket: str, name: str) -> None:
        """Raise ApiError 429 if an object was written a moment ago: https://cloud.google.com/storage/quotas#objects."""
        old = self.find(bucket, name)
        written = int(old.body["generation"]) / 1e6 if old else 0.0
        if old and self._settings.has_limits and time.time() < written + _WRITE_SECONDS:
            raise ApiError(
                429,
                f"The object {old.body['bucket']}/{old.body['name']} exceeded the rate limit for object mutation "
                "operations (create, update, and delete). Please reduce your request rate. See "
                "https://cloud.google.com/storage/docs/gcs429.",
            )

    def patch(self, stored: StoredObject, change: Mapping[str, Any]) -> StoredObject:
        """Update metadata fields; null removes one."""
        wanted = {key: value for key, value in change.items() if key in WRITABLE_FIELDS}
        counted = {"metageneration": str(int(stored.body["metageneration"]) + 1), "updated": timestamp(time.time())}
        body = {**merge_patch(stored.body, wanted), **counted}
        self._store.database.execute(
            "UPDATE objects SET body=? WHERE bucket=? AND name=?",
            (json.dumps(body, separators=(",", ":")), body["bucket"], body["name"]),
        )
        return StoredObject(body, stored.blob)

    def delete(self, stored: StoredObject) -> None:
        which = stored.body["bucket"], stored.body["name"]
        self._store.database.execute("DELETE FROM objects WHERE bucket=? AND name=?", which)
        self._blobs.delete(stored.blob)

    def list_names(self, bucket: str) -> list[str]:
        rows = self._store.database.execute("SELECT name FROM objects WHERE bucket=? ORDER BY name", (bucket,))
        return [name for (name,) in rows]

    def list(self, bucket: str, query: Mapping[str, str]) -> tuple[list[StoredObject], list[str], str | None]:
        """Return one page, ordered by name: (objects, common prefixes, next page token)."""
        self._check_bucket(bucket)
        prefix = query.get("prefix", "")
        delimiter = query.get("delimiter", "")
        limit = min(int(query.get("maxResults") or 1000), 1000) or 1000
        start = max(prefix, query.get("startOffset", ""), _decode(query.get("pageToken", "")))
        end = min(prefix + _LAST_CHARACTER, query.get("endOffset") or _LAST_CHARACTER)
        items: list[StoredObject] = []
        prefixes: list[str] = []
        while rows := self._store.database.execute(
            "SELECT name, body, blob FROM objects WHERE bucket=? AND name>=? AND name<? ORDER BY name LIMIT ?",
            (bucket, start, end, _FETCH_ROWS),
        ).fetchall():
            for name, body, blob in rows:
                if name < start:
                    continue  # below a common prefix that is already listed
                if len(items) + len(prefixes) == limit:
                    return items, prefixes, base64.urlsafe_b64encode(start.encode()).decode()
                cut = name.find(delimiter, len(prefix)) if delimiter else -1
                if cut < 0:
                    items.append(StoredObject(json.loads(body), blob))
                    start = name + "\0"
                    continue
                common = name[: cut + len(delimiter)]
                prefixes.append(common)
                if name == common and query.get("includeTrailingDelimiter", "").lower() == "true":
                    items.append(StoredObject(json.loads(body), blob))
                start = common + _LAST_CHARACTER
        return items, prefixes, None

    def _check_bucket(self, bucket: str) -> None:
        self._store.require("bucket", bucket, "The specified bucket does not exist.")

    def _describe(self, bucket: str, name: str, metadata: Mapping[str, Any]) -> Document:
        now = time.time()
        self._generation = max(self._generation + 1, int(now * 1e6))  # monotonic, even if the clock is not
        moment = timestamp(now)
        return {
            "storageClass": "STANDARD",
            **{key: metadata[key] for key in WRITABLE_FIELDS if metadata.get(key) is not None},
            **{key: metadata[key] for key in ("size", "md5Hash", "crc32c", "componentCount") if key in metadata},
            "kind": "storage#object",
            "name": name,
            "bucket": bucket,
            "generation": str(self._generation),
            "metageneration": "1",
            "etag": base64.b64encode(str(self._generation).encode()).decode(),
            "timeCreated": moment,
            "updated": moment,
            "timeStorageClassUpdated": moment,
            "timeFinalized": moment,
        }


def check_conditions(stored: StoredObject | None, query: Mapping[str, str], prefix: str = "if") -> None:
    """Raise ApiError 412 (304 if a NotMatch condition matches) unless the query's preconditions hold."""
    for field in ("generation", "metageneration"):
        value = stored.body[field] if stored else "0"
        wanted = query.get(f"{prefix}{field.capitalize()}Match")
        unwanted = query.get(f"{prefix}{field.capitalize()}NotMatch")
        if wanted is not None and wanted != value:
            raise ApiError(412, "At least one of the pre-conditions you specified did not hold.")
        if unwanted is not None and unwanted == value:
            raise ApiError(304 if stored else 412, "Not modified")


def object_resource(stored: StoredObject, base: str) -> Document:
    """Return the object resource with links that a client of `base` can follow."""
    body = stored.body
    path = f"storage/v1/b/{body['bucket']}/o/{quote(body['name'], safe='')}"
    return {
        **body,
        "id": f"{body['bucket']}/{body['name']}/{body['generation']}",
        "selfLink": f"{base}{path}",
        "mediaLink": f"{base}download/{path}?generation={body['generation']}&alt=media",
    }


def _decode(token: str) -> str:
    try:
        return base64.urlsafe_b64decode(token.encode()).decode()
    except ValueError as error:
        raise ApiError(400, f"Invalid pageToken: {token}") from error

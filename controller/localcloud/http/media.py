"""Cloud Storage v1: contents of objects (https://cloud.google.com/storage/docs/uploads-downloads)."""

import asyncio
import json
import re
import time
import uuid
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from aiohttp import web

from controller.localcloud.apis.objects import Blobs, Digest, Objects, StoredObject, object_resource
from controller.localcloud.http.call import ApiCall
from controller.localcloud.http.errors import ApiError
from controller.localcloud.store import Document, Store

_CHUNK_MULTIPLE = 256 * 1024  # all chunks of a resumable upload except the last are multiples of this
_INLINE_BYTES = 1 << 20  # bytes that may be read or hashed on the event loop
_CHUNK_BYTES = 1 << 20
_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)")
_SESSION_SECONDS = 7 * 24 * 3600.0


class MediaTransfers:
    """Uploads (simple, multipart, resumable) and downloads."""

    def __init__(self, store: Store, objects: Objects, blobs: Blobs) -> None:
        self._store, self._objects, self._blobs = store, objects, blobs
        for name, session in store.items("upload"):
            if session["begun"] < time.time() - _SESSION_SECONDS:
                blobs.delete(session["blob"])
                store.delete("upload", name)

    async def upload(self, request: web.Request, call: ApiCall) -> web.Response:
        """Handle POST or PUT on /upload/...: one of the three protocols, or the next chunk of a resumable upload."""
        if upload_id := call.query.get("upload_id"):
            return await self._continue(request, call, upload_id)
        match call.query.get("uploadType", "media"):
            case "media":
                return await self._simple(request, call)
            case "multipart":
                return await self._multipart(request, call)
            case "resumable":
                return await self._begin(request, call)
            case kind:
                raise ApiError(400, f"Invalid uploadType '{kind}': media, multipart or resumable")

    async def _simple(self, request: web.Request, call: ApiCall) -> web.Response:
        metadata = {"contentType": request.headers.get("Content-Type", "application/octet-stream")}
        blob, digest = self._blobs.create(), Digest()
        with self._blobs.partial(blob).open("wb") as file:
            async for data in request.content.iter_any():
                file.write(data)
                digest.update(data)
        return self._finalize(call, metadata, blob, digest)

    async def _multipart(self, request: web.Request, call: ApiCall) -> web.Response:
        text, content_type, data = _split_related(request.headers.get("Content-Type", ""), await request.read())
        metadata = _parse_metadata(text)
        metadata.setdefault("contentType", content_type)
        blob = self._blobs.create()
        self._blobs.partial(blob).write_bytes(data)
        return self._finalize(call, metadata, blob, await self._digest(blob))

    async def _digest(self, blob: str) -> Digest:
        """Hash a partial blob, in a thread if it is large."""
        if self._blobs.partial(blob).stat().st_size <= _INLINE_BYTES:
            return self._blobs.digest(blob)
        return await asyncio.to_thread(self._blobs.digest, blob)

    def _finalize(self, call: ApiCall, metadata: Document, blob: str, digest: Digest) -> web.Response:
        fields = digest.resource_fields()
        for key in ("md5Hash", "crc32c"):
            if metadata.get(key) not in (None, fields[key]):
                self._blobs.delete(blob)
                raise ApiError(400, f"Provided {key} {metadata[key]} doesn't match calculated {key} {fields[key]}.")
        name = call.query.get("name") or metadata.get("name", "")
        if encoding := call.query.get("contentEncoding"):
            metadata["contentEncoding"] = encoding
        try:
            self._objects.check_overwrite(call, call.path["bucket"], name)
        except ApiError:
            self._blobs.delete(blob)
            raise
        self._blobs.finish(blob)
        stored = self._objects.put(call.path["bucket"], name, {**metadata, **fields}, blob, call.query)
        return web.json_response(object_resource(stored, call.root_url), headers=_object_headers(stored))

    async def _begin(self, request: web.Request, call: ApiCall) -> web.Response:
        metadata = _parse_metadata(await request.read() or b"{}")
        name = call.query.get("name") or metadata.get("name", "")
        # Report a missing bucket or permission before the bytes are sent.
        self._objects.check_overwrite(call, call.path["bucket"], name)
        metadata.setdefault("contentType", request.headers.get("X-Upload-Content-Type", "application/octet-stream"))
        upload_id = uuid.uuid4().hex
        session = {
            "bucket": call.path["bucket"],
            "metadata": {**metadata, "name": name},
            "query": {key: value for key, value in call.query.items() if key.startswith("if")},
            "blob": self._blobs.create(),
            "begun": time.time(),
        }
        self._store.put("upload", upload_id, session)
        query = f"uploadType=resumable&upload_id={upload_id}&name={quote(name, safe='')}"
        location = f"{call.root_url}upload/storage/v1/b/{call.path['bucket']}/o?{query}"
        return web.json_response({}, headers={"Location": location, "X-GUploader-UploadID": upload_id})

    async def _continue(self, request: web.Request, call: ApiCall, upload_id: str) -> web.Response:
        session = self._store.get("upload", upload_id)
        if session is None or session["bucket"] != call.path["bucket"]:
            raise ApiError(404, f"No such upload: {upload_id}")
        if request.method == "DELETE":
            self._blobs.delete(session["blob"])
            self._store.delete("upload", upload_id)
            return web.Response(status=499)
        if "finished" in session:
            return web.json_response(object_resource(StoredObject(session["finished"], ""), call.root_url))
        total = await self._append(request, session)
        received = self._blobs.partial(session["blob"]).stat().st_size
        if total is None or received < total:
            headers = {"X-GUploader-UploadID": upload_id}
            if received:
                headers["Range"] = f"bytes=0-{received - 1}"
            return web.Response(status=308, reason="Resume Incomplete", headers=headers)
        digest = await self._digest(session["blob"])
        name = session["metadata"]["name"]
        self._objects.check_rate(session["bucket"], name)  # the session outlives this refusal, and is tried again
        finalizing = ApiCall(call.method, call.path, {**session["query"], "name": name}, {}, call.root_url)
        try:
            response = self._finalize(finalizing, session["metadata"], session["blob"], digest)
        except ApiError:
            self._store.delete("upload", upload_id)
            raise
        if done := self._objects.find(session["bucket"], name):
            self._store.put("upload", upload_id, {**session, "finished": done.body})
        return response

    async def _append(self, request: web.Request, session: Document) -> int | None:
        """Append one chunk; return the total size, or None while it is unknown."""
        path = self._blobs.partial(session["blob"])
        received = path.stat().st_size
        header = request.headers.get("Content-Range")
        first, last, total = 0, None, None
        if header:
            match = _CONTENT_RANGE.fullmatch(header)
            if match is None:
                raise ApiError(400, f"Invalid Content-Range: {header}")
            total = None if match[3] == "*" else int(match[3])
            if match[1] is None:
                return total  # a status query
            first, last = int(match[1]), int(match[2])
        if first > received:
            offset = f"The upload offset is {first} byte(s)"
            raise ApiError(400, f"{offset}, which exceeds the uploaded {received} byte(s).")
        skip = received - first
        with path.open("ab") as file:
            async for data in request.content.iter_any():
                file.write(data[skip:])
                skip = max(0, skip - len(data))
        size = path.stat().st_size
        if header is None:
            return size
        assert last is not None
        if total is None or last + 1 < total:
            with path.open("r+b") as file:
                file.truncate(max(received, size - size % _CHUNK_MULTIPLE))  # Google keeps whole chunk multiples only
        return total

    async def read_half(self, request: web.Request) -> None:
        """Read half of an upload before its connection breaks; a resumable upload keeps whole chunk multiples of it."""
        half = (request.content_length or 0) // 2
        data = await request.content.readexactly(half) if half else b""  # aiohttp raises where there is no body
        session = self._store.get("upload", request.query.get("upload_id", ""))
        match = _CONTENT_RANGE.fullmatch(request.headers.get("Content-Range", ""))
        if session is None or "finished" in session or match is None or match[1] is None:
            return
        path = self._blobs.partial(session["blob"])
        received = path.stat().st_size
        fresh = data[max(0, received - int(match[1])) :]
        with path.open("ab") as file:
            file.write(fresh[: len(fresh) - (received + len(fresh)) % _CHUNK_MULTIPLE])

    async def download(self, request: web.Request, call: ApiCall) -> web.StreamResponse:
        """Send the content of an object, or a range of it: 200, 206, 304, 404, 416."""
        stored = self._objects.get(call.path["bucket"], call.path["object"], call.query)
        headers = _object_headers(stored)
        headers["Content-Type"] = stored.body.get("contentType", "application/octet-stream")
        if encoding := stored.body.get("contentEncoding"):
            headers["Content-Encoding"] = encoding
        start, stop, status = 0, stored.size, 200
        if "Range" in request.headers:
            start, stop = _parse_range(request.headers["Range"], stored.size)
            status = 206
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{stored.size}"
        # Open at once: a newer generation may delete the file while this one is being sent.
        with self._blobs.path(stored.blob).open("rb") as file:
            file.seek(start)
            if stop - start <= _INLINE_BYTES:
                return web.Response(status=status, body=file.read(stop - start), headers=headers)
            response = web.StreamResponse(status=status, headers=headers)
            response.content_length = stop - start
            await response.prepare(request)
            while start < stop:
                piece = await asyncio.to_thread(file.read, min(_CHUNK_BYTES, stop - start))
                start += len(piece)
                await response.write(piece)
            await response.write_eof()
            return response


def _object_headers(stored: StoredObject) -> dict[str, str]:
    body = stored.body
    hashes = [f"{short}={body[key]}" for short, key in (("crc32c", "crc32c"), ("md5", "md5Hash")) if key in body]
    return {
        "ETag": f'"{body["etag"]}"',
        "X-Goog-Generation": body["generation"],
        "X-Goog-Metageneration": body["metageneration"],
        "X-Goog-Hash": ",".join(hashes),
        "X-Goog-Stored-Content-Length": body["size"],
        "X-Goog-Stored-Content-Encoding": body.get("contentEncoding", "identity"),
        "X-Goog-Storage-Class": body["storageClass"],
    }


def _parse_range(header: str, size: int) -> tuple[int, int]:
    """Return (start, stop) of a single byte range; raise ApiError 416 if it is beyond the end."""
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", header.strip())
    if match is None or match[1] == match[2] == "":
        return 0, size
    start = int(match[1]) if match[1] else max(0, size - int(match[2]))
    stop = min(size, int(match[2]) + 1) if match[1] and match[2] else size
    if start >= stop:
        raise ApiError(416, "The requested range cannot be satisfied.")
    return start, stop


def _parse_metadata(text: bytes) -> Document:
    try:
        metadata: Any = json.loads(text)
    except ValueError as error:
        raise ApiError(400, f"Parse Error: {error}") from error
    if not isinstance(metadata, dict):
        raise ApiError(400, "The metadata of an object is a JSON object")
    return metadata


def _split_related(content_type: str, body: bytes) -> tuple[bytes, str, bytes]:
    """Return (metadata JSON, content type, bytes) of a multipart/related body with CRLF or (some clients) LF."""
    match = re.search(r"boundary=(?:\"([^\"]+)\"|'([^']+)'|([^;\s]+))", content_type)
    if match is None:
        raise ApiError(400, "multipart upload without a boundary")
    mark = b"--" + next(text for text in match.groups() if text).encode()
    start = body.find(mark) + len(mark)
    line = b"\r\n" if body[start : start + 2] == b"\r\n" else b"\n"
    separator = line + mark
    # Only the outermost separators count: the object's bytes may hold anything.
    pieces = body[start:].split(separator, 1)
    end = pieces[1].rfind(separator) if len(pieces) == 2 else -1
    if end < 0:
        raise ApiError(400, "multipart upload that does not hold two parts")
    text = _parse_part(pieces[0], line)[1]
    headers, data = _parse_part(pieces[1][:end], line)
    return text, headers.get("content-type", "application/octet-stream"), data


def _parse_part(part: bytes, line: bytes) -> tuple[Mapping[str, str], bytes]:
    head, _, content = part.removeprefix(line).partition(line + line)
    if part.startswith(line + line):
        head, content = b"", part.removeprefix(line + line)
    pairs = (text.partition(":") for text in head.decode("latin-1").splitlines())
    return {name.strip().lower(): value.strip() for name, _, value in pairs}, content

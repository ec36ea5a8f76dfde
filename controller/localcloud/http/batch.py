"""Batch requests: several calls in one multipart/mixed body."""

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.parser import BytesParser
from typing import Any
from urllib.parse import parse_qsl

from aiohttp import web

from controller.localcloud.http.errors import ApiError


@dataclass(frozen=True)
class BatchPart:
    content_id: str
    http: str
    path: str  # still percent-encoded, no leading slash
    query: Mapping[str, str]
    body: Any


def parse_batch(content_type: str, body: bytes) -> list[BatchPart]:
    """Return the calls in order; raise ApiError 400 if the body is not a batch."""
    message = BytesParser().parsebytes(b"Content-Type: " + content_type.encode() + b"\r\n\r\n" + body)
    if not message.is_multipart():
        raise ApiError(400, "A batch is a multipart/mixed body")
    parts = []
    for item in message.walk():
        if item.is_multipart():
            continue
        payload = item.get_payload(decode=True)
        assert isinstance(payload, bytes)
        head, _, content = payload.replace(b"\r\n", b"\n").partition(b"\n\n")
        text = head.decode().partition("\n")[0].split()
        if len(text) < 2:
            raise ApiError(400, "A part of a batch starts with METHOD PATH")
        # Google's clients send a path; some send the whole URL.
        path, _, query = text[1].partition("?")
        if "://" in path:
            path = path.partition("://")[2].partition("/")[2]
        try:
            document = json.loads(content) if content.strip() else None
        except ValueError as error:
            raise ApiError(400, f"Invalid JSON payload received. {error}") from error
        parts.append(BatchPart(item.get("Content-ID", ""), text[0], path.lstrip("/"), dict(parse_qsl(query)), document))
    return parts


def render_batch(answers: Sequence[tuple[str, web.StreamResponse]]) -> web.Response:
    """Render the multipart/mixed answer: an HTTP response per call, its Content-ID prefixed with "response-"."""
    boundary = f"batch_{uuid.uuid4().hex}"
    chunks = []
    for content_id, answer in answers:
        body = answer.body if isinstance(answer, web.Response) and isinstance(answer.body, bytes) else b""
        head = [f"--{boundary}", "Content-Type: application/http"]
        if content_id:
            head.append(f"Content-ID: <response-{content_id.strip('<>')}>")
        head += ["", f"HTTP/1.1 {answer.status} {answer.reason}"]
        head += ["Content-Type: application/json; charset=UTF-8", f"Content-Length: {len(body)}", "", ""]
        chunks += ["\r\n".join(head).encode(), body, b"\r\n"]
    chunks.append(f"--{boundary}--\r\n".encode())
    headers = {"Content-Type": f"multipart/mixed; boundary={boundary}"}
    return web.Response(body=b"".join(chunks), headers=headers)

"""Google by hand: what each method answers; Cloud Storage in memory; and who is killed at a request."""

import base64
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

from controller.core.this_process import Clock
from controller.gcp.client import GoogleClient
from controller.gcp.google_errors import ForbiddenError, NotFoundError

UPDATED = "2026-01-01T01:00:00.000Z"


class KilledError(BaseException):
    """The process has got SIGKILL."""


@dataclass
class Answers:
    """What each method answers, or raises; nothing by default."""

    answers: dict[str, Any] = field(default_factory=dict)
    has_credentials: bool = True
    service_account: str | None = None
    unlisted: set[str] = field(default_factory=set[str])

    find = GoogleClient.find
    objects = GoogleClient.objects
    read = GoogleClient.read

    def seconds_ahead(self, project: str) -> float:
        return 0.0

    def call(self, api: str, method: str, **parameters: Any) -> dict[str, Any]:
        answer = self.answers.get(method, {})
        if isinstance(answer, Exception):
            raise answer
        return answer

    def list_all(self, api: str, method: str, items: str, **parameters: Any) -> Iterator[dict[str, Any]]:
        yield from self.call(api, method, **parameters).get(items, [])


class MemoryStorage(GoogleClient):
    """Cloud Storage in memory: the generation of an object changes with its content, the time of its last change never.

    Attributes:
        buckets: content of objects by name, by bucket.
        refused: buckets whose objects the caller may not see.
        sent: bytes that were downloaded.
        ranges_left: how many may be downloaded until the connection is cut.
    """

    def __init__(self, *refused: str, **buckets: dict[str, bytes]) -> None:
        super().__init__(None, Clock())
        self.buckets, self.refused = buckets, refused
        self.sent, self.ranges_left = 0, 10**9

    def call(
        self, api: str, method: str, *, bucket: str, object: str = "", prefix: str = "", delimiter: str = "", **_: Any
    ) -> dict[str, Any]:
        if bucket in self.refused:
            raise ForbiddenError(method, 403, "forbidden", "you may not")
        if bucket not in self.buckets:
            raise NotFoundError(method, 404, "notFound", "no such bucket")
        if method == "objects.get":
            return self._describe(bucket, object)
        assert (api, method) == ("storage", "objects.list")
        names = [name for name in self.buckets[bucket] if name.startswith(prefix)]
        ends = {name: name.find(delimiter, len(prefix)) if delimiter else -1 for name in names}
        items = [self._describe(bucket, name) for name in names if ends[name] < 0]
        return {"items": items, "prefixes": sorted({name[: end + 1] for name, end in ends.items() if end >= 0})}

    def download(self, bucket: str, name: str) -> bytes:
        content = self._content(bucket, name)
        self.sent += len(content)
        return content

    def _content(self, bucket: str, name: str) -> bytes:
        if name not in self.buckets.get(bucket, {}):
            raise NotFoundError("objects.get", 404, "notFound", name)
        return self.buckets[bucket][name]

    def download_range(self, bucket: str, name: str, generation: str, begin: int, end: int) -> bytes:
        if generation != self._describe(bucket, name)["generation"]:
            raise NotFoundError("objects.get", 404, "notFound", "No such object")
        if not self.ranges_left:
            raise ConnectionError("cut")
        self.ranges_left -= 1
        self.sent += end - begin
        return self.buckets[bucket][name][begin:end]

    def upload(self, bucket: str, name: str, content: bytes, **_: Any) -> dict[str, Any]:
        self.buckets.setdefault(bucket, {})[name] = content
        return self._describe(bucket, name)

    def _describe(self, bucket: str, name: str) -> dict[str, Any]:
        content = self._content(bucket, name)
        md5 = base64.b64encode(hashlib.md5(content, usedforsecurity=False).digest()).decode()
        facts = {"name": name, "size": str(len(content)), "md5Hash": md5, "generation": str(crc32(content))}
        return {**facts, "updated": UPDATED, "timeCreated": UPDATED, "metadata": {}}

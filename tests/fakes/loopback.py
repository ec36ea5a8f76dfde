"""Servers on loopback, written in a few lines; and as much of Cloud Storage as the agent uses, with faults."""

import json
import random
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from zlib import crc32


def free_port() -> int:
    """Return a port on which somebody may listen later: no outgoing connection gets one of these meanwhile."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_768)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


class Loopback(BaseHTTPRequestHandler):
    """A server on loopback whose requests are on record elsewhere."""

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def answer(self, status: int, content: bytes, short: bool = False, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if short else content)

    @classmethod
    @contextmanager
    def serving(cls, **facts: Any) -> Iterator[str]:
        """Serve, with these attributes; yield the URL."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), type(cls.__name__, (cls,), facts))
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        server.server_close()


@dataclass
class FakeBucket:
    """`faults` are used up by requests, first in first out: an HTTP status, "corrupt", "cut", "hang" or "lost"."""

    objects: dict[str, bytes] = field(default_factory=dict)
    metadata: dict[str, dict[str, str]] = field(default_factory=dict)
    """Of the objects that were joined, what their makers said of them."""
    sent: int = 0
    """Bytes of the requests' bodies."""
    requests: list[str] = field(default_factory=list)
    faults: list[Any] = field(default_factory=list)
    refused: re.Pattern[str] | None = None
    """Names that no object may have."""
    hang_started: threading.Event = field(default_factory=threading.Event)
    hang_released: threading.Event = field(default_factory=threading.Event)
    url: str = ""

    @classmethod
    @contextmanager
    def serving(cls) -> Iterator["FakeBucket"]:
        made = cls()
        with _Handler.serving(store=made) as made.url:
            yield made
            made.hang_released.set()


def generation_of(content: bytes) -> str:
    return str(crc32(content))


class _Handler(Loopback):
    store: FakeBucket

    def do_GET(self) -> None:
        name = unquote(urlsplit(self.path).path.partition("/o/")[2])
        fault = self._begin(f"GET {name}")
        if isinstance(fault, int):
            return self.answer(fault, b"out of order")
        content = self.store.objects.get(name)
        if content is None:
            return self.answer(404, b"No such object")
        if "alt=media" not in urlsplit(self.path).query:
            return self.answer(200, json.dumps(self._facts(name)).encode())
        if fault == "corrupt":
            content = bytes([content[0] ^ 1]) + content[1:]
        if fault == "hang":
            self.store.hang_started.set()
            self.store.hang_released.wait(240)
        return self.answer(200, content, short=fault == "cut")

    def do_POST(self) -> None:
        place, query = urlsplit(self.path).path, parse_qs(urlsplit(self.path).query)
        composed = unquote(place.partition("/o/")[2].removesuffix("/compose"))
        name = composed or query["name"][0]
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.store.sent += len(content)
        fault = self._begin(f"{'COMPOSE' if composed else 'POST'} {name}")
        if isinstance(fault, int):
            return self.answer(fault, b"out of order")
        if self.store.refused and self.store.refused.search(name):
            return self.answer(400, b"Invalid object name")
        facts: dict[str, str] = {}
        if composed:
            if query["ifGenerationMatch"] != [generation_of(self.store.objects.get(name, b""))]:
                return self.answer(412, b"At least one of the pre-conditions you specified did not hold.")
            order = json.loads(content)
            facts = order["destination"].get("metadata", {})
            content = b"".join(self.store.objects[source["name"]] for source in order["sourceObjects"])
        self.store.objects[name] = content
        self.store.metadata[name] = facts
        if fault == "lost":  # the answer, on its way
            return self.answer(503, b"out of order")
        return self.answer(200, json.dumps(self._facts(name)).encode())

    def _facts(self, name: str) -> dict[str, Any]:
        content = self.store.objects[name]
        facts = {"name": name, "size": str(len(content)), "generation": generation_of(content)}
        return facts | {"metadata": self.store.metadata.get(name, {})}

    def do_DELETE(self) -> None:
        name = unquote(urlsplit(self.path).path.partition("/o/")[2])
        fault = self._begin(f"DELETE {name}")
        if isinstance(fault, int):
            return self.answer(fault, b"out of order")
        del self.store.objects[name]
        return self.answer(204, b"")

    def _begin(self, request: str) -> Any:
        self.store.requests.append(request)
        return self.store.faults.pop(0) if self.store.faults else None

"""As much of Cloud Storage as the agent uses, in this process, with faults on demand."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit


@dataclass
class FakeBucket:
    """`faults` are used up by requests, first in first out: an HTTP status, "corrupt", "cut" or "hang"."""

    objects: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    faults: list[Any] = field(default_factory=list)
    hang_started: threading.Event = field(default_factory=threading.Event)
    hang_released: threading.Event = field(default_factory=threading.Event)
    url: str = ""

    def start_server(self) -> ThreadingHTTPServer:
        bucket = self

        class Handler(_Handler):
            store = bucket

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{server.server_port}/"
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}).start()
        return server


class _Handler(BaseHTTPRequestHandler):
    store: FakeBucket

    def log_message(self, format: str, *args: Any) -> None:
        """The requests are on record in the bucket."""

    def do_GET(self) -> None:
        name = unquote(urlsplit(self.path).path.partition("/o/")[2])
        fault = self._begin(f"GET {name}")
        if isinstance(fault, int):
            return self._answer(fault, b"out of order")
        content = self.store.objects.get(name)
        if content is None:
            return self._answer(404, b"No such object")
        if fault == "corrupt":
            content = bytes([content[0] ^ 1]) + content[1:]
        if fault == "hang":
            self.store.hang_started.set()
            self.store.hang_released.wait(240)
        return self._answer(200, content, short=fault == "cut")

    def do_POST(self) -> None:
        name = parse_qs(urlsplit(self.path).query)["name"][0]
        content = self.rfile.read(int(self.headers["Content-Length"]))
        fault = self._begin(f"POST {name}")
        if isinstance(fault, int):
            return self._answer(fault, b"out of order")
        self.store.objects[name] = content
        return self._answer(200, json.dumps({"name": name, "size": str(len(content))}).encode())

    def _begin(self, request: str) -> Any:
        self.store.requests.append(request)
        return self.store.faults.pop(0) if self.store.faults else None

    def _answer(self, status: int, content: bytes, short: bool = False) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if short else content)

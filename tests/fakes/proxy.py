"""A proxy on loopback that has on record what it was asked for, and one that never answers."""

import base64
import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest

from tests.fakes.loopback import Loopback

NAMES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


class ListeningProxy(Loopback):
    """Answers plain requests itself, with `content`, in the name of any host; refuses what is encrypted."""

    protocol_version = "HTTP/1.1"
    seen: list[str]
    content: Mapping[str, object]

    def do_CONNECT(self) -> None:  # noqa: N802
        self._record()
        if self.path.endswith(":443"):
            return self.answer(502, b"")
        self.send_response(200)  # httplib2 asks for a tunnel for plain HTTP too
        return self.end_headers()

    def do_GET(self) -> None:  # noqa: N802
        self._record()
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.answer(200, json.dumps(self.content).encode(), **{"Content-Type": "application/json"})

    do_POST = do_HEAD = do_GET  # noqa: N815

    def _record(self) -> None:
        kind, _, secret = self.headers.get("Proxy-Authorization", "").partition(" ")
        who = f" as {base64.b64decode(secret).decode()}" if kind.lower() == "basic" else ""
        self.seen.append(f"{self.command} {self.path}{who}")


@contextmanager
def silent_proxy() -> Iterator[str]:
    """Yield the address of a proxy that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def set_proxies(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    """Set these variables of proxies and no other, until the end of the test, whatever is made of them meanwhile."""
    for name in NAMES:
        for variable in (name, name.upper()):
            monkeypatch.setenv(variable, "")  # so that it is put back
            monkeypatch.delenv(variable)
    for variable, text in variables.items():
        monkeypatch.setenv(variable, text)

"""Asking who we are on the internet; the services are of this test."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from controller.ssh.public_ip import find_public_ip

ANSWERS = {"/good": b"8.8.4.4\n", "/html": b"<html>", "/six": b"2001:db8::1\n"}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path in ANSWERS else 500)
        self.end_headers()
        self.wfile.write(ANSWERS.get(self.path, b""))

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def root() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (["/good"], "8.8.4.4"),
        (["/down", "/good"], "8.8.4.4"),
        (["/html", "/six", "/good"], "8.8.4.4"),
        (["/html", "/down"], None),
    ],
)
def test_the_first_that_knows_is_believed(root: str, asked: list[str], found: str | None) -> None:
    assert find_public_ip(tuple(root + path for path in asked)) == found

"""Finding the emulated cloud that runs on a state folder."""

import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from controller.cloud import emulator


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        allowed = self.headers["Authorization"] == "Bearer right"
        answer = {"pid": os.getpid()} if allowed else {"error": {"message": "another server's token"}}
        body = json.dumps(answer).encode()
        self.send_response(200 if allowed else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def _endpoint(folder: Path, **changed: object) -> None:
    found = {"token": "right", "pid": os.getpid(), "roots": {}, "project": "p", "ssh_config": "s", **changed}
    (folder / "endpoint.json").write_text(json.dumps(found))


def test_a_running_one_is_found_without_starting_a_program(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emulator, "run_emulator_verb", lambda *_: pytest.fail("a program was started"))
    _endpoint(tmp_path, url=url)
    found = emulator.find_answering(tmp_path)
    assert found is not None
    assert found.url == url.rstrip("/")


@pytest.mark.parametrize("changed", [{"token": "wrong"}, {"pid": 1}, {"url": "http://127.0.0.1:9/"}])
def test_the_file_of_a_killed_one_is_not_believed(url: str, tmp_path: Path, changed: dict[str, object]) -> None:
    assert emulator.find_answering(tmp_path) is None, "none has run on a new folder"
    (tmp_path / "endpoint.json").write_text('{"url"')
    assert emulator.find_answering(tmp_path) is None
    _endpoint(tmp_path, **{"url": url, **changed})
    assert emulator.find_answering(tmp_path) is None

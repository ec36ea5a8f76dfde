"""Assets: hashed, fetched with their checksum, uploaded before a TPU, and known by their content."""

from __future__ import annotations

import hashlib
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from conf.assets import Asset
from controller.errors import CloudError, ConfigError
from controller.resources.dataset import fetch, manifest, prefix
from tests.controller.conftest import ECHO, Slipway

CONTENT = b"rows\n" * 400_000  # more than one chunk of a resumable upload needs no special case


@pytest.fixture
def server() -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(CONTENT)))
            self.end_headers()
            self.wfile.write(CONTENT)

        def log_message(self, format: str, *args: object) -> None:
            return

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{listening.server_address[1]}/train.jsonl"
        listening.shutdown()


def remote(url: str, sha256: str) -> Asset:
    return Asset.model_validate({"files": {"train.jsonl": {"url": url, "sha256": sha256}}})


def test_content_and_not_place_names_the_copy(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.jsonl").write_text("same")
    one, two = (manifest("d", Asset(path=str(tmp_path / name)), tmp_path) for name in ("a", "b"))
    assert prefix("d", one) == prefix("d", two)
    (tmp_path / "b" / "x.jsonl").write_text("other")
    assert prefix("d", manifest("d", Asset(path=str(tmp_path / "b")), tmp_path)) != prefix("d", one)


def test_a_download_is_checked_and_kept(tmp_path: Path, server: str) -> None:
    [source] = manifest("d", remote(server, hashlib.sha256(CONTENT).hexdigest()), tmp_path).files
    fetch(source)
    assert source.local.read_bytes() == CONTENT


def test_another_content_than_promised_is_refused(tmp_path: Path, server: str) -> None:
    [source] = manifest("d", remote(server, "0" * 64), tmp_path).files
    with pytest.raises(CloudError, match="the config says 000000000000"):
        fetch(source)
    assert list(tmp_path.iterdir()) == []


def test_nothing_there_names_the_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"assets\.datasets\.d\.path: no file at"):
        manifest("d", Asset(path=str(tmp_path)), tmp_path)


@pytest.mark.e2e
def test_the_copy_is_in_the_bucket_before_the_tpu(slipway: Slipway, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "train.jsonl").write_bytes(CONTENT)
    assert slipway("up", ECHO, f"assets.datasets.mine.path={data}")[0] == 0
    log = [f"{r['method']} {r['path']} {r['query']}" for r in slipway.cloud().requests() if r["mutating"]]
    upload = next(i for i, line in enumerate(log) if "assets/mine-" in line and "manifest.json" in line)
    create = next(i for i, line in enumerate(log) if line.startswith("POST") and "/queuedResources " in line)
    assert upload < create

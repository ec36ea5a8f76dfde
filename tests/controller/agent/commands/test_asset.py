"""What a worker downloads and copies to the bucket: resumed, checked, once."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from controller.agent.commands import asset
from controller.agent.formats import dump
from controller.agent.fs import AgentError
from tests.controller.agent.conftest import AgentWorker

CONTENT = b"weights" * 1000
SHA256 = hashlib.sha256(CONTENT).hexdigest()


def order(worker: AgentWorker, sha256: str = SHA256) -> dict[str, Any]:
    """The stand-in bucket hands out the file as well."""
    worker.bucket.objects["source"] = CONTENT
    url = f"{worker.bucket.url}storage/v1/b/b/o/source"
    files = {"sub/w.bin": {"url": url, "sha256": sha256}}
    return {"bucket": "b", "prefix": "assets/w-1", "files": files, "manifest": "{}"}


def lines(worker: AgentWorker, **payload: Any) -> tuple[int, list[dict[str, Any]]]:
    return worker.finish_command(worker.start_command("fetch_asset", **payload))


def test_files_come_before_the_manifest_and_once(worker: AgentWorker) -> None:
    assert lines(worker, **order(worker)) == (0, [{"done": True}])
    assert worker.bucket.objects["assets/w-1/sub/w.bin"] == CONTENT
    posts = [r for r in worker.bucket.requests if r.startswith("POST")]
    assert posts == ["POST assets/w-1/sub/w.bin", "POST assets/w-1/manifest.json"]
    worker.bucket.requests.clear()
    assert lines(worker, **order(worker))[0] == 0
    assert "GET source" not in worker.bucket.requests
    assert list((worker.root / "fetched").iterdir()) == []


def test_another_content_is_refused_and_nothing_is_copied(worker: AgentWorker) -> None:
    code, said = lines(worker, **order(worker, "0" * 64))
    assert code == 1
    assert "but the config has 000000000000" in said[-1]["error"]
    assert "assets/w-1/manifest.json" not in worker.bucket.objects
    assert list((worker.root / "fetched").iterdir()) == []


def test_what_breaks_off_is_taken_up_again(worker: AgentWorker) -> None:
    worker.bucket.faults = [404, "cut"]  # the look whether it is there already, then the download
    assert lines(worker, **order(worker))[0] == 0
    assert worker.bucket.objects["assets/w-1/sub/w.bin"] == CONTENT


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (403, "HTTP 403; it requires a token"),
        (404, "HTTP 404"),
        (302, "HTTP 302; it is redirected in a circle, or not to http"),
    ],
)
def test_a_refusal_is_told(worker: AgentWorker, status: int, expected: str) -> None:
    worker.bucket.faults = [404, status]
    code, said = lines(worker, **order(worker))
    assert code == 1
    assert said[-1]["error"].endswith(f"answered {expected}")


def test_a_full_disk_is_told_at_once(worker: AgentWorker) -> None:
    (worker.root / "fetched").mkdir(parents=True)
    (worker.root / "fetched" / SHA256).symlink_to("/dev/full")
    code, said = lines(worker, **order(worker))
    assert (code, len(said)) == (1, 1)
    assert said[0]["error"] == f"sub/w.bin: no space left in {worker.root / 'fetched'} of this machine"


def test_orders_are_read_again_until_their_files_have_arrived(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first are of a later version; the addresses of the next have expired."""
    slept, tried = list[float](), list[str]()

    def fetch(prefix: str) -> None:
        tried.append(prefix)
        if prefix == "expired":
            raise AgentError("refused")

    written = [b'{"format": 99}', dump({"prefix": "expired"}), dump({"prefix": "good"})]
    monkeypatch.setattr(asset, "fetch_asset", fetch)
    monkeypatch.setattr(asset.time, "sleep", slept.append)
    monkeypatch.setattr(asset, "read_object", lambda bucket, name: written.pop(0))
    asset.fetch_ordered("b", "a/fetch.json")
    assert tried == ["expired", "good"]
    told = [json.loads(line)["error"] for line in capsys.readouterr().out.splitlines()]
    assert told[0].startswith("a/fetch.json has format 99")
    assert told[1:] == ["refused"]
    assert slept == [asset.ORDERS_PAUSE_SECONDS] * 2

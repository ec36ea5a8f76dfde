"""What a worker downloads and copies to the bucket: resumed, checked, once."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from controller.agent.commands import asset
from controller.agent.formats import dump
from controller.agent.fs import AgentError
from controller.localcloud.hub import HubFault, HubServer, HubState
from tests.controller.agent.conftest import AgentWorker, wait_for
from tests.hub import write

CONTENT = b"weights" * 1000
SHA256 = hashlib.sha256(CONTENT).hexdigest()


def order(worker: AgentWorker, sha256: str = SHA256) -> dict[str, Any]:
    """The stand-in bucket hands out the file as well."""
    worker.bucket.objects["source"] = CONTENT
    url = f"{worker.bucket.url}storage/v1/b/b/o/source"
    files = {"sub/w.bin": {"url": url, "sha256": sha256}}
    return {"bucket": "b", "prefix": "assets/w-1", "files": files, "manifest": "{}"}


def test_files_come_before_the_manifest_and_once(worker: AgentWorker) -> None:
    assert worker.run_command("fetch_asset", **order(worker)) == (0, [{"done": True}])
    assert worker.bucket.objects["assets/w-1/sub/w.bin"] == CONTENT
    posts = [r for r in worker.bucket.requests if r.startswith("POST")]
    assert posts == ["POST assets/w-1/sub/w.bin", "POST assets/w-1/manifest.json"]
    worker.bucket.requests.clear()
    assert worker.run_command("fetch_asset", **order(worker))[0] == 0
    assert "GET source" not in worker.bucket.requests
    assert list((worker.root / "fetched").iterdir()) == []


def test_another_content_is_refused_and_nothing_is_copied(worker: AgentWorker) -> None:
    code, said = worker.run_command("fetch_asset", **order(worker, "0" * 64))
    assert code == 1
    assert "but the config has 000000000000" in said[-1]["error"]
    assert "assets/w-1/manifest.json" not in worker.bucket.objects
    assert list((worker.root / "fetched").iterdir()) == []


def test_what_breaks_off_is_taken_up_again(worker: AgentWorker) -> None:
    worker.bucket.faults = [404, "cut"]  # the look whether it is there already, then the download
    assert worker.run_command("fetch_asset", **order(worker))[0] == 0
    assert worker.bucket.objects["assets/w-1/sub/w.bin"] == CONTENT


def test_a_refusal_is_told(worker: AgentWorker) -> None:
    circle = "HTTP 302; it is redirected in a circle, or not to http"
    for status, expected in ((403, "HTTP 403; it requires a token"), (404, "HTTP 404"), (302, circle)):
        worker.bucket.faults = [404, status]
        code, said = worker.run_command("fetch_asset", **order(worker))
        assert code == 1
        assert said[-1]["error"].endswith(f"answered {expected}")


def test_a_fetch_that_is_killed_in_mid_file_goes_on_there(worker: AgentWorker, tmp_path: Path) -> None:
    """Real processes: the first gets half of the file and is killed, the second asks for the rest."""
    content = b"weights " * 200_000
    write(tmp_path / "hub/models/acme/open", {"model.safetensors": content})
    sha256 = hashlib.sha256(content).hexdigest()
    with HubServer(HubState(tmp_path / "hub")) as hub:
        hub.state.faults.append(HubFault("GET /lfs/", stall=len(content) // 2))
        url = f"{hub.endpoint}/acme/open/resolve/main/model.safetensors"
        files = {"w.bin": {"url": url, "sha256": sha256}}
        asked = {"bucket": "b", "prefix": "assets/w-1", "files": files, "manifest": "{}"}
        first = worker.start_command("fetch_asset", **asked)
        part = worker.root / "fetched" / sha256
        wait_for(lambda: part.is_file() and part.stat().st_size > 1 << 19)
        first.kill()
        first.communicate()
        had = part.stat().st_size
        assert worker.run_command("fetch_asset", **asked) == (0, [{"done": True}])
        wait_for(lambda: len(hub.state.sent) == 2)
        assert sorted(begin for _, begin, _ in hub.state.sent) == [0, had]
    assert worker.bucket.objects["assets/w-1/w.bin"] == content
    assert not part.exists()


def test_a_rest_of_another_content_is_fetched_again(worker: AgentWorker) -> None:
    (worker.root / "fetched").mkdir(parents=True)
    (worker.root / "fetched" / SHA256).write_bytes(b"old")
    assert worker.run_command("fetch_asset", **order(worker))[0] == 0
    assert worker.bucket.objects["assets/w-1/sub/w.bin"] == CONTENT


def test_a_full_disk_is_told_at_once(worker: AgentWorker) -> None:
    (worker.root / "fetched").mkdir(parents=True)
    (worker.root / "fetched" / SHA256).symlink_to("/dev/full")
    code, said = worker.run_command("fetch_asset", **order(worker))
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
        if prefix == "full":
            raise asset.FinalError("no space")

    written = [b'{"format": 99}', *(dump({"prefix": name}) for name in ("expired", "full", "good"))]
    monkeypatch.setattr(asset, "fetch_asset", fetch)
    monkeypatch.setattr(asset.time, "sleep", slept.append)
    monkeypatch.setattr(asset, "read_object", lambda bucket, name: written.pop(0))
    asset.fetch_ordered("b", "a/fetch.json")
    assert tried == ["expired", "full", "good"]
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert told[0]["error"].startswith("a/fetch.json has format 99")
    assert [(line["error"], line.get("final")) for line in told[1:]] == [("refused", None), ("no space", True)]
    assert slept == [asset.ORDERS_PAUSE_SECONDS] * 3

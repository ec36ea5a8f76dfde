"""What a worker downloads, builds and copies to the bucket: resumed, checked, once; and what it does on failures."""

import hashlib
import io
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from controller.agent import transfers
from controller.agent.transfers import FRESH_VM_SECONDS, RETRY_SECONDS, TransferError, with_retries
from controller.agent.worker_processes import start_time
from tests.controller.agent.conftest import AgentWorker, wait_for
from tests.fakes.loopback import FakeBucket
from tests.hub import HubFault, faulty_hub, write

CONTENT = b"weights" * 1000
SHA256 = hashlib.sha256(CONTENT).hexdigest()


def order(worker: AgentWorker, sha256: str = SHA256) -> dict[str, Any]:
    """The stand-in bucket hands out the file as well."""
    worker.bucket.objects["source"] = CONTENT
    url = f"{worker.bucket.url}storage/v1/b/b/o/source?alt=media"
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


@pytest.mark.parametrize("fault", ["cut", 429, 503])
def test_what_breaks_off_is_taken_up_again(worker: AgentWorker, fault: str | int) -> None:
    worker.bucket.faults = [404, fault]  # the look whether it is there already, then the download
    assert worker.run_command("fetch_asset", **order(worker))[0] == 0
    assert worker.bucket.objects["assets/w-1/sub/w.bin"] == CONTENT


def test_a_refusal_is_told(worker: AgentWorker) -> None:
    circle = "HTTP 302; it is redirected in a circle, or not to http"
    for status, expected in ((403, "HTTP 403; it requires a token"), (404, "HTTP 404"), (302, circle)):
        worker.bucket.faults = [404, status]
        asked = order(worker)
        asked["files"]["sub/w.bin"]["url"] += "?Signature=planted"
        code, said = worker.run_command("fetch_asset", **asked)
        assert code == 1
        assert said[-1]["error"].endswith(f"answered {expected}")
        assert "planted" not in said[-1]["error"], "a signed address is a key to the file"


def test_a_fetch_that_is_killed_in_mid_file_goes_on_there(worker: AgentWorker, tmp_path: Path) -> None:
    """Real processes: the first gets half of the file and is killed, the second asks for the rest."""
    content = b"weights " * 200_000
    write(tmp_path / "hub/models/acme/open", {"model.safetensors": content})
    sha256 = hashlib.sha256(content).hexdigest()
    with faulty_hub(tmp_path / "hub") as hub:
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


MAKE = """
import os, pathlib, sys, time
out = pathlib.Path(sys.argv[1])
print("token", os.environ.get("TOKEN"))
(out / "sub").mkdir()
(out / "sub/a").write_text("half")
pathlib.Path("beside").write_text("not in the code")
pathlib.Path(sys.argv[2], f"began-{os.getpid()}").touch()
while not pathlib.Path(sys.argv[2], "go").exists():
    time.sleep(0.02)
(out / "sub/a").write_text("whole")
(out / "b").write_text("b")
sys.exit(int(pathlib.Path(sys.argv[2], "go").read_text() or 0))
"""


def build_order(worker: AgentWorker, folder: Path, *argv: str, **more: Any) -> dict[str, Any]:
    code = worker.upload_code({"make.py": MAKE})
    words = [*(argv or ("python", "make.py", "{output}", str(folder)))]
    worker.call("install_code", **code)
    return {"bucket": "b", "prefix": "assets/t-1", "argv": words, "code": code["tree"], "venv": "none", **more}


def test_a_build_that_is_killed_begins_again(worker: AgentWorker, tmp_path: Path) -> None:
    """Also what it left running is ended, and nothing of it counts."""
    asked = build_order(worker, tmp_path)
    first = worker.start_command("build_asset", **asked)
    [began] = wait_for(lambda: list(tmp_path.glob("began-*")))
    wait_for(lambda: (worker.root / "builds/t-1/process.json").is_file())
    first.kill()
    first.communicate()
    assert not [name for name in worker.bucket.objects if name.startswith("assets/")]
    second = worker.start_command("build_asset", **asked)
    wait_for(lambda: len(list(tmp_path.glob("began-*"))) == 2)
    wait_for(lambda: start_time(int(began.name.partition("-")[2])) is None)
    (tmp_path / "go").write_text("0")
    code, said = worker.finish_command(second)
    assert (code, said[0], said[-1]) == (0, {"bytes": 0}, {"done": True})
    stored = {name: content for name, content in worker.bucket.objects.items() if name.startswith("assets/t-1/")}
    manifest = json.loads(stored.pop("assets/t-1/manifest.json"))
    assert stored == {"assets/t-1/sub/a": b"whole", "assets/t-1/b": b"b"}
    assert manifest == {name.removeprefix("assets/t-1/"): hashlib.sha256(c).hexdigest() for name, c in stored.items()}
    assert not (worker.root / "builds/t-1").exists()
    assert sorted(p.name for p in (worker.root / "code" / asked["code"]).iterdir()) == ["make.py"]
    worker.bucket.requests.clear()
    assert worker.run_command("build_asset", **asked)[0] == 0
    assert [r for r in worker.bucket.requests if r.startswith("POST")] == []


def test_a_build_that_has_ended_is_copied_and_not_run_again(worker: AgentWorker, tmp_path: Path) -> None:
    (tmp_path / "go").write_text("0")
    asked = build_order(worker, tmp_path)
    worker.bucket.faults = [404, None, 403]  # look for the manifest, the first file, the second
    code, said = worker.run_command("build_asset", **asked)
    assert code == 1, said
    assert "assets/t-1/manifest.json" not in worker.bucket.objects
    worker.bucket.requests.clear()
    assert worker.run_command("build_asset", **asked)[0] == 0
    assert len(list(tmp_path.glob("began-*"))) == 1
    posts = [r for r in worker.bucket.requests if r.startswith("POST")]
    assert len(posts) == 2
    assert posts[-1] == "POST assets/t-1/manifest.json"


def test_a_build_that_fails_shows_the_end_of_its_log(worker: AgentWorker, tmp_path: Path) -> None:
    (tmp_path / "go").write_text("3")
    code, said = worker.run_command("build_asset", **build_order(worker, tmp_path, secrets={"TOKEN": "hf_planted"}))
    assert code == 1
    command = f"`python make.py '{{output}}' {tmp_path}`"
    assert said[-1] == {
        "error": f"{command} ended with code 3; its log is gs://b/builds/t-1.log", "detail": "token **********",
    }  # fmt: skip
    assert worker.bucket.objects["builds/t-1.log"] == b"token **********\n"
    assert not [name for name in worker.bucket.objects if name.startswith("assets/")]
    _, said = worker.run_command("build_asset", **build_order(worker, tmp_path, "true", "{output}"))
    assert said[-1]["error"] == "`true '{output}'` wrote no file to {output}; its log is gs://b/builds/t-1.log"
    _, said = worker.run_command("build_asset", **build_order(worker, tmp_path, "no-such-program", "{output}"))
    assert said[-1]["error"] == "`no-such-program '{output}'` cannot start here: No such file or directory"
    _, said = worker.run_command(
        "build_asset", **build_order(worker, tmp_path, "sh", "-c", "kill -KILL $$", "{output}")
    )
    assert f"ended with code {-signal.SIGKILL}" in said[-1]["error"]


def pauses_of(uptime: float, **how: bool) -> list[float]:
    """The pauses of a request that always fails, on a VM that has been up for so long."""
    pauses: list[float] = []

    def never() -> None:
        raise TransferError("no", **how)

    with pytest.raises(TransferError, match="no"):
        with_retries(never, pauses.append, lambda: uptime + sum(pauses))
    return pauses


def test_what_may_pass_is_tried_again_and_what_lasts_is_told_at_once() -> None:
    assert pauses_of(60) == pauses_of(FRESH_VM_SECONDS) == [*RETRY_SECONDS]
    assert pauses_of(60, permanent=True) == []


def test_a_missing_role_is_waited_for_on_a_fresh_vm() -> None:
    """IAM shows a new binding to Cloud Storage minutes after it was made, when a v5e VM is up already."""
    pauses = pauses_of(60, permanent=True, denied=True)
    assert tuple(pauses[: len(RETRY_SECONDS)]) == RETRY_SECONDS, "roles may be seen at once"
    assert FRESH_VM_SECONDS - 60 <= sum(pauses) < FRESH_VM_SECONDS - 50
    assert pauses_of(FRESH_VM_SECONDS, permanent=True, denied=True) == []


def test_google_is_asked_with_the_token_of_the_vm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, dict[str, str]] = {}

    def google(url: str, headers: dict[str, str], *_: object) -> io.BytesIO:
        asked[url] = headers
        return io.BytesIO(json.dumps({"access_token": "ya29.x"}).encode() if "metadata" in url.lower() else b"content")

    monkeypatch.delenv("SLIPWAY_STORAGE_ROOT", raising=False)
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:1")
    monkeypatch.setattr(transfers, "open_url", google)
    sha256 = "ed7002b439e9ac845f22357d822bac1444730fbdb6016d3ec9432297b9ec9f73"
    transfers.download_object("b", "code/a b.tar.gz", sha256, tmp_path / "out")
    assert asked == {
        "http://127.0.0.1:1/computeMetadata/v1/instance/service-accounts/default/token": {"Metadata-Flavor": "Google"},
        "https://storage.googleapis.com/storage/v1/b/b/o/code%2Fa%20b.tar.gz?alt=media": {
            "Authorization": "Bearer ya29.x"
        },
    }
    assert (tmp_path / "out").read_bytes() == b"content"


def test_an_upload_holds_what_the_file_held(
    monkeypatch: pytest.MonkeyPatch, bucket: FakeBucket, tmp_path: Path
) -> None:
    monkeypatch.setenv("SLIPWAY_STORAGE_ROOT", bucket.url)
    (tmp_path / "log").write_bytes(b"x" * 3_000_000)
    transfers.upload_file(tmp_path / "log", "b", "runs/a b/log")
    transfers.upload_file(tmp_path / "nothing", "b", "empty")
    assert bucket.objects == {"runs/a b/log": b"x" * 3_000_000, "empty": b""}


def test_a_storage_out_of_reach_is_a_transfer_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLIPWAY_STORAGE_ROOT", "http://127.0.0.1:1/")
    with pytest.raises(TransferError, match="refused"):
        transfers.upload_file(tmp_path / "log", "b", "log")
    with pytest.raises(TransferError, match="refused"):
        transfers.download_object("b", "x", "", tmp_path / "out")


def test_a_failure_names_the_object_and_never_the_url(
    monkeypatch: pytest.MonkeyPatch, bucket: FakeBucket, tmp_path: Path
) -> None:
    """The root of an emulated worker holds a token."""
    monkeypatch.setenv("SLIPWAY_STORAGE_ROOT", f"{bucket.url}w/t0ken/")
    bucket.faults += [403, "cut"]
    bucket.objects["x"] = b"content"
    for words in ("HTTP 403: out of order", "has SHA-256"):
        with pytest.raises(TransferError, match=words) as caught:
            transfers.download_object("b", "x", "", tmp_path / "out")
        assert "gs://b/x" in str(caught.value)
        assert "t0ken" not in str(caught.value)

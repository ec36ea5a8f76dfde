import io
import json
from pathlib import Path

import pytest

from controller.agent import storage
from controller.agent.storage import FRESH_VM_SECONDS, RETRY_SECONDS, TransferError, with_retries
from tests.controller.agent.bucket import FakeBucket


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
    assert pauses_of(60, lasting=True) == []


def test_a_missing_role_is_waited_for_on_a_fresh_vm() -> None:
    """IAM shows a new binding to Cloud Storage minutes after it was made, when a v5e VM is up already."""
    pauses = pauses_of(60, lasting=True, denied=True)
    assert tuple(pauses[: len(RETRY_SECONDS)]) == RETRY_SECONDS, "roles may be seen at once"
    assert FRESH_VM_SECONDS - 60 <= sum(pauses) < FRESH_VM_SECONDS - 50
    assert pauses_of(FRESH_VM_SECONDS, lasting=True, denied=True) == []


def test_google_is_asked_with_the_token_of_the_vm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, dict[str, str]] = {}

    def google(url: str, headers: dict[str, str], *_: object) -> io.BytesIO:
        asked[url] = headers
        return io.BytesIO(json.dumps({"access_token": "ya29.x"}).encode() if "metadata" in url.lower() else b"content")

    monkeypatch.delenv("SLIPWAY_STORAGE_ROOT", raising=False)
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:1")
    monkeypatch.setattr(storage, "open_url", google)
    sha256 = "ed7002b439e9ac845f22357d822bac1444730fbdb6016d3ec9432297b9ec9f73"
    storage.download_object("b", "code/a b.tar.gz", sha256, tmp_path / "out")
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
    storage.upload_file(tmp_path / "log", "b", "runs/a b/log")
    storage.upload_file(tmp_path / "nothing", "b", "empty")
    assert bucket.objects == {"runs/a b/log": b"x" * 3_000_000, "empty": b""}


def test_a_storage_out_of_reach_is_a_transfer_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLIPWAY_STORAGE_ROOT", "http://127.0.0.1:1/")
    with pytest.raises(TransferError, match="refused"):
        storage.upload_file(tmp_path / "log", "b", "log")
    with pytest.raises(TransferError, match="refused"):
        storage.download_object("b", "x", "", tmp_path / "out")


def test_a_failure_names_the_object_and_never_the_url(
    monkeypatch: pytest.MonkeyPatch, bucket: FakeBucket, tmp_path: Path
) -> None:
    """The root of an emulated worker holds a token."""
    monkeypatch.setenv("SLIPWAY_STORAGE_ROOT", f"{bucket.url}w/t0ken/")
    bucket.faults += [403, "cut"]
    bucket.objects["x"] = b"content"
    for words in ("HTTP 403: out of order", "has SHA-256"):
        with pytest.raises(TransferError, match=words) as caught:
            storage.download_object("b", "x", "", tmp_path / "out")
        assert "gs://b/x" in str(caught.value)
        assert "t0ken" not in str(caught.value)

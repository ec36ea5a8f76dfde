"""A folder answers like a bucket: conditional writes, metadata, listings, and files that programs wrote."""

import base64
import hashlib
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from controller.core.errors import CloudError
from controller.core.this_process import Clock
from controller.gcp.folder_store import FolderClient
from controller.gcp.google_errors import ConflictError, NoCredentialsError, NotFoundError


@pytest.fixture
def google() -> FolderClient:
    return FolderClient(Clock())


@pytest.fixture
def bucket(tmp_path: Path) -> str:
    return str(tmp_path / "store")


def names(google: FolderClient, bucket: str, prefix: str = "") -> list[str]:
    return [i["name"] for i in google.list_all("storage", "objects.list", "items", bucket=bucket, prefix=prefix)]


def test_an_object_is_the_file_of_its_name(google: FolderClient, bucket: str) -> None:
    google.upload(bucket, "runs/a/result.json", b"{}")
    assert (Path(bucket) / "runs/a/result.json").read_bytes() == google.download(bucket, "runs/a/result.json") == b"{}"
    (Path(bucket) / "runs/a/metrics.jsonl").write_text("of a program")
    assert names(google, bucket) == ["runs/a/metrics.jsonl", "runs/a/result.json"]
    assert google.call("storage", "objects.get", bucket=bucket, object="runs/a/metrics.jsonl")["size"] == "12"
    google.call("storage", "objects.delete", bucket=bucket, object="runs/a/result.json")
    with pytest.raises(NotFoundError):
        google.download(bucket, "runs/a/result.json")
    assert names(google, f"{bucket}-none") == []


def test_a_write_needs_the_expected_generation(google: FolderClient, bucket: str) -> None:
    first = google.upload(bucket, "lease.json", b"1", generation=0, metadata={"lease": "1"})
    with pytest.raises(ConflictError):
        google.upload(bucket, "lease.json", b"2", generation=0)
    second = google.upload(bucket, "lease.json", b"2", generation=int(first["generation"]), metadata={"lease": "2"})
    assert int(second["generation"]) > int(first["generation"])
    with pytest.raises(ConflictError):
        google.upload(bucket, "lease.json", b"3", generation=int(first["generation"]))
    found, now = google.object_metadata(bucket, "lease.json")
    assert (found["metadata"], found["generation"]) == ({"lease": "2"}, second["generation"])
    assert abs(now - (Path(bucket) / "lease.json").stat().st_mtime) < 60
    assert names(google, bucket) == ["lease.json"], "neither locks, drafts nor metadata are objects"


def test_a_generation_does_not_come_back_after_a_deletion(google: FolderClient, bucket: str) -> None:
    first = google.upload(bucket, "lease.json", b"1", generation=0)
    google.call("storage", "objects.delete", bucket=bucket, object="lease.json")
    second = google.upload(bucket, "lease.json", b"2", generation=0)
    assert int(second["generation"]) > int(first["generation"])
    with pytest.raises(ConflictError):
        google.upload(bucket, "lease.json", b"3", generation=int(first["generation"]))
    assert google.download(bucket, "lease.json") == b"2"


def test_one_of_many_writers_wins(google: FolderClient, bucket: str) -> None:
    won: list[int] = []

    def write(number: int) -> None:
        try:
            FolderClient(Clock()).upload(bucket, "launch.json", b"%d" % number, generation=0)
        except ConflictError:
            return
        won.append(number)

    threads = [threading.Thread(target=write, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert google.download(bucket, "launch.json") == b"%d" % won[0]
    assert len(won) == 1


def test_a_listing_ends_at_the_delimiter(google: FolderClient, bucket: str) -> None:
    for name in ("runs/a/checkpoints/10/x", "runs/a/checkpoints/20/y", "runs/a/checkpoints/latest", "runs/ab/z"):
        google.upload(bucket, name, b"")
    found = google.call("storage", "objects.list", bucket=bucket, prefix="runs/a/checkpoints/", delimiter="/")
    assert found["prefixes"] == ["runs/a/checkpoints/10/", "runs/a/checkpoints/20/"]
    assert [item["name"] for item in found["items"]] == ["runs/a/checkpoints/latest"]
    assert names(google, bucket, "runs/ab") == ["runs/ab/z"]


def test_a_file_is_copied_with_its_md5(google: FolderClient, bucket: str, tmp_path: Path) -> None:
    (source := tmp_path / "data").write_bytes(content := b"x" * 3_000_000)
    moved: list[int] = []
    answer = google.upload_file(bucket, "assets/d/data", source, tmp_path / "session", moved.append)
    assert answer["md5Hash"] == base64.b64encode(hashlib.md5(content).digest()).decode()
    assert sum(moved) == len(content)
    place = {"sourceBucket": bucket, "sourceObject": "assets/d/data"}
    place |= {"destinationBucket": bucket, "destinationObject": "assets/e/data"}
    assert google.call("storage", "objects.rewrite", **place, body={})["done"]
    assert google.download(bucket, "assets/e/data") == content


@pytest.mark.parametrize(
    "ask",
    [
        lambda google, bucket: google.call("tpu", "projects.locations.nodes.list", parent="p"),
        lambda google, bucket: google.call("storage", "buckets.get", bucket=bucket),
        lambda google, bucket: google.call("storage", "objects.list", bucket="somebodys-bucket"),
        lambda google, bucket: google.token(),
    ],
)
def test_nothing_else_is_asked_of_google(
    google: FolderClient, bucket: str, ask: Callable[[FolderClient, str], object]
) -> None:
    with pytest.raises(NoCredentialsError):
        ask(google, bucket)


def test_no_name_leads_out_of_the_folder(google: FolderClient, bucket: str) -> None:
    for name in ("../x", "a/../../x", "/etc/passwd", ".lock", "a//b"):
        with pytest.raises(CloudError, match="cannot be a file"):
            google.upload(bucket, name, b"")


def test_a_folder_that_cannot_be_written_is_a_clear_error(google: FolderClient, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CloudError, match=r"cannot write .*: Not a directory; cloud.folder names another folder"):
        google.upload(str(tmp_path / "file"), "a", b"")


def test_a_folder_of_an_earlier_slipway_has_no_boot_time(google: FolderClient, bucket: str) -> None:
    google.upload(bucket, "a", b"x", metadata={"key": "value"})
    (Path(bucket) / ".metadata/a.json").write_text('{"format": 1, "generation": 4, "metadata": {"key": "value"}}')
    found, now = google.object_metadata(bucket, "a")
    assert (found["generation"], found["metadata"]) == ("4", {"key": "value"})
    assert now >= Path(bucket, "a").stat().st_mtime

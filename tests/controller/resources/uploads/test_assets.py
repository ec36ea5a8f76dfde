"""An asset in the bucket is what its manifest says, whatever others with access to the bucket have done since."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from controller.core.formats import DamagedRecordError
from controller.inputs.assets import ResolvedAsset, local_files
from controller.inputs.hash_cache import HashCache
from controller.inputs.hub import SourceError
from controller.inputs.secrets import Vault
from controller.localcloud.hub import HubServer
from controller.reconcile.resource import Absent
from controller.resources.uploads.assets import UploadedAsset
from controller.resources.uploads.sources import PinnedSource
from tests.controller.resources.uploads.fetching import Project, context_of, nearby
from tests.hub import CONTENT

FILES = {"a": b"first", "b/c": b"second"}


def up(google: Project, asset: Any) -> tuple[bool, list[str]]:
    """Apply an asset as `up` does, unless it is there; return whether it was, and the notes."""
    context, notes = context_of(google)
    is_there = not isinstance(current := asset.observe(context, {}), Absent)
    if not is_there:
        asset.apply(context, {}, asset.diff(current))
        assert not isinstance(asset.observe(context, {}), Absent)
    return is_there, notes


def replace(path: Path, content: bytes) -> None:
    """Write an object as somebody else does, a while after the manifest."""
    path.write_bytes(content)
    late = max(file.stat().st_mtime for file in path.parent.rglob("*")) + 10
    os.utime(path, (late, late))


@pytest.fixture
def uploaded(google: Project, tmp_path: Path) -> UploadedAsset:
    for name, content in FILES.items():
        (path := tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    with HashCache(tmp_path / "hashes.json") as hashes:
        content = ResolvedAsset("dataset", "d", "0123456789abcdef", local_files(tmp_path / "data", hashes))
    return UploadedAsset(name="d", bucket=google.bucket, content=content, vault=Vault({}))


def test_a_file_that_was_replaced_or_deleted_is_copied_again(google: Project, uploaded: UploadedAsset) -> None:
    folder = Path(google.bucket) / uploaded.content.prefix
    assert up(google, uploaded) == (False, [])
    assert up(google, uploaded) == (True, [])
    there = uploaded.observe(context_of(google)[0], {})
    assert uploaded.title_of(there) == "dataset d in the bucket (2 files): 11 B"
    replace(folder / "b/c", b"SECOND")
    [note] = [note for note in up(google, uploaded)[1] if "replaced" in note]
    where = f"gs://{google.bucket}/{uploaded.content.prefix}/b/c"
    assert note == f"{where} was replaced after the asset was complete; it is copied again"
    (folder / "a").unlink()
    assert up(google, uploaded)[0] is False
    assert {name: (folder / name).read_bytes() for name in FILES} == FILES
    replace(folder / "notes.txt", b"a file that the manifest does not name")
    assert up(google, uploaded) == (True, [])
    # A controller that is killed while it repairs leaves nothing wrong.
    replace(folder / "b/c", b"SECOND")
    uploaded.delete_replaced(context_of(google)[0])
    assert not (folder / "b/c").exists()
    assert up(google, uploaded)[0] is False
    assert (folder / "b/c").read_bytes() == FILES["b/c"]


def test_a_replaced_file_of_the_hub_is_fetched_again(google: Project, hub: HubServer) -> None:
    asset = nearby(google, "hf://acme/open")
    up(google, asset)
    path = Path(google.bucket) / asset.content.prefix / "model.safetensors"
    replace(path, bytes(len(CONTENT)))
    assert any("model.safetensors was replaced" in note for note in up(google, asset)[1])
    assert path.read_bytes() == CONTENT


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff"])
def test_a_damaged_manifest_is_named(google: Project, uploaded: UploadedAsset, content: bytes) -> None:
    up(google, uploaded)
    (Path(google.bucket) / uploaded.manifest_object).write_bytes(content)
    with pytest.raises(DamagedRecordError, match=r"gs://.*/manifest\.json is damaged"):
        up(google, uploaded)


@pytest.mark.parametrize(
    "name", ["../../planted", "/etc/planted", "a/../../planted", "a//b", "", ".", "..", "a\x1b[2J", "a\nb", "x" * 1000]
)
def test_a_pinned_source_names_no_file_outside_its_folder(name: str) -> None:
    file = {"name": name, "path": "x", "size": 1, "sha256": None, "blob": "b"}
    with pytest.raises(SourceError, match=r"source\.json of hf://a/b is damaged: .* is not the name of a file") as said:
        PinnedSource("hf://a/b", "", (file,)).source_files()
    assert str(said.value).isprintable()


@pytest.mark.parametrize(
    "change", [{"size": "1"}, {"size": None}, {"name": 5}, {"sha256": ["x"]}, {"blob": None}, {"path": {}}]
)
def test_a_pinned_source_of_other_types_is_named(change: dict[str, Any]) -> None:
    file = {"name": "f", "path": "f", "size": 1, "sha256": None, "blob": "b", **change}
    with pytest.raises(SourceError, match=r"is damaged: a file\.\w+ is "):
        PinnedSource("hf://a/b", "", (file,)).source_files()
    for damaged in ("f", {}, None, ["name"]):
        with pytest.raises(SourceError, match="is damaged: a file "):
            PinnedSource("hf://a/b", "", (damaged,)).source_files()  # pyright: ignore[reportArgumentType]


def test_what_a_vm_prints_may_be_anything(google: Project, hub: HubServer) -> None:
    google.say(bytes="many")
    google.say(error=["no"])
    google.say(bytes=None)
    assert up(google, nearby(google, "hf://acme/open"))[0] is False

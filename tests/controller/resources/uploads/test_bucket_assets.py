"""Assets in the bucket: pinned, resumed after a kill in mid-file, and what their manifest says whatever others do."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from controller.core.json_documents import DamagedRecordError
from controller.core.this_process import Clock
from controller.gcp.folder_store import FolderClient
from controller.inputs.env_inputs import Vault
from controller.inputs.hub_sources import HubAccess, SourceError
from controller.inputs.resolved_assets import HashCache, ResolvedAsset, local_files
from controller.localcloud.hub import HubServer
from controller.reconcile import Absent
from controller.resources.uploads import source_assets
from controller.resources.uploads.bucket_assets import UploadedAsset
from controller.resources.uploads.source_assets import PinnedSource, SourceCopy, SourcedAsset
from tests.controller.conftest import ECHO_COMMAND, SlipwayCli
from tests.controller.resources.uploads.conftest import Project, context_of
from tests.hub import ACCEPTED, CONTENT, HubFault, write

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
    content = ResolvedAsset("model", "w", "0123456789abcdef", source="hf://acme/open")
    asset = SourcedAsset(name="w", bucket=google.bucket, content=content, vault=Vault({}))
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


PREFIX = "assets/w-1"
MB = 1 << 20
MOST_FETCHED_TWICE = 64 * MB


def copy_of(hub: HubServer, tmp_path: Path, source: str = "hf://acme/open") -> SourceCopy:
    access = HubAccess(hub.endpoint, None)
    folder, bucket = tmp_path / "fetches", str(tmp_path / "store")
    return SourceCopy(FolderClient(Clock()), bucket, PREFIX, source, folder, access, lambda seconds: None)


def run(copy: SourceCopy) -> int:
    """Copy a source to the end; return how many bytes were fetched."""
    moved: list[int] = []
    copy.run(copy.pin(), moved.append)
    return sum(moved)


def check_bucket(copy: SourceCopy, repository: Path) -> None:
    """Every file is there, right and on record."""
    stored = Path(copy.bucket) / PREFIX
    manifest = json.loads((stored / "manifest.json").read_text())
    wanted = {p.relative_to(repository).as_posix(): p.read_bytes() for p in repository.rglob("*") if p.is_file()}
    assert manifest == {name: hashlib.sha256(content).hexdigest() for name, content in wanted.items()}
    for name, content in wanted.items():
        assert (stored / name).read_bytes() == content, name


def test_all_files_arrive_with_their_hashes_and_commit(hub: HubServer, tmp_path: Path) -> None:
    copy = copy_of(hub, tmp_path)
    assert run(copy) == len(CONTENT) + len(b"# it") + len(b"{}")
    check_bucket(copy, hub.state.folder / "models/acme/open")
    pinned = json.loads((Path(copy.bucket) / PREFIX / "source.json").read_text())
    assert pinned["revision"] == hub.state.commit(hub.state.folder / "models/acme/open")
    assert pinned["source"] == "hf://acme/open"
    assert [p.name for p in copy.folder.rglob("*") if p.is_file()] == ["lock"], "no copy stays on this machine"
    assert copy.folder.stat().st_mode & 0o077 == 0


def test_a_fetch_that_goes_on_keeps_to_its_commit(hub: HubServer, tmp_path: Path) -> None:
    copy = copy_of(hub, tmp_path)
    first = copy.pin()
    write(hub.state.folder / "models/acme/open", {"config.json": b"another"})
    assert copy_of(hub, tmp_path).pin() == first
    with pytest.raises(SourceError, match="no revision"):  # the emulated Hub keeps no history; the real one does
        run(copy)


def test_what_has_arrived_is_not_fetched_again(hub: HubServer, tmp_path: Path) -> None:
    hub.state.faults.append(HubFault("GET .*config.json", status=404, times=1))
    copy = copy_of(hub, tmp_path)
    with pytest.raises(SourceError):
        run(copy)
    hub.state.sent.clear()
    assert run(copy_of(hub, tmp_path)) == sum(size for _, _, size in hub.state.sent)
    check_bucket(copy, hub.state.folder / "models/acme/open")
    hub.state.sent.clear()
    assert run(copy_of(hub, tmp_path)) <= len(b"{}# it"), "only files without a listed hash, at most 10 MB each"


def test_the_disk_holds_as_many_files_as_come_at_once(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_assets, "THREADS", 2)
    write(hub.state.folder / "models/acme/many", {f"{i}.bin": CONTENT + bytes([i]) for i in range(12)})
    copy, most = copy_of(hub, tmp_path, "hf://acme/many"), [0]

    def watch(size: int) -> None:
        most[0] = max(most[0], sum(1 for p in (copy.folder / "files").rglob("*") if p.is_file()))

    copy.run(copy.pin(), watch)
    assert 1 <= most[0] <= 2
    check_bucket(copy, hub.state.folder / "models/acme/many")


KILLED = """
import sys, time
from pathlib import Path
from controller.core.this_process import Clock
from controller.gcp.folder_store import FolderClient
from controller.inputs.hub_sources import HubAccess
from controller.resources.uploads.source_assets import SourceCopy
endpoint, bucket, folder = sys.argv[1:]
access = HubAccess(endpoint, None)
copy = SourceCopy(FolderClient(Clock()), bucket, "assets/w-1", "hf://acme/big", Path(folder), access, time.sleep)
copy.run(copy.pin(), lambda size: None)
"""


def begin(hub: HubServer, copy: SourceCopy) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-c", KILLED, hub.endpoint, copy.bucket, str(copy.folder)]
    return subprocess.Popen(argv, stderr=subprocess.PIPE)


def finish(hub: HubServer, copy: SourceCopy) -> None:
    """Fetch the rest, and check all files, and that no range over 64 MB came twice."""
    hub.state.pause = 0
    with begin(hub, copy) as last:
        _, error = last.communicate()
    assert last.returncode == 0, error
    check_bucket(copy, hub.state.folder / "models/acme/big")
    for name in {name for name, _, _ in hub.state.sent}:
        end = 0
        for first, size in [(first, size) for other, first, size in hub.state.sent if other == name]:
            assert end - first <= MOST_FETCHED_TWICE, (name, first, end)
            end = max(end, first + size)


def test_a_fetcher_that_is_killed_goes_on_where_it_was(hub: HubServer, tmp_path: Path) -> None:
    """SIGKILL in the middle of a file."""
    write(hub.state.folder / "models/acme/big", {"w.safetensors": random.Random(7).randbytes(24 * MB), "c.json": b"{}"})
    copy = copy_of(hub, tmp_path, "hf://acme/big")
    hub.state.faults.append(HubFault("GET /lfs/", stall=15 * MB))
    with begin(hub, copy) as fetcher:
        part = copy.folder / "files/w.safetensors.part"
        while not part.is_file() or part.stat().st_size < 8 * MB:  # the kernel may hold the rest of the 15 MB
            assert fetcher.poll() is None
            time.sleep(0.01)
        os.kill(fetcher.pid, signal.SIGKILL)
    finish(hub, copy)
    begins = [first for name, first, _ in hub.state.sent if name == "w.safetensors"]
    assert begins[0] == 0
    assert begins[-1] >= 8 * MB, "the second process went on"


@pytest.mark.deep
def test_kills_at_20_random_moments(hub: HubServer, tmp_path: Path) -> None:
    """While content is on its way, is verified or goes to the bucket."""
    rng = random.Random(7)
    files = {f"{size}.safetensors": rng.randbytes(size * MB) for size in (160, 90, 40, 12, 3)}
    write(hub.state.folder / "models/acme/big", {**files, "config.json": b"{}"})
    copy, struck = copy_of(hub, tmp_path, "hf://acme/big"), 0
    hub.state.pause = 0.05
    for _ in range(20):
        before = len(hub.state.requests)
        with begin(hub, copy) as fetcher:
            while fetcher.poll() is None and not any("/lfs/" in r for r in hub.state.requests[before:]):
                time.sleep(0.01)
            time.sleep(rng.uniform(0.05, 0.8))
            struck += fetcher.poll() is None
            fetcher.kill()
    finish(hub, copy)
    assert struck >= 5


@pytest.mark.e2e
def test_up_copies_a_gated_model_and_the_pod_fetches_another(
    slipway: SlipwayCli, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", ACCEPTED)
    words = ["tpu.accelerator_type=v5litepod-4", ECHO_COMMAND, "assets.models.gated.source=hf://acme/gated"]
    code, out, err = slipway("up", *words, "cleanup.on_success=keep")
    assert (code, err) == (0, ""), err
    assert "model gated in the bucket (hf://acme/gated)" in out
    [(bucket, objects)] = slipway.cloud().get("state")["objects"].items()
    gated = next(name for name in objects if name.endswith("/config.json")).rpartition("/")[0]
    more = [
        "assets.datasets.rows.source=hf://datasets/acme/rows/data/*",
        f"assets.models.copied.source=gs://{bucket}/{gated}/*",
    ]
    code, out, err = slipway("up", *words, "assets.fetch_on=pod", *more)
    assert (code, err) == (0, ""), err
    state = slipway.cloud().get("state")
    [objects] = state["objects"].values()
    names = [name.split("/")[1:] for name in objects if name.startswith("assets/")]
    about, parts = ["manifest.json", "source.json"], [f"train-{i}.parquet" for i in range(3)]
    assert sorted(name for asset, name in names if asset.startswith("rows-")) == [*about, *parts]
    model = ["README.md", "config.json", "model.safetensors"]
    assert sorted(name for asset, name in names if asset.startswith("gated-")) == sorted([*about, *model])
    copied = {name for asset, name in names if asset.startswith("copied-")}
    assert copied >= {"config.json", "model.safetensors"}, "copied inside Cloud Storage, at their generation"
    records = [json.loads(path.read_text()) for path in slipway.home.glob("runs/*/record.json")]
    pinned = [asset for record in records for asset in record["assets"] if asset["name"] == "gated"]
    commit = hub.state.commit(hub.state.folder / "models/acme/gated")
    assert {asset["revision"] for asset in pinned} == {commit}
    assert pinned[0]["files"]["model.safetensors"] == hashlib.sha256(CONTENT).hexdigest()
    kept = [path for path in slipway.home.rglob("*") if path.is_file() and path.stat().st_size < MB]
    assert not [path for path in kept if ACCEPTED.encode() in path.read_bytes()], "the token is written nowhere"


MAKE = """
import pathlib, sys
print("reading", sys.argv[2:])
folder = pathlib.Path(sys.argv[1])
(folder / "rows.txt").write_text(pathlib.Path("data.txt").read_text().upper())
sys.exit("no rows" if "fail" in sys.argv else 0)
"""


@pytest.mark.deep
@pytest.mark.e2e
def test_worker_0_builds_with_the_secrets_of_the_program(slipway: SlipwayCli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANTED", "planted-secret")
    (slipway.repository / "make.py").write_text("import os\nprint(os.environ['KEY'])\n" + MAKE)
    (slipway.repository / "data.txt").write_text("rows")
    words = ["tpu.accelerator_type=v5litepod-4", ECHO_COMMAND, "+env.secrets.KEY=env:PLANTED", "assets.fetch_on=pod"]
    code, out, err = slipway("up", *words, "+assets.tokenizers.t.build=[python, make.py, '{output}']")
    assert (code, err) == (0, ""), err
    assert "tokenizer t in the bucket (built by a command)" in out
    [objects] = slipway.cloud().get("state")["objects"].values()
    assert sorted(n.rpartition("/")[2] for n in objects if n.startswith("assets/t-")) == ["manifest.json", "rows.txt"]
    assert not (slipway.home / "builds").exists()
    failing = "+assets.tokenizers.t.build=[python, make.py, '{output}', fail]"
    code, _, err = slipway("up", *words, failing)
    assert code == 1, err
    assert "`python make.py '{output}' fail` ended with code 1; its log is gs://" in err
    assert "**************\nreading ['fail']\nno rows" in err
    assert "planted-secret" not in err

"""Assets: hashed once, fetched with their checksum, built, copied like rsync, and known by what is in them."""

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from google.oauth2.credentials import Credentials

from conf.schema.assets import Asset
from controller.config.run_yaml import UnknownAssetError
from controller.core.errors import CloudError, ConfigError
from controller.core.this_process import Clock
from controller.gcp.client import GoogleClient
from controller.inputs.download import download_file, run_recipe, token_for
from controller.inputs.env_inputs import Vault
from controller.inputs.resolved_assets import AssetFile, BuildRecipe, HashCache, ResolvedAsset, resolve_asset
from controller.reconcile import Diff
from controller.resources.uploads import bucket_assets
from controller.resources.uploads.bucket_assets import UploadedAsset
from tests.controller.conftest import ECHO_COMMAND, SlipwayCli
from tests.controller.localcloud.harness import EmulatedCloud
from tests.controller.resources.uploads.conftest import Project, context_of
from tests.fakes.loopback import Loopback

CONTENT = b"rows\n" * 400_000
SHA256 = hashlib.sha256(CONTENT).hexdigest()
KEEP = "cleanup.on_success=keep"


@dataclass
class Host:
    """Who hands out CONTENT: `token` is wanted, and `cut` stops the next answer half-way."""

    url: str = ""
    token: str | None = None
    cut: bool = False
    ranges: bool = True
    requests: list[dict[str, Any]] = field(default_factory=list)

    @property
    def num_downloads(self) -> int:
        """Requests for more than the byte that `plan` asks for."""
        return len([request for request in self.requests if request.get("Range") != "bytes=0-0"])


class HostPages(Loopback, BaseHTTPRequestHandler):
    told: Host

    def do_GET(self) -> None:
        told = self.told
        told.requests.append(dict(self.headers))
        if self.path in ("/moved", "/loop"):
            self.answer(302, b"", Location=told.url if self.path == "/moved" else self.path)
        elif self.path == "/pieces":  # the first of them, and no more
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"5\r\nrows\n\r\nff\r\nrow")
        elif status := {"/absent": 404, "/busy": 503}.get(self.path.partition("?")[0]):
            self.send_error(status)
        elif told.token and self.headers["Authorization"] != f"Bearer {told.token}" and self.path != "/storage":
            self.answer(401, b"")
        else:
            asked = self.headers["Range"] if told.ranges else None
            first, _, last = (asked or "bytes=0-").removeprefix("bytes=").partition("-")
            content = CONTENT[int(first) : int(last) + 1 if last else None]
            where = {"Content-Range": f"bytes {first}-{int(first) + len(content) - 1}/{len(CONTENT)}"}
            self.answer(206 if asked else 200, content, short=told.cut, **where)
            told.cut = False


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host()
    with HostPages.serving(told=made) as url:
        made.url = f"{url}train.jsonl"
        yield made


def held(tmp_path: Path, root: Path | None = None, **fields: Any) -> ResolvedAsset:
    with HashCache(tmp_path / "hashes.json") as hashes:
        return resolve_asset("dataset", "d", Asset.model_validate(fields), root or tmp_path, tmp_path, hashes)


def remote(tmp_path: Path, url: str, sha256: str = SHA256, **more: Any) -> AssetFile:
    """The file of an asset that has one, which is elsewhere."""
    [source] = held(tmp_path, files={"train.jsonl": {"url": url, "sha256": sha256, **more}}).files
    return source


def nothing(size: float) -> None:
    """Progress that nobody watches, and a pause that takes no time."""


def test_content_and_not_place_names_the_copy(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.jsonl").write_text("same")
    one, two = (held(tmp_path, path=str(tmp_path / name)) for name in ("a", "b"))
    assert (one.prefix, one.path) == (two.prefix, "datasets.d")
    with pytest.raises(ConfigError, match=r"assets\.datasets\.d\.path: no file at"):
        held(tmp_path, path=str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match=r"assets\.datasets\.d\.inputs: no file at"):
        held(tmp_path, build=["make", "{output}"], inputs=["missing"])


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    """As in a data set of others, which are uploaded. The Hub's cache is a folder of links within."""
    (tmp_path / "m/blobs").mkdir(parents=True)
    (tmp_path / "m/blobs/0").write_text("weights")
    (snapshot := tmp_path / "m/snapshots/1").mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to("../../blobs/0")
    assert [f.name for f in held(tmp_path, path=str(snapshot)).files] == ["model.safetensors"]
    (tmp_path / "key").write_text("secret")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/x").write_text("x")
    (tmp_path / "data/same").symlink_to("x")
    (tmp_path / "named").symlink_to(tmp_path / "data")
    assert [f.name for f in held(tmp_path, path=str(tmp_path / "named")).files] == ["same", "x"]
    (tmp_path / "data/y").symlink_to("../key")
    outside = rf"assets\.datasets\.d\.path: {tmp_path}/data/y is a link to {tmp_path}/key, outside"
    with pytest.raises(ConfigError, match=outside):
        held(tmp_path, path=str(tmp_path / "data"))


def test_a_file_is_hashed_anew_only_when_it_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file := tmp_path / "x").write_text("one")
    first = held(tmp_path, path=str(file))
    monkeypatch.setattr(
        "controller.inputs.resolved_assets.hash_file", lambda path: pytest.fail(f"{path} was read again")
    )
    assert held(tmp_path, path=str(file)) == first
    monkeypatch.undo()
    file.write_text("two")
    os.utime(file, ns=(1, 1))
    assert held(tmp_path, path=str(file)).identity != first.identity


def test_a_download_is_checked_and_kept_and_goes_on_where_it_broke_off(tmp_path: Path, host: Host) -> None:
    source = remote(tmp_path, host.url)
    host.cut = True
    moved, slept = list[int](), list[float]()
    download_file(source, None, moved.append, slept.append)
    download_file(source, None, moved.append)
    assert source.local.read_bytes() == CONTENT
    assert host.requests[1]["Range"] == f"bytes={len(CONTENT) // 2}-"
    assert (sum(moved), slept) == (len(CONTENT), [1.0])


@pytest.mark.parametrize("ranges", [True, False])
def test_a_rest_of_another_content_is_fetched_again(tmp_path: Path, host: Host, ranges: bool) -> None:
    """A process was killed in mid-file, and the file has changed since; or the server sends no ranges."""
    source = remote(tmp_path, host.url)
    source.local.parent.mkdir()
    source.local.with_suffix(".part").write_bytes(b"old\n" * 1000)
    host.ranges = ranges
    moved = list[int]()
    download_file(source, None, moved.append, nothing)
    assert source.local.read_bytes() == CONTENT
    assert sum(moved) == len(CONTENT)
    assert [r.get("Range") for r in host.requests] == ["bytes=4000-", *([None] if ranges else [])]


def test_another_content_than_promised_is_refused(tmp_path: Path, host: Host) -> None:
    source = remote(tmp_path, host.url, "0" * 64)
    with pytest.raises(CloudError, match=r"has SHA-256 .*, but the config has 000000000000"):
        download_file(source, None, nothing)
    assert list(source.local.parent.iterdir()) == []
    source.local.with_suffix(".part").symlink_to("/dev/full")
    with pytest.raises(CloudError) as caught:
        download_file(source, None, nothing)
    assert str(caught.value) == f"train.jsonl: no space left in {source.local.parent}; free some, `slipway up` resumes"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/absent?key=secret", "HTTP Error 404: Not Found"),
        ("/busy", "HTTP Error 503: Service Unavailable; `slipway up` resumes"),
        ("/loop", "it is redirected in a circle, or not to http (302)"),
        ("/pieces", "IncompleteRead(5 bytes read); `slipway up` resumes"),
    ],
)
def test_a_download_that_fails_is_said_in_a_line(tmp_path: Path, host: Host, path: str, expected: str) -> None:
    source = remote(tmp_path, url := host.url.replace("/train.jsonl", path))
    with pytest.raises(CloudError) as caught:
        download_file(source, None, nothing, nothing)
    assert str(caught.value) == f"train.jsonl: cannot fetch {url.partition('?')[0]}: {expected}"
    assert not source.local.exists()


def test_a_token_is_sent_and_does_not_follow_a_redirect(tmp_path: Path, host: Host) -> None:
    host.token = "hf_token"
    source = remote(tmp_path, host.url, token_secret="MINE")
    with pytest.raises(CloudError, match=r"refused access \(401\): it requires a token"):
        download_file(source, token_for(source, {}), nothing)
    download_file(source, token_for(source, {"MINE": "hf_token"}), nothing)
    assert source.local.read_bytes() == CONTENT
    source.local.unlink()
    host.requests.clear()
    host.token = None
    moved = type(source)(source.name, source.local, source.sha256, host.url.replace("train.jsonl", "moved"), "MINE")
    download_file(moved, token_for(moved, {"MINE": "hf_token"}), nothing)
    assert [r.get("Authorization") for r in host.requests] == ["Bearer hf_token", None]


def test_hugging_face_gets_its_token_unasked(tmp_path: Path) -> None:
    address = "://huggingface.co/org/model/resolve/main/w"
    assert token_for(remote(tmp_path, f"https{address}"), {"HF_TOKEN": "t"}) == "t"
    assert token_for(remote(tmp_path, f"http{address}"), {"HF_TOKEN": "t"}) is None, "it would be sent in the clear"


def sent(slipway: SlipwayCli) -> list[str]:
    return [f"{r['method']} {r['path']} {r['query']}" for r in slipway.cloud().requests() if r["mutating"]]


@pytest.mark.e2e
def test_copies_are_in_the_bucket_before_the_tpu_and_programs_know_where(slipway: SlipwayCli, tmp_path: Path) -> None:
    for name in ("mine", "weights"):
        (tmp_path / name / "sub").mkdir(parents=True)
        (tmp_path / name / "sub/x.bin").write_bytes(CONTENT + name.encode())
    (slipway.repository / "make.py").write_text("import pathlib, sys; pathlib.Path(sys.argv[1], 'v').write_text('v')")
    words = [
        "tpu.accelerator_type=v5litepod-4",
        f"assets.datasets.mine.path={tmp_path}/mine",
        f"assets.models.gemma.path={tmp_path}/weights",
        f"assets.tokenizers.vocab.build=[{sys.executable},make.py,'{{output}}']",
        "env.vars.MODELS='{assets.models.gemma}/'",
        "env.vars.JSON='{\"a\": 1}'",
        'program.command=[sh,-c,"echo MODELS=$MODELS; echo $SLIPWAY_ASSETS; echo $JSON","{assets.tokenizers.vocab}"]',
    ]
    code, out, err = slipway("up", *words, KEEP)
    assert (code, err) == (0, "")
    state = slipway.cloud().get("state")
    [(bucket, objects)] = state["objects"].items()
    prefix = next(o for o in objects if o.startswith("assets/gemma-")).split("/")[1]
    assert f"MODELS=gs://{bucket}/assets/{prefix}/" in out
    assert f'"models": {{"gemma": "gs://{bucket}/assets/{prefix}"}}' in out
    assert '{"a": 1}' in out
    assert sorted(o.rpartition("/")[2] for o in objects if o.startswith("assets/")) == [
        "manifest.json", "manifest.json", "manifest.json", "v", "x.bin", "x.bin",
    ]  # fmt: skip
    log = sent(slipway)
    upload = next(i for i, line in enumerate(log) if "assets/mine-" in line and "manifest.json" in line)
    create = next(i for i, line in enumerate(log) if "/locations/" in line and line.startswith("POST"))
    assert upload < create
    # One more file: what is there already is copied inside the bucket, not sent again; nothing is deleted.
    (tmp_path / "mine" / "sub/y.bin").write_text("new")
    assert slipway("up", *words, KEEP)[0] == 0
    since = [line for line in sent(slipway)[len(log) :] if "assets" in line and "manifest" not in line]
    copied, uploaded = sorted(since)
    assert "rewriteTo" in copied
    assert "y.bin" in uploaded
    assert set(objects) <= set(slipway.cloud().get("state")["objects"][bucket])


def test_large_downloads_leave_this_machine_and_are_not_fetched_again(
    tmp_path: Path, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process is killed before the manifest: the next finds the file in the bucket."""
    monkeypatch.setattr(bucket_assets, "KEEP_BYTES", len(CONTENT))
    google = Project(tmp_path / "google")
    content = held(tmp_path, files={"train.jsonl": {"url": host.url, "sha256": SHA256}})
    asset = UploadedAsset(name="d", bucket=google.bucket, content=content, vault=Vault({}))
    context, _ = context_of(google)
    asset.apply(context, {}, Diff("create"))
    assert not content.files[0].local.exists()
    (Path(google.bucket) / asset.manifest_object).unlink()
    asset.apply(context, {}, Diff("create"))
    assert host.num_downloads == 1
    assert (Path(google.bucket) / content.prefix / "train.jsonl").read_bytes() == CONTENT
    assert (Path(google.bucket) / asset.manifest_object).is_file()


@pytest.mark.e2e
def test_the_pod_fetches_what_it_alone_may(slipway: SlipwayCli, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.token = "hf_planted_token"
    monkeypatch.setenv("GATED", host.token)
    entry = f"{{w.bin: {{url: '{host.url}', sha256: {SHA256}, token_secret: MINE}}}}"
    words = ["tpu.accelerator_type=v5litepod-4", "assets.fetch_on=pod", f"assets.models.gated.files={entry}"]
    words += ["env.secrets.MINE=env:GATED", ECHO_COMMAND]
    code, out, err = slipway("up", *words, KEEP)
    assert (code, err) == (0, ""), err
    assert "model gated in the bucket" in out
    assert not list((slipway.home / "downloads").glob("*"))
    objects = json.dumps(slipway.cloud().get("state")["objects"])
    assert "assets/gated-" in objects
    (slipway.repository / "hello.txt").write_text("another run\n")
    assert slipway("up", *words, KEEP)[0] == 0
    assert host.num_downloads == 1
    wrong = entry.replace(SHA256, "0" * 64)
    code, _, err = slipway("up", *(word.replace(entry, wrong) for word in words), KEEP)
    assert code == 1
    assert "w.bin: " in err
    assert "but the config has 000000000000" in err


@pytest.mark.e2e
def test_an_upload_goes_on_where_it_was_cut_off(
    slipway: SlipwayCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controller.gcp.client.CHUNK", 1 << 18)
    cloud, bucket = slipway.cloud(), "mine"
    (project := EmulatedCloud(cloud.state)).establish()
    project.call_ok("POST", "storage/v1/b?project=slipway-local", {"name": bucket, "location": "US"})
    (file := tmp_path / "big").write_bytes(CONTENT)
    google, session = GoogleClient(Credentials(token=cloud.token), Clock(), cloud.roots), tmp_path / "session"

    def killed(size: int) -> None:
        if size > 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        google.upload_file(bucket, "big", file, session, killed)
    assert session.stat().st_mode & 0o777 == 0o600
    moved: list[int] = []
    answer = google.upload_file(bucket, "big", file, session, moved.append)
    assert int(answer["size"]) == len(CONTENT)
    assert sum(moved) == len(CONTENT)
    assert not session.exists()
    begun = [r for r in cloud.requests() if r["query"].get("name") == "big" and "upload_id" not in r["query"]]
    assert len(begun) == 1
    session.write_text(f"{cloud.url}/upload/storage/v1/b/{bucket}/o?uploadType=resumable&upload_id=expired&name=big")
    assert int(google.upload_file(bucket, "big", file, session, nothing)["size"]) == len(CONTENT)
    google.close()


def test_hashes_that_are_kept_by_several_at_once(tmp_path: Path) -> None:
    """As when several assets are looked at side by side."""
    for file in (files := [tmp_path / f"file-{i}" for i in range(24)]):
        file.write_text(file.name)

    def look(file: Path) -> str:
        with HashCache(tmp_path / "state" / "hashes.json") as hashes:
            return hashes.digests([file])[file].sha256

    with ThreadPoolExecutor(max_workers=8) as pool:
        assert [*pool.map(look, files)] == [hashlib.sha256(file.name.encode()).hexdigest() for file in files]
    assert [p.name for p in (tmp_path / "state").iterdir()] == ["hashes.json"]


def test_a_build_runs_once_per_words_and_inputs(tmp_path: Path) -> None:
    (root := tmp_path / "code").mkdir()

    def build(script: str) -> BuildRecipe:
        (root / "make.py").write_text(script)
        found = held(tmp_path, root, build=[sys.executable, "make.py", "{output}"])
        assert found.recipe is not None
        return found.recipe

    writes = "import pathlib, sys; pathlib.Path(sys.argv[1], 'x').write_text('made')"
    first = build(writes)
    assert (run_recipe(first, "k") / "x").read_text() == "made"
    (first.output / "x").write_text("kept")
    assert build(writes) == first
    assert (run_recipe(build(writes), "k") / "x").read_text() == "kept"
    assert build("pass").output != first.output
    with pytest.raises(CloudError, match=r"wrote no file to \{output\}"):
        run_recipe(build("pass"), "k")
    with pytest.raises(CloudError, match=r"ended with code 3:\nboom"):
        run_recipe(build("print('boom'); raise SystemExit(3)"), "k")
    assert [p.name for p in first.output.parent.iterdir()] == [first.output.name]


def test_a_folder_named_like_the_program_is_no_input(tmp_path: Path) -> None:
    """`slipway trainer.puzzles …` beside ./slipway, whose experiments do not change what it builds."""
    (tmp_path / "slipway").mkdir()
    (script := tmp_path / "build.sh").write_text("true")

    def identities() -> tuple[str, str]:
        builds = ["slipway", "trainer.puzzles", "{output}"], ["sh", "build.sh", "{output}"]
        puzzles, script = (held(tmp_path, build=words).identity for words in builds)
        return puzzles, script

    before = identities()
    (tmp_path / "slipway" / "mine.yaml").write_text("x: 1")
    assert identities() == before
    script.write_text("false")
    assert identities()[1] != before[1]


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("data.path", "datasets"),
        ("data.tokenizer", "tokenizers"),
        ("model.weights", "models"),
        ("loop.teacher.weights", "models"),
        ("loop.options.rubric", "<datasets, models or tokenizers>"),
    ],
)
def test_an_asset_that_is_missing_is_to_be_of_the_kind_of_its_key(key: str, kind: str) -> None:
    said = UnknownAssetError(key, "assets://mine/a", "mine").explained(["other"])
    assert said.endswith(f"set {key} to a path or gs://…, or add the asset: assets.{kind}.mine.path=FOLDER")

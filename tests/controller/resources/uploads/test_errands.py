"""Builds near the bucket: on a VM, which finds the agent in its metadata, or on worker 0; nothing half-made counts."""

import base64
import hashlib
import io
import json
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import pytest

from controller.core.errors import CloudError
from controller.inputs.code import CodeSnapshot
from controller.inputs.env_inputs import Vault
from controller.inputs.resolved_assets import BuildRecipe, ResolvedAsset
from controller.localcloud.hub import HubServer
from controller.plan.build import build_plan
from controller.reconcile import reconcile
from controller.resources.uploads import fetch_boot, nearby
from controller.resources.uploads.archives import CodeArchive
from controller.resources.uploads.errands import NearbyBuild, NearbyFiles, VmVenv
from tests.controller.conftest import ECHO_COMMAND, SlipwayCli
from tests.controller.resources.conftest import EmulatedProject
from tests.controller.resources.uploads.conftest import Project, placed, run
from tests.hub import CONTENT

MAKE = """
import pathlib, sys
print("reading", sys.argv[2:])
folder = pathlib.Path(sys.argv[1])
(folder / "rows.txt").write_text(pathlib.Path("data.txt").read_text().upper())
sys.exit("no rows" if "fail" in sys.argv else 0)
"""


def code_in(folder: Path) -> CodeSnapshot:
    folder.mkdir(exist_ok=True)
    (folder / "make.py").write_text(MAKE)
    (folder / "data.txt").write_text("rows")
    return CodeSnapshot(folder, ("data.txt", "make.py"))


def build_of(google: Project, tmp_path: Path, *words: str, always: bool = True) -> NearbyBuild:
    snapshot = code_in(tmp_path / "code")
    recipe = BuildRecipe((sys.executable, "make.py", "{output}", *words), snapshot.root, tmp_path / "built")
    content = ResolvedAsset("tokenizer", "w", "0123456789abcdef", recipe=recipe)
    code = CodeArchive(name=snapshot.sha256, bucket=google.bucket, snapshot=snapshot)
    google.upload(google.bucket, code.object, snapshot.archive)
    venv = VmVenv("none", "3.11", "", "none")
    return NearbyBuild(**placed(google, content), vault=Vault({}), always=always, code=code, venv=venv)


def test_a_vm_builds_with_the_shipped_code(google: Project, tmp_path: Path) -> None:
    asset = build_of(google, tmp_path)
    run(google, asset)
    folder = Path(google.bucket) / asset.content.prefix
    assert (folder / "rows.txt").read_text() == "ROWS"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest == {"rows.txt": hashlib.sha256(b"ROWS").hexdigest()}
    assert sorted(p.name for p in folder.iterdir()) == ["manifest.json", "rows.txt"]
    [body] = google.bodies
    assert body["scheduling"]["maxRunDuration"] == {"seconds": str(12 * 3600)}
    assert body["disks"][0]["initializeParams"]["diskSizeGb"] == "54"
    assert google.machines == {}
    assert not (tmp_path / "built").exists(), "nothing was built here"


def test_a_build_that_fails_on_a_vm_is_one_error(google: Project, tmp_path: Path) -> None:
    asset = build_of(google, tmp_path, "fail")
    with pytest.raises(CloudError) as caught:
        run(google, asset)
    log = f"{google.bucket}/builds/w-0123456789ab.log"
    assert str(caught.value) == (
        f"tokenizer w in the bucket (built by a command): `{sys.executable} make.py '{{output}}' fail` ended with code "
        f"1; its log is {log}:\nreading ['fail']\nno rows"
    )
    assert Path(log).read_text() == "reading ['fail']\nno rows\n"
    assert not [*Path(google.bucket, asset.content.prefix).glob("*")]
    assert (google.machines, len(google.bodies)) == ({}, 1)


@pytest.mark.parametrize(
    ("source", "limit", "note"),
    [
        ("hf://acme/open", len(CONTENT), None),
        ("hf://acme/open", 10**9, ""),
        ("hf://acme/gated", 1, "a VM has no token, and model acme/gated is gated (401)"),
    ],
)
def test_auto_builds_on_a_vm_what_reads_much_of_the_hub_and_needs_no_token(
    google: Project,
    hub: HubServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    limit: int,
    note: str | None,
) -> None:
    monkeypatch.setattr(nearby, "LARGE_BYTES", limit)
    notes = run(google, build_of(google, tmp_path, source, always=False))
    if note is None:
        assert len(google.bodies) == 1
        assert json.loads(google.orders)["env"] == {"HF_ENDPOINT": hub.endpoint}
        return
    assert [said[: len(note)] for said in notes] == ([note] if note else [])
    assert google.bodies == []
    assert (tmp_path / "built/rows.txt").read_text() == "ROWS"
    if not note:
        monkeypatch.setattr(nearby, "LARGE_BYTES", 1)
        other = Project(google.folder / "2")
        run(other, build_of(other, tmp_path, source, always=False))
        assert other.bodies == [], "it has been built here already"


@pytest.mark.deep
def test_a_vm_of_the_emulated_cloud_fetches_files_and_builds(
    project: EmulatedProject, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan's own resources, real processes: agent, code from the bucket, venv, build."""
    context = project.context
    monkeypatch.setattr(project.clock, "sleep", lambda seconds: time.sleep(0.05))
    url = f"{hub.endpoint}/acme/open/resolve/main/model.safetensors"
    words = ["assets.fetch_on=vm", f"run.state_dir={project.folder}/state", "program.command=[a]"]
    words.append(f"+assets.models.w.files={{w.bin: {{url: '{url}', sha256: {hashlib.sha256(CONTENT).hexdigest()}}}}}")
    words.append("+assets.tokenizers.t.build=[python, make.py, '{output}']")
    config = project.config(*words, "env.packages=image")
    plan = build_plan(config, "slipway-local", project.folder, code_in(project.folder / "code"))
    reconcile(plan.resources[: plan.resources.index(plan.node)], context)
    files, made = plan.get(NearbyFiles), plan.get(NearbyBuild)
    assert context.google.download(files.bucket, f"{files.content.prefix}/w.bin") == CONTENT
    assert context.google.download(made.bucket, f"{made.content.prefix}/rows.txt") == b"ROWS"
    assert not [name for name in project.state()["compute"] if "/instances/" in name]
    assert not (project.folder / "state/builds").exists()


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


AGENT = b"""
import sys
from pathlib import Path
tries = Path(sys.argv[0]).with_name("tries")
tries.write_text(tries.read_text() + "x" if tries.exists() else "x")
print(sys.argv[1], sys.stdin.read(), flush=True)
sys.exit(len(tries.read_text()) < 3)
"""


class Metadata:
    """A metadata server that does not answer at first."""

    def __init__(self, content: bytes, failures: int) -> None:
        self.content, self.failures = content, failures

    def open(self, request: Any, timeout: float) -> Any:
        assert request.headers == {"Metadata-flavor": "Google"}
        self.failures -= 1
        if self.failures >= 0:
            raise OSError("not yet")
        return io.BytesIO(self.content)


@pytest.mark.parametrize(("failures", "starts"), [(0, True), (3, True), (4, False)])
def test_the_agent_gets_its_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], failures: int, starts: bool
) -> None:
    orders = {"agent": base64.b64encode(zlib.compress(AGENT)).decode(), "request": {"bucket": "b"}}
    server = Metadata(json.dumps(orders).encode(), failures)
    monkeypatch.setattr(fetch_boot, "build_opener", lambda handler: server)
    monkeypatch.setattr(fetch_boot.time, "sleep", lambda seconds: None)
    monkeypatch.setenv("HOME", str(tmp_path))
    if not starts:
        with pytest.raises(OSError, match="not yet"):
            fetch_boot.main()
        return
    fetch_boot.main()
    assert capfd.readouterr().out.splitlines()[-3:] == ['fetch_ordered {"bucket": "b"}'] * 3, "a crash is no end"

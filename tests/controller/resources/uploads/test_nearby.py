"""A VM near the bucket fetches a large asset: it holds no token, and is deleted or found whatever happens."""

import hashlib
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from controller.agent.commands import asset as agent
from controller.cleanup.orphans import billed_items
from controller.cleanup.teardown import plan_teardown
from controller.core.errors import CloudError
from controller.core.this_process import InterruptedSleepError
from controller.gcp.google_errors import ForbiddenError, GoogleError
from controller.inputs.code import UnfetchedSnapshot
from controller.localcloud.hub import HubFault, HubServer
from controller.plan.build import Plan, build_plan
from controller.reconcile import Absent, reconcile
from controller.records.ledger import Ledger
from controller.resources.uploads import nearby as module
from controller.resources.uploads.errands import NearbySource
from controller.resources.uploads.nearby import MAX_ERRORS, MAX_MACHINES, REFRESH_SECONDS
from controller.run.session import Session
from tests.controller.agent.conftest import wait_for
from tests.controller.resources.conftest import EmulatedProject
from tests.controller.resources.uploads.conftest import Project, context_of, nearby, run, web_files
from tests.fakes.clock import ManualClock
from tests.fakes.google import KilledError
from tests.hub import ACCEPTED, CONTENT

pytestmark = pytest.mark.usefixtures("hub")
MODEL = "hf://acme/open"
SHA256 = hashlib.sha256(CONTENT).hexdigest()
WEIGHTS = "assets/w-0123456789ab/model.safetensors"


def fetch(google: Project, always: bool = True, clock: ManualClock | None = None, source: str = MODEL) -> list[str]:
    """Fetch the asset as `up` does, unless it is there; return the notes."""
    return run(google, nearby(google, source, always), clock)


def check_files(google: Project) -> None:
    folder = Path(google.bucket) / WEIGHTS
    assert folder.read_bytes() == CONTENT
    stored = json.loads((folder.parent / "manifest.json").read_text())
    contents = {"README.md": b"# it", "config.json": b"{}", "model.safetensors": CONTENT}
    assert stored == {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}


def test_large_files_do_not_pass_through_this_machine(google: Project, hub: HubServer) -> None:
    fetch(google)
    check_files(google)
    [body] = google.bodies
    assert google.machines == {}
    assert sorted(p.name for p in (Path(google.bucket) / WEIGHTS).parent.iterdir()) == [
        "README.md", "config.json", "manifest.json", "model.safetensors", "source.json",
    ]  # fmt: skip
    assert f"upload {WEIGHTS}" not in google.changes
    assert body["scheduling"]["maxRunDuration"] == {"seconds": "3600"}
    assert body["scheduling"]["instanceTerminationAction"] == "DELETE"
    assert body["labels"] == {"managed-by": "slipway", "slipway-asset": "w", "slipway-asset-hash": "0123456789ab"}
    machine = nearby(google, MODEL).machine.for_files([10 * 10**9, 10**9, 40 * 10**9], at_once=2)
    assert machine.disk_parameters(context_of(google)[0])["diskSizeGb"] == "65"
    assert machine.max_seconds == 4 * (120 + 51e9 / 50e6)
    [disk] = body["disks"]
    assert (disk["autoDelete"], disk["initializeParams"]["diskSizeGb"]) == (True, "10")
    assert all(len(item["value"]) < 256 * 1024 for item in body["metadata"]["items"]), "Compute Engine's limit"
    assert not list((google.folder / "home/fetches").rglob("hashes.json"))


def test_auto_takes_a_vm_for_large_assets_only(google: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGE_BYTES", len(CONTENT) + 7)
    fetch(google, always=False)
    check_files(google)
    assert (google.bodies, f"upload {WEIGHTS}" in google.changes) == ([], True)
    monkeypatch.setattr(module, "LARGE_BYTES", len(CONTENT) + 6)
    other = Project(google.folder / "2")
    fetch(other, always=False)
    assert (len(other.bodies), f"upload {WEIGHTS}" in other.changes) == (1, False)


@pytest.mark.parametrize("token", ["", ACCEPTED])
def test_files_of_the_web_do_not_pass_through_this_machine(google: Project, hub: HubServer, token: str) -> None:
    """A file that needs a token is at an address that its server has signed."""
    asset = web_files(google, hub.endpoint, SHA256, "gated" if token else "open", token)
    run(google, asset)
    copy = Path(google.bucket) / asset.content.prefix / "w.bin"
    assert copy.read_bytes() == CONTENT
    assert json.loads((copy.parent / "manifest.json").read_text()) == {"w.bin": SHA256}
    assert sorted(p.name for p in copy.parent.iterdir()) == ["manifest.json", "w.bin"]
    assert (google.machines, len(google.bodies)) == ({}, 1)
    assert not (google.folder / "home/downloads").exists()
    assert "hf_" not in google.orders
    assert ("Signature" in google.orders) == bool(token)


def test_small_files_of_the_web_and_those_with_a_token_stay_here(google: Project, hub: HubServer) -> None:
    small = web_files(google, hub.endpoint, SHA256, always=False)
    assert (run(google, small), google.bodies) == ([], [])
    hub.state.stored.clear()  # its server sends the file itself
    (hub.state.folder / "models/acme/gated/model.safetensors").rename(
        hub.state.folder / "models/acme/gated/config.json"
    )
    asset = web_files(Project(google.folder / "2"), hub.endpoint, SHA256, "gated", ACCEPTED)
    file = asset.content.files[0]
    url = (file.url or "").replace("model.safetensors", "config.json")
    bound = replace(asset, content=replace(asset.content, files=(replace(file, url=url),)))
    with pytest.raises(CloudError, match=r"stays on this machine; assets\.models\.w\.fetch_on=laptop fetches it"):
        run(google, bound)


PLANTED = {
    "absent": (HubFault("GET /acme/", times=99, status=404), r"w\.bin: cannot fetch http://127.*: HTTP Error 404"),
    "refused": (HubFault("GET /acme/", times=99, status=403), r"w\.bin: http://127.* refused access \(403\): it req"),
    "a circle": (HubFault("GET /acme/", times=99, loop=True), r"w\.bin: .* is redirected in a circle, or not to http"),
    "another content": (HubFault("GET /lfs/", times=99, corrupt=True), r"w\.bin: http://.* has SHA-256 .*, but the co"),
    "cut off": (HubFault("GET /lfs/", times=3, cut=100_000), ""),
    "busy": (HubFault("GET /lfs/", times=3, status=503), ""),
    "too many requests": (HubFault("GET /lfs/", times=3, status=429), ""),
}


@pytest.mark.parametrize(("fault", "said"), PLANTED.values(), ids=PLANTED)
def test_planted_mistakes_of_files_on_a_vm(
    google: Project, hub: HubServer, monkeypatch: pytest.MonkeyPatch, fault: HubFault, said: str
) -> None:
    """Each ends in one line, or is waited for; a VM is gone afterwards."""
    monkeypatch.setattr(agent, "RETRY_PAUSES", (0.0,) * 4)
    asset = web_files(google, hub.endpoint, SHA256)
    hub.state.faults.append(replace(fault))
    if said:
        with pytest.raises(CloudError, match=said) as caught:
            run(google, asset)
        assert "Signature" not in str(caught.value)
    else:
        run(google, asset)
        assert (Path(google.bucket) / asset.content.prefix / "w.bin").read_bytes() == CONTENT
        wait_for(lambda: sum(size for _, _, size in hub.state.sent if size > 1) >= len(CONTENT))
        assert sum(size for _, _, size in hub.state.sent if size > 1) == len(CONTENT), "nothing is fetched twice"
    assert google.machines == {}


def test_a_full_disk_of_the_vm_ends_the_fetch_at_once(google: Project, hub: HubServer) -> None:
    folder = Path(os.environ["SLIPWAY_AGENT_ROOT"]) / "fetched"
    folder.mkdir(parents=True)
    (folder / SHA256).symlink_to("/dev/full")
    with pytest.raises(CloudError, match=r"\(1 files\): w\.bin: no space left in .* of this machine$"):
        run(google, web_files(google, hub.endpoint, SHA256))
    assert google.machines == {}


REFUSALS = {
    "forbidden": ForbiddenError("insert", 403, "forbidden", "Required 'compute.instances.create' permission"),
    "quota": GoogleError("insert", 403, "quotaExceeded", "Quota 'CPUS' exceeded."),
    "hidden": None,
}


@pytest.mark.parametrize("refusal", REFUSALS.values(), ids=REFUSALS)
def test_a_refused_vm_is_no_end_for_auto(
    google: Project, monkeypatch: pytest.MonkeyPatch, refusal: GoogleError | None
) -> None:
    """Nor is it where the caller may not even look for a VM."""
    monkeypatch.setattr(module, "LARGE_BYTES", 1)
    google.refuse, google.hidden = refusal, refusal is None
    [note] = fetch(google, always=False)
    why = "Required 'compute.instances.get' permission"
    if refusal is not None:
        why = f"Google refuses fetch VM slipway-fetch-0 (e2-standard-2) in us-central1-a: {refusal.message}"
    assert note.endswith(f"{why}; this machine fetches it")
    check_files(google)
    if refusal is not None:
        words = r"; assets\.models\.w\.fetch_on=laptop fetches it through this machine$"
        with pytest.raises(CloudError, match=words):
            fetch(Project(google.folder / "2", refuse=refusal))


def test_a_kill_at_each_request_leaves_no_vm_that_is_not_found(google: Project, hub: HubServer) -> None:
    """Killed after each request that changes something, and before the first: the next `up` ends it, without the VM."""
    fetch(google)
    count = len(google.changes)
    assert count >= 8, "requests of pin, small files, orders, VM and its end"
    left = 0
    for number in range(count + 1):
        killed = Project(google.folder / f"{number}", kill_at=max(1, number), before=number == 0)
        with pytest.raises(KilledError):
            fetch(killed)
        for body in killed.machines.values():
            left += 1
            assert body["labels"]["managed-by"] == "slipway"
            assert body["scheduling"]["instanceTerminationAction"] == "DELETE"
        killed.kill_at, arrived = 0, (Path(killed.bucket) / WEIGHTS).with_name("manifest.json").is_file()
        hub.state.sent.clear()
        fetch(killed)
        check_files(killed)
        fetched = [name for name, _, size in hub.state.sent if size == len(CONTENT)]
        assert len(fetched) <= 1
        assert arrived or not killed.machines, "one that is done is an orphan, which Compute Engine deletes"
        assert len(killed.bodies) <= 1 or fetched == [], "the next controller waits for the VM of the first"
    assert left > 0


def test_a_vm_that_ends_is_replaced_a_few_times_and_ctrl_c_deletes_it(google: Project) -> None:
    ends = [True, True, False]
    google.work = lambda p: ends.pop(0) or p.let_fetch()
    fetch(google)
    check_files(google)
    assert len(google.bodies) == 3
    gone = Project(google.folder / "2", work=lambda _: True)
    with pytest.raises(CloudError, match=f"ended {MAX_MACHINES} times before its files had arrived"):
        fetch(gone)
    assert (len(gone.bodies), gone.machines) == (MAX_MACHINES, {})
    clock = ManualClock(time.time())
    interrupted = Project(google.folder / "3", work=lambda _: bool(clock.interrupt()))
    with pytest.raises(InterruptedSleepError):
        fetch(interrupted, clock=clock)
    assert (len(interrupted.bodies), interrupted.machines) == (1, {})


@pytest.mark.parametrize("what", ["fails", "says nothing", "is not ours"])
def test_a_vm_that_does_not_fetch_is_given_up(google: Project, hub: HubServer, what: str) -> None:
    said = (
        rf"failed {MAX_ERRORS} times in a row: model\.safetensors: http://localhost:.*; assets\.models\.w\.fetch_on=l"
    )
    if what == "fails":
        hub.state.faults.append(HubFault("GET /lfs/", status=404, times=99))
    if what == "says nothing":
        google.work, google.serial = lambda _: False, "Booting\nkernel panic\n"
        said = r"fetches nothing after 20 minutes:\nBooting\nkernel panic\n; assets"
    if what == "is not ours":
        google.machines["slipway-fetch-0"] = {"name": "slipway-fetch-0", "status": "RUNNING", "labels": {}}
        said = "was not created by Slipway"
    with pytest.raises(CloudError, match=said) as caught:
        fetch(google)
    assert "Signature" not in str(caught.value), "a signed address is a key to the file"
    assert [*google.machines] == ["slipway-fetch-0"] * (what == "is not ours")


def test_what_a_vm_told_before_does_not_count_and_addresses_are_replaced_in_time(
    google: Project,
) -> None:
    """The addresses had expired while nobody was there."""
    machine = nearby(google, MODEL).machine
    machine.apply(context_of(google)[0], {}, machine.diff(Absent()))
    for _ in range(MAX_ERRORS + 1):
        google.say(error="expired")
    clock, looks = ManualClock(time.time(), step=400.0), list[None]()

    def work(google: Project) -> bool:
        looks.append(None)
        google.say(bytes=100 * len(looks))
        return len(looks) * clock.step > 2 * REFRESH_SECONDS and google.let_fetch()

    google.work = work
    fetch(google, clock=clock)
    check_files(google)
    assert len(google.bodies) == 1
    assert len([c for c in google.changes if c.endswith("/fetch.json")]) == 3


def _machines(project: EmulatedProject) -> list[str]:
    return [name for name in project.state()["compute"] if "/instances/" in name]


def planned(project: EmulatedProject, source: str) -> Plan:
    words = ("assets.fetch_on=vm", f"+assets.models.weights.source={source}", f"run.state_dir={project.folder}")
    config = project.config("program.command=[a]", *words)
    return build_plan(config, "slipway-local", project.folder, UnfetchedSnapshot(project.folder, (), "0" * 40))


def test_a_vm_of_the_emulated_cloud_fetches_a_gated_model(
    project: EmulatedProject, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan's own resources; Google's API judges the requests, and the VM runs its startup script."""
    context = project.context
    monkeypatch.setenv("HF_TOKEN", ACCEPTED)
    monkeypatch.setattr(project.clock, "sleep", lambda seconds: time.sleep(0.05))
    plan = planned(project, "hf://acme/gated")
    plan.vault.load(context.google)
    asset, held = plan.get(NearbySource), list[bytes]()

    def look(http: Any, method: str) -> Any:
        if method == "compute.instances.delete":
            held.extend(p.read_bytes() for p in project.cloud.state.rglob("*") if p.is_file())
        return http

    context.google.wrap_connection = look
    reconcile([*plan.resources[: plan.resources.index(asset)], asset], context)
    assert context.google.download(asset.bucket, f"{asset.content.prefix}/model.safetensors") == CONTENT
    manifest = json.loads(context.google.download(asset.bucket, f"{asset.content.prefix}/manifest.json"))
    assert manifest["model.safetensors"] == hashlib.sha256(CONTENT).hexdigest()
    assert not _machines(project)
    assert any(b'"done": true' in content for content in held), "the VM's serial port"
    assert not [content for content in held if ACCEPTED.encode() in content], "the token stays on this machine"


def test_a_vm_left_behind_is_listed_and_deleted_with_the_pod(project: EmulatedProject, hub: HubServer) -> None:
    context, plan = project.context, planned(project, MODEL)
    asset = plan.get(NearbySource)
    reconcile(plan.resources[: plan.resources.index(asset)], context)
    asset.machine.apply(context, {}, asset.machine.diff(Absent()))
    [running] = [thing for thing in billed_items(context, [plan.bucket]) if thing.kind == "VM"]
    assert running.use == "it fetches weights"
    assert running.usd_per_hour == pytest.approx(0.067)
    context.google.upload(plan.bucket, asset.manifest_object, b"{}")
    [orphan] = [thing for thing in billed_items(context, [plan.bucket]) if thing.kind == "VM"]
    assert (orphan.use, orphan.why) == ("", "weights is in the bucket")
    session = Session(plan, context, Ledger(context.google, plan.bucket, plan.run_id), None)
    end = plan_teardown(session, everything=False)
    assert [resource.id for resource in end.present] == [asset.machine.id]
    end.execute(lambda event: None)
    assert not _machines(project)

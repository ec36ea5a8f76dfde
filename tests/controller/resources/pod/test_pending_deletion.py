"""A request that Google does not delete yet is on record, and the next verb takes it away."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from controller.core.this_process import Clock, iso_timestamp
from controller.gcp.client import GoogleClient
from controller.gcp.google_errors import ForbiddenError, GoogleError, NotFoundError
from controller.lease_store import BucketLeaseStore, Identity
from controller.reconcile import Absent
from controller.records.unfinished import retry_deletions
from controller.resources import deletions
from controller.resources.deletions import PREFIX, DeletionPendingError, PendingDeletion, record_deletion
from controller.resources.pod import tpu_nodes
from controller.resources.pod.provisioner import NOT_OBSERVED, SliceStatus, pod_object
from tests.controller.localcloud.harness import wait_for
from tests.controller.resources.conftest import EmulatedProject
from tests.controller.resources.fake_pod import EVERY_WAY, INSTANCE, TWO_ZONES, A, B, Pod, pod
from tests.controller.resources.pod.test_node import foreign, request
from tests.fakes.context import make_context

STILL = "Google still does not delete it; the next verb tries again"


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch, project: EmulatedProject) -> None:
    monkeypatch.setattr(deletions, "PROVISIONING_SECONDS", 0.0)
    project.context.bucket = f"{project.tag}-bucket"


def stuck(project: EmulatedProject, *overrides: str) -> Pod:
    """A pod whose next request stays in PROVISIONING until the faults are cleared."""
    made = pod(project, "tpu.provisioner=queued", "tpu.create_timeout_minutes=0.005", *overrides)
    project.inject_fault(kind="queued", state="PROVISIONING", seconds=100000)
    return made


def requested(project: EmulatedProject) -> Pod:
    """A pod whose request is stuck, as after a controller that was killed."""
    made = stuck(project)
    request(made)
    wait_for(lambda: getattr(made.observe(), "why", "").startswith("provisioning"), "the request is stuck")
    return made


def abandoned(project: EmulatedProject) -> Pod:
    """A pod that `down` could not delete yet; that is on record."""
    made = requested(project)
    with pytest.raises(DeletionPendingError):
        made.down()
    return made


def let_go(project: EmulatedProject, made: Pod) -> None:
    """Google ends the provisioning; the pod is there."""
    project.cloud.call_ok("DELETE", "emulator/faults")
    wait_for(lambda: getattr(made.observe(), "status", NOT_OBSERVED).state == "READY", "the pod")


def objects(project: EmulatedProject) -> list[str]:
    found = project.cloud.call_ok("GET", "emulator/state")["objects"].get(project.context.bucket, [])
    return [name for name in found if name.startswith(PREFIX)]


def claim(project: EmulatedProject, made: Pod) -> None:
    """A run uses the pod."""
    body: dict[str, Any] = {"format": 1, "first": "r", "latest": "r", "uid": made.observe().status.uid}
    name = pod_object("claims", made.node.name, body["uid"])
    project.context.google.upload(project.context.bucket, name, json.dumps(body).encode())


def test_the_search_goes_on_and_the_next_verb_deletes_the_request(project: EmulatedProject) -> None:
    made = stuck(project, *TWO_ZONES)
    assert made.up().place.zone == B
    assert f"queued resource {made.node.name} in {A} is provisioning, and Google does not" in made.notes
    line = f"queued resource {made.node.name} in {A}"
    assert retry_deletions(project.context) == [f"{line}: {STILL}"]
    project.cloud.call_ok("DELETE", "emulator/faults")
    wait_for(lambda: f"{A}/nodes/{made.node.name}" in made.leftovers(), "the pod that nobody wants")
    assert retry_deletions(project.context) == [f"{line}: deleted, as asked for earlier"]
    assert made.leftovers() == [f"{B}/nodes/{made.node.name}", f"{B}/queuedResources/{made.node.name}"]
    assert retry_deletions(project.context) == []
    made.down()


def test_down_waits_for_a_request_in_provisioning_which_is_on_record_meanwhile(
    project: EmulatedProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most are made within minutes, and would be billed with nobody there."""
    monkeypatch.undo()
    made, seen, sleep = requested(project), list[str](), project.context.clock.sleep

    def let_go_once(seconds: float) -> None:
        if not seen and objects(project):
            seen.extend(objects(project))
            project.cloud.call_ok("DELETE", "emulator/faults")
        sleep(seconds)

    monkeypatch.setattr(project.context.clock, "sleep", let_go_once)
    made.down()
    assert "waiting, for at most 30 minutes. Its deletion is on record" in made.notes
    assert (len(seen), made.leftovers(), made.machines(), objects(project)) == (1, [], [], [])


@pytest.mark.parametrize("lost", ["nothing", "the bucket", "the laptop"])
def test_down_says_so_and_nothing_is_lost(project: EmulatedProject, lost: str) -> None:
    made = requested(project)
    if lost == "the bucket":
        project.context.bucket = f"{project.tag}-none"
    with pytest.raises(DeletionPendingError, match="Its deletion is on record: the next `slipway` up, status") as error:
        made.down()
    assert error.value.exit_code == 9
    assert objects(project) == ([] if lost == "the bucket" else [f"{PREFIX}slipway-local.{A}.{made.node.name}.json"])
    if lost == "the laptop":
        shutil.rmtree(project.context.state_dir / "deletions")
    assert ("on record on this machine only" in made.notes) == (lost == "the bucket")
    let_go(project, made)
    [line] = retry_deletions(project.context)
    assert line.endswith("deleted, as asked for earlier")
    assert made.leftovers() == []
    assert objects(project) == []


@pytest.mark.parametrize("asks", ["here", "elsewhere"])
def test_a_pod_that_a_run_has_taken_over_meanwhile_stays(project: EmulatedProject, asks: str) -> None:
    """The claim is looked up in the bucket of the config that asked for the deletion."""
    made = abandoned(project)
    ours, theirs = project.context.bucket, f"{project.tag}-elsewhere" if asks == "elsewhere" else project.context.bucket
    project.context.bucket = theirs
    assert retry_deletions(project.context)[0].endswith(STILL)  # it stays on record as it was
    let_go(project, made)
    project.context.bucket = ours
    claim(project, made)
    project.context.bucket = theirs
    assert retry_deletions(project.context)[0].endswith("a run has taken its pod over")
    assert made.observe().is_ready
    made.down()


def test_a_later_request_of_the_same_name_stays(project: EmulatedProject) -> None:
    made = abandoned(project)
    let_go(project, made)
    made.down()
    made.up()
    assert retry_deletions(project.context)[0].endswith("it is gone, another request has its name")
    made.down()


def test_a_pod_on_which_a_controller_is_at_work_or_whose_claim_cannot_be_read_stays(project: EmulatedProject) -> None:
    made = abandoned(project)
    let_go(project, made)
    project.inject_fault(kind="http", status=403, match="GET .*claims", times=9)
    assert "was not deleted: storage objects.get_media: 403" in retry_deletions(project.context)[0]
    project.cloud.call_ok("DELETE", "emulator/faults")
    store = BucketLeaseStore(project.context.google, project.context.bucket, made.node.name)
    held = Identity("laptop", "run-1", holder="anna@lab").new_record(1, project.clock.now(), 3600.0)
    generation = store.write(held, 0)
    assert "was not deleted: anna@lab (laptop) for run-1 since" in retry_deletions(project.context)[0]
    assert made.observe().is_ready
    store.write(replace(held, released=True), generation)
    assert retry_deletions(project.context)[0].endswith("deleted, as asked for earlier")


def test_the_pod_in_use_is_found_although_an_abandoned_request_became_one_too(project: EmulatedProject) -> None:
    made = stuck(project, *TWO_ZONES)
    used = made.up()
    assert used.place.zone == B
    project.cloud.call_ok("DELETE", "emulator/faults")
    queue = tpu_nodes.QueuedProvisioner(1.0)
    first = made.node.name
    wait_for(lambda: getattr(queue.observe(project.context, first, A), "state", "") == "READY", "the pod in zone A")
    assert made.observe().status.uid == used.status.uid
    assert used.pod_seen(project.context).is_usable
    shutil.rmtree(project.context.state_dir / "deletions")  # as on another machine
    found = made.node.find(project.context, {used.status.uid})
    assert found is not None
    assert found.status.uid == used.status.uid
    assert made.observe().place.zone == A
    made.down()


GONE = PendingDeletion("slipway-local", A, "gone", "2026-01-01T00:00:00Z", 1.0, "")


@pytest.mark.parametrize(
    ("status", "reason", "match", "line"),
    [
        (503, None, "GET .*/o$", "gs://{} was not searched for pending deletions: "),
        (403, "SERVICE_DISABLED", "GET .*/o$", "gs://{} was not searched for pending deletions: "),
        (503, None, "GET .*/o/deletions", "gs://{}/deletions/{}, the record of a pending deletion, was not read: "),
        (404, None, "GET .*/o/deletions", ""),
    ],
)
def test_a_record_that_cannot_be_read_ends_no_verb(
    project: EmulatedProject, status: int, reason: str | None, match: str, line: str
) -> None:
    pod(project)
    record_deletion(project.context, replace(GONE, bucket=project.context.bucket))
    shutil.rmtree(project.context.state_dir / "deletions")
    project.inject_fault(kind="http", status=status, reason=reason, match=match, times=6 if status == 503 else 1)
    lines = retry_deletions(project.context)
    assert [each.startswith(line.format(project.context.bucket, GONE.file)) for each in lines] == [True] * bool(line)
    project.inject_fault(kind="http", status=503, match="DELETE .*/o/deletions", times=6)
    gone, kept = retry_deletions(project.context)
    assert gone == f"queued resource gone in {A}: it is gone"
    assert kept.startswith(f"the record gs://{project.context.bucket}/deletions/{GONE.file} was not deleted: ")
    assert retry_deletions(project.context) == [gone]
    assert objects(project) == []


def test_a_broken_file_is_one_line_and_one_that_was_being_written_is_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    google: Any = GoogleClient(None, Clock())
    google.call = Mock(side_effect=NotFoundError("get", 404, "NOT_FOUND", "gone"))
    context = make_context(google, tmp_path)
    gone = replace(GONE, project=context.project)
    record_deletion(context, gone)

    def killed(self: Path, content: bytes) -> int:
        self.write_text(content.decode()[:9])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_bytes", killed)
    with pytest.raises(KeyboardInterrupt):
        record_deletion(context, gone)
    monkeypatch.undo()
    file = tmp_path / "deletions" / "broken.json"
    for text, problem in {
        "": "is not a pending deletion written by slipway",
        '{"format": 1, "project": "slipway-local"}': "is not a pending deletion written by slipway",
        '{"format": 2}': "has format 2; this slipway reads format 1",
    }.items():
        file.write_text(text)
        broken, line = retry_deletions(context)
        assert broken.startswith(f"{file} {problem}")
        assert line == f"queued resource gone in {A}: it is gone"
        record_deletion(context, gone)


def test_a_request_that_vanishes_after_google_refused_to_delete_it_is_deleted(
    project: EmulatedProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = pod(project)
    answers = [None, replace(NOT_OBSERVED, state="PROVISIONING")]
    queue = tpu_nodes.QueuedProvisioner(1.0)

    def refused(self: object, *_: object) -> bool:
        raise GoogleError("queuedResources.delete", 400, "FAILED_PRECONDITION", "it is being provisioned")

    monkeypatch.setattr(tpu_nodes.QueuedProvisioner, "observe", lambda *_: answers.pop())
    monkeypatch.setattr(tpu_nodes.QueuedProvisioner, "_delete", refused)
    queue.delete(project.context, made.node.name, A)
    assert answers == []
    assert objects(project) == []


def test_a_request_of_another_plane_is_deleted_by_that_plane(project: EmulatedProject) -> None:
    made = pod(project, "tpu=v6e_1", "tpu.plane=compute_engine", "tpu.zone=us-east5-b")
    status = made.up().status
    zone, created = status.place.zone, iso_timestamp(status.created)
    record = PendingDeletion("slipway-local", zone, made.node.name, created, 0.0, project.context.bucket, "instance")
    record_deletion(project.context, record)
    assert retry_deletions(project.context) == [f"pod {made.node.name} in {zone}: deleted, as asked for earlier"]
    assert isinstance(made.observe(), Absent)
    record_deletion(project.context, replace(record, provisioner="of a later Slipway"))
    assert "does not know how of a later Slipway pods are deleted" in retry_deletions(project.context)[0]
    body = record.to_json()
    assert body.pop("provisioner") == "instance"
    assert PendingDeletion.from_json(body) == replace(record, provisioner="queued"), "as the first version wrote it"


@pytest.mark.parametrize("way", ["node", "queued", "instance"])
def test_nothing_that_slipway_did_not_create_is_deleted_whatever_a_bucket_says(
    project: EmulatedProject, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    made = pod(project, *{
        "node": ("tpu.zone=us-central1-a",), "queued": ("tpu.provisioner=queued",),
        "instance": ("tpu=v6e_1", "tpu.plane=compute_engine", "tpu.zone=us-east5-b"),
    }[way])  # fmt: skip
    if way == "node":
        foreign(made)
        where = f"projects/slipway-local/locations/{A}/nodes/{made.node.name}"
        zone, created = A, project.context.google.call("tpu", "projects.locations.nodes.get", name=where)["createTime"]
    else:
        status = made.up().status
        zone, created = status.place.zone, iso_timestamp(status.created)
        monkeypatch.setattr(SliceStatus, "is_labelled", False)
    record_deletion(project.context, PendingDeletion("slipway-local", zone, made.node.name, created, 0.0, "", way))
    [line] = retry_deletions(project.context)
    assert line.endswith("it was not created by Slipway, and stays")
    assert objects(project) == [], "nobody asks again"
    monkeypatch.undo()
    assert made.observe().status.created > 0
    made.down()


BUSY = [
    {"status": 400, "code": "FAILED_PRECONDITION", "message": "it is not supported when state is REPAIRING"},
    {"status": 409, "code": "ABORTED", "message": "unable to queue the operation"},
    {"status": 400, "code": "resourceNotReady", "message": "The resource 'pod' is not ready"},
]


@EVERY_WAY
@pytest.mark.parametrize("busy", BUSY, ids=lambda busy: busy["code"])
def test_a_refusal_that_passes_is_waited_for_and_one_that_does_not_is_on_record(
    project: EmulatedProject, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], busy: dict[str, Any]
) -> None:
    """Of every kind of slice. That a run had it before does not keep the next verb from deleting it."""
    made = pod(project, *words)
    made.up()
    claim(project, made)
    refusal = {"kind": "http", "match": f"DELETE .*/{made.node.name}$", **busy}
    project.inject_fault(**refusal, times=999)
    monkeypatch.setattr(deletions, "OPERATION_SECONDS", 0.0)
    with pytest.raises(
        DeletionPendingError, match=f"{made.node.name} in .* is ready, and Google does not delete it yet"
    ):
        made.down()
    [record] = objects(project)
    [line] = retry_deletions(project.context)
    assert line.endswith(STILL)
    assert objects(project) == [record]
    project.cloud.call_ok("DELETE", "emulator/faults")
    [line] = retry_deletions(project.context)
    assert line.endswith("deleted, as asked for earlier")
    assert (made.leftovers(), made.machines(), objects(project)) == ([], [], [])
    monkeypatch.undo()
    made.up()
    project.inject_fault(**refusal, times=2)
    made.down()
    assert (made.leftovers(), made.machines(), objects(project)) == ([], [], [])


@pytest.mark.parametrize("words", [("tpu.provisioner=node",), ("tpu.provisioner=queued",), INSTANCE])
def test_a_refusal_for_good_is_an_error_and_on_record(project: EmulatedProject, words: tuple[str, ...]) -> None:
    made = pod(project, *words)
    made.up()
    project.inject_fault(kind="http", match=f"DELETE .*/{made.node.name}$", status=403, message="you may not", times=1)
    with pytest.raises(ForbiddenError, match="you may not"):
        made.down()
    assert "its deletion is on record" in made.notes
    [line] = retry_deletions(project.context)
    assert line.endswith("deleted, as asked for earlier")
    assert made.leftovers() == made.machines() == []


def test_a_record_stays_while_nobody_can_see_which_run_has_the_pod(
    project: EmulatedProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = pod(project, "tpu.provisioner=node")
    made.up()
    claim(project, made)
    project.inject_fault(kind="http", match=f"DELETE .*/{made.node.name}$", status=403, message="you may not", times=1)
    with pytest.raises(ForbiddenError):
        made.down()
    call = project.context.google.call

    def hidden(api: str, method: str, **parameters: Any) -> dict[str, Any]:
        if method == "objects.get":
            raise GoogleError(method, 503, "UNAVAILABLE", "not now")
        return call(api, method, **parameters)

    monkeypatch.setattr(project.context.google, "call", hidden)
    [line] = retry_deletions(project.context)
    assert "not now" in line
    monkeypatch.undo()
    [line] = retry_deletions(project.context)
    assert line.endswith("deleted, as asked for earlier")

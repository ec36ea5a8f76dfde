"""A request that Google does not delete yet is on record, and the next verb takes it away."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from controller.core.errors import CloudError
from controller.records.pending_deletions import retry_deletions
from controller.resources.pod import queued_api
from controller.resources.pod.pending_deletion import PREFIX, DeletionPendingError
from controller.resources.pod.provisioner import NOT_OBSERVED, claim_name
from tests.controller.localcloud.harness import wait_for
from tests.controller.resources.conftest import EmulatedProject
from tests.controller.resources.fake_pod import TWO_ZONES, A, B, Pod, pod

STILL = "Google still does not delete it; the next verb tries again"


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch, project: EmulatedProject) -> None:
    monkeypatch.setattr(queued_api, "PROVISIONING_SECONDS", 0.0)
    project.context.bucket = f"{project.tag}-bucket"


def stuck(project: EmulatedProject, *overrides: str) -> Pod:
    """A pod whose next request stays in PROVISIONING until the faults are cleared."""
    made = pod(project, "tpu.provisioner=queued", "tpu.create_timeout_minutes=0.005", *overrides)
    project.inject_fault(kind="queued", state="PROVISIONING", seconds=100000)
    return made


def requested(project: EmulatedProject) -> Pod:
    """A pod whose request is stuck, as after a controller that was killed."""
    made = stuck(project)
    search = made.node._search(project.context)
    search.provisioners["queued"].create(project.context, search.name, search.spec, made.node.places[0])
    wait_for(lambda: getattr(made.observe(), "why", "").startswith("provisioning"), "the request is stuck")
    return made


def let_go(project: EmulatedProject, made: Pod) -> None:
    """Google ends the provisioning; the pod is there."""
    project.cloud.call_ok("DELETE", "emulator/faults")
    wait_for(lambda: getattr(made.observe(), "status", NOT_OBSERVED).state == "READY", "the pod")


def objects(project: EmulatedProject) -> list[str]:
    found = project.cloud.call_ok("GET", "emulator/state")["objects"].get(project.context.bucket, [])
    return [name for name in found if name.startswith(PREFIX)]


def test_the_search_goes_on_and_the_next_verb_deletes_the_request(project: EmulatedProject) -> None:
    made = stuck(project, *TWO_ZONES)
    assert made.up().place.zone == B
    assert f"queued resource {made.node.name} in {A} is being provisioned, and Google does not" in made.notes
    line = f"queued resource {made.node.name} in {A}"
    assert retry_deletions(project.context) == [f"{line}: {STILL}"]
    project.cloud.call_ok("DELETE", "emulator/faults")
    wait_for(lambda: f"{A}/nodes/{made.node.name}" in made.leftovers(), "the pod that nobody wants")
    assert retry_deletions(project.context) == [f"{line}: deleted, as asked for earlier"]
    assert made.leftovers() == [f"{B}/nodes/{made.node.name}", f"{B}/queuedResources/{made.node.name}"]
    assert retry_deletions(project.context) == []
    made.down()


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


def test_a_pod_that_a_run_has_taken_over_meanwhile_stays(project: EmulatedProject) -> None:
    made = requested(project)
    with pytest.raises(CloudError):
        made.down()
    let_go(project, made)
    claim: dict[str, Any] = {"format": 1, "first": "r", "latest": "r", "uid": made.observe().status.uid}
    name = claim_name(made.node.name, claim["uid"])
    project.context.google.upload(project.context.bucket, name, str(claim).replace("'", '"').encode())
    assert retry_deletions(project.context)[0].endswith("a run has taken its pod over")
    assert made.observe().is_ready
    made.down()


def test_a_later_request_of_the_same_name_stays(project: EmulatedProject) -> None:
    made = requested(project)
    with pytest.raises(DeletionPendingError):
        made.down()
    let_go(project, made)
    made.down()
    made.up()
    assert retry_deletions(project.context)[0].endswith("it is gone, another request has its name")
    made.down()

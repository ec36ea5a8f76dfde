"""Requests that wait in Google's queue for a pod: too long, expired, left there; and flex-start."""

import pytest

from controller.core.errors import RetriesExhaustedError
from controller.core.this_process import InterruptedSleepError
from controller.reconcile import Diff, Pending
from tests.controller.resources.conftest import EmulatedProject
from tests.controller.resources.fake_pod import TWO_ZONES, A, B, pod
from tests.controller.resources.pod.test_node import request


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_request_that_waits_too_long_gives_way_to_the_next_zone(project: EmulatedProject, is_killed: bool) -> None:
    """Also where another controller, which was killed while it waited, has made it."""
    made = pod(project, "tpu.provisioner=queued", "tpu.create_timeout_minutes=0.005", *TWO_ZONES)
    project.inject_fault(kind="stockout", times=1000, zone=A)
    if is_killed:
        request(made)
        assert isinstance(made.observe(), Pending)
    assert made.up().place.zone == B
    assert is_killed or "still waiting for resources after" in made.notes
    assert made.leftovers() == [f"{B}/nodes/{made.node.name}", f"{B}/queuedResources/{made.node.name}"]
    made.down()


def test_an_expired_request_is_deleted(project: EmulatedProject) -> None:
    made = pod(project, "tpu.provisioner=queued", "tpu.valid_until_hours=0.00005", max_create_attempts=2)
    project.inject_fault(kind="stockout", times=100000)
    with pytest.raises(RetriesExhaustedError, match="no capacity"):
        made.up()
    assert len(made.creation_requests()) == 2
    assert made.leftovers() == []


def test_whoever_stops_waiting_is_told_that_the_request_stays(project: EmulatedProject) -> None:
    made = pod(project, "tpu.provisioner=queued")
    project.inject_fault(kind="stockout", times=100000)
    project.clock.interrupt_at = 3
    with pytest.raises(InterruptedSleepError):
        made.node.apply(project.context, {}, Diff("create"))
    assert "the request stays in the queue: `slipway up` resumes waiting, `slipway down` cancels it" in made.notes
    assert isinstance(made.observe(), Pending)
    made.down()


def test_flex_start_is_asked_for_through_the_newer_api(project: EmulatedProject) -> None:
    made = pod(project, "tpu.capacity=flex_start")
    assert made.up().place.capacity == "flex_start"
    [creation] = made.creation_requests()
    assert "/v2alpha1/" in creation["path"]
    assert creation["body"]["provisioningModel"] == "FLEX_START"
    assert made.up().status.state == "READY"
    made.down()
    assert made.leftovers() == []

"""What Google refuses for now is asked for again, when Google says so; what it refuses for good is not."""

from __future__ import annotations

import pytest

from controller.core.errors import CloudError
from controller.gcp.client import ATTEMPTS, GoogleError
from tests.controller.localcloud.harness import COMPUTE
from tests.controller.resources.conftest import EmulatedProject


@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_is_kept_to(project: EmulatedProject, status: int) -> None:
    network = f"/{COMPUTE}/global/networks"
    project.inject_fault(kind="http", status=status, match=f"GET {network}/{project.tag}$", times=2, retry_after=17)
    project.inject_fault(kind="http", status=status, match=f"POST {network}$", times=1, retry_after=23)
    project.create_shared()
    assert project.planned_actions() == {}
    assert [s for s in project.clock.sleeps if s > 1] == [17.0, 17.0, 23.0]


def test_without_it_the_pauses_double(project: EmulatedProject) -> None:
    project.inject_fault(kind="http", status=503, match=f"GET /{COMPUTE}/global/networks/{project.tag}$", times=4)
    project.create_shared()
    assert [s for s in project.clock.sleeps if s >= 1] == [1.0, 2.0, 4.0, 8.0]


def test_a_request_that_was_carried_out_although_503_was_answered_is_no_error(project: EmulatedProject) -> None:
    """The network is there when it is sent again: 409, and the next look finds it as wanted."""
    project.cloud.call_and_wait(
        "POST", f"{COMPUTE}/global/networks", {"name": project.tag, "autoCreateSubnetworks": False}
    )
    project.inject_fault(kind="http", status=404, match=f"GET /{COMPUTE}/global/networks/{project.tag}$")
    project.create_shared()
    assert project.planned_actions() == {}


def test_it_gives_up_in_the_end(project: EmulatedProject) -> None:
    project.inject_fault(kind="http", status=503, match=f"GET /{COMPUTE}/global/networks/{project.tag}$", times=99)
    with pytest.raises(GoogleError, match=r"compute networks.get: 503"):
        project.create_shared()
    assert len([s for s in project.clock.sleeps if s >= 1]) == ATTEMPTS - 1


@pytest.mark.parametrize("status", [400, 403])
def test_a_final_refusal_is_not_asked_again(project: EmulatedProject, status: int) -> None:
    project.inject_fault(kind="http", status=status, match=f"POST /{COMPUTE}/global/networks$", message="not so")
    with pytest.raises(CloudError, match="not so"):
        project.create_shared()
    posts = [
        r for r in project.cloud.request_log() if r["path"] == f"/{COMPUTE}/global/networks" and r["status"] == status
    ]
    assert len(posts) == 1

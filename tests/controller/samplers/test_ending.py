"""A pod of samplers ends with its own run only, unless the user says `down`."""

import pytest

from controller.cli import main
from controller.lease.lease import Lease, pod_lease
from controller.records import index
from controller.run.session import open_session
from controller.samplers.ending import end_pod
from tests.controller.conftest import ECHO_COMMAND, SlipwayCli
from tests.planes import pods

pytestmark = pytest.mark.e2e
FOREVER = 'program.command=[sh,-c,"echo up; sleep 600"]'


def end(slipway: SlipwayCli, *words: str, only_own: bool = True) -> bool:
    with open_session(main.parse(slipway.line("status", *words)).options, keep_awake=True) as session:
        return end_pod(session.plan, session.context, "the test is over", only_own=only_own)


def test_a_pod_ends_with_its_run_and_stays_if_another_run_uses_it(slipway: SlipwayCli) -> None:
    assert not end(slipway, FOREVER), "there is none"
    assert slipway("up", "--detach", FOREVER)[0] == 0
    assert not end(slipway, ECHO_COMMAND), "the pod of another run"
    assert len(pods(slipway.cloud().get("state"))) > 0
    assert slipway.json("status", FOREVER)["run"]["id"] == index.load_rows(slipway.home)[0]["run"]
    assert end(slipway, FOREVER)
    assert pods(slipway.cloud().get("state")) == {}
    found = slipway.json("status", FOREVER)
    assert found["run"]["state"] == "cancelled"
    assert [life["reason"] for life in found["cost"]["pods"]] == ["the test is over"]
    assert [row["state"] for row in index.load_rows(slipway.home)] == ["cancelled"]
    assert not end(slipway, FOREVER)


@pytest.mark.deep
def test_one_that_is_acquired_meanwhile_stays_until_down(slipway: SlipwayCli, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lease was free at the look at it."""
    assert slipway("up", "--detach", FOREVER)[0] == 0
    with open_session(main.parse(slipway.line("status", FOREVER)).options, keep_awake=True) as session:
        other = pod_lease(session.plan, session.context)
        other.ensure()
        monkeypatch.setattr(Lease, "current_other", lambda lease: None)
        assert not end_pod(session.plan, session.context, "the test is over", only_idle=True)
        other.release()
    assert len(pods(slipway.cloud().get("state"))) > 0
    assert end(slipway, ECHO_COMMAND, only_own=False)
    assert pods(slipway.cloud().get("state")) == {}

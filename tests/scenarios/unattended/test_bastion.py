"""`recovery.driver=bastion` on the emulated cloud: a VM sees the run through, and this machine may leave."""

from __future__ import annotations

import json
import re

import pytest

from tests.controller.cli.verbs.run.test_up import until, workers_home
from tests.controller.conftest import SlipwayCli
from tests.planes import Plane, pods
from tests.scenarios.unattended.test_two_controllers import controllers

pytestmark = pytest.mark.e2e
BASTION = ["recovery.driver=bastion", "recovery.lease_duration_seconds=20"]
WAITS = (
    'program.command=[sh,-c,"echo attempt $SLIPWAY_ATTEMPT; while [ ! -e ../go$SLIPWAY_ATTEMPT ]; do sleep 0.1; done"]'
)


def bastions(slipway: SlipwayCli) -> list[str]:
    state = slipway.cloud().get("state")
    return [path for path in state["compute"] if "/instances/" in path and path not in pods(state)]


def go(slipway: SlipwayCli, attempt: int) -> None:
    for home in workers_home(slipway):
        for run in (home / ".slipway" / "runs").iterdir():
            (run / f"go{attempt}").touch()


@pytest.mark.deep
def test_the_bastion_sees_a_run_through_a_preemption_while_nobody_looks(slipway: SlipwayCli, plane: Plane) -> None:
    faults = "cloud.faults=[{kind: preempted, after_object: launches/0001, delay_seconds: 1}]"
    code, out, err = slipway("up", "--detach", WAITS, *plane.one, *BASTION, faults)
    assert (code, err) == (0, ""), out
    assert "the bastion controls the run now: you can disconnect" in out
    [bastion] = bastions(slipway)
    assert bastion.endswith("-driver")
    until(lambda: "/launches/0002" in json.dumps(slipway.cloud().get("state")["objects"]), 300)
    status = slipway.json("status", WAITS, *plane.one, *BASTION)
    assert re.search(r"\(bastion\) for run-\w+ since", status["pod"]["driver"])
    until(lambda: slipway("logs", WAITS, *plane.one, *BASTION)[1] == "attempt 2\n", 300)
    with controllers(slipway, ["up", WAITS, *plane.one, *BASTION]) as (looker,):
        looker.hears("(bastion) for run-")
        looker.hears("attempt 2")
        go(slipway, 2)
        assert looker.ends() == 0, looker.said
        assert "finished after" in looker.said
    until(lambda: not bastions(slipway), 300)
    state = slipway.cloud().get("state")
    assert pods(state) == {}
    objects = json.dumps(state["objects"])
    assert "/bastion.log" in objects
    assert "/launches/0003" not in objects
    assert slipway.json("status", WAITS, *plane.one, *BASTION)["run"]["state"] == "finished"


@pytest.mark.deep
def test_cancel_and_down_from_this_machine(slipway: SlipwayCli, plane: Plane) -> None:
    assert slipway("up", "--detach", WAITS, *plane.one, *BASTION)[0] == 0
    until(lambda: "/launches/0001" in json.dumps(slipway.cloud().get("state")["objects"]), 300)
    until(lambda: slipway("cancel", WAITS, *plane.one, *BASTION)[1].find("is cancelled") >= 0, 300)
    until(lambda: not bastions(slipway), 300)  # the pod stays, for a look
    assert slipway.json("status", WAITS, *plane.one, *BASTION)["run"]["state"] == "cancelled"
    assert pods(slipway.cloud().get("state"))
    assert slipway("up", "--detach", WAITS, *plane.one, *BASTION)[0] == 0
    until(lambda: "/launches/0002" in json.dumps(slipway.cloud().get("state")["objects"]), 300)
    code, out, err = slipway("down", "--all", "--yes", WAITS, *plane.one, *BASTION)
    assert code == 0, err + out
    state = slipway.cloud().get("state")
    assert (state["node"], state["compute"], state["serviceAccount"], state["bucket"]) == ({}, {}, {}, {})

"""The same run started on two pods is one run: one controller drives it, the other one watches or takes it over."""

from __future__ import annotations

import json
import signal

import pytest

from tests.controller.cli.verbs.run.test_up import SLOW, let_go, until
from tests.controller.conftest import SlipwayCli
from tests.planes import Plane
from tests.scenarios.chaos.harness import ChaosHarness
from tests.scenarios.unattended.test_two_controllers import SHORT, controllers, launches

pytestmark = [pytest.mark.e2e, pytest.mark.deep]
A, B = "tpu.name=pod-a", "tpu.name=pod-b"


def first_attempt_ended(slipway: SlipwayCli) -> bool:
    """Whether every worker of the first pod has recorded that a later attempt replaced its program."""
    cloud = slipway.cloud()
    ends = [
        (bucket, name)
        for bucket, names in cloud.get("state")["objects"].items()
        for name in names
        if "/attempt-1/" in name and name.endswith(".exit.json")
    ]
    found = [json.loads(ChaosHarness.read_object(cloud, bucket, name)) for bucket, name in ends]
    return bool(found) and all(end["error"] == "a later attempt has replaced this one" for end in found)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_the_second_one_watches_and_goes_on_when_the_first_one_is_gone(
    slipway: SlipwayCli, plane: Plane, how: int
) -> None:
    with controllers(slipway, ["up", SLOW, *plane.one, A, SHORT]) as (first,):
        first.hears("launched attempt 1")
        with controllers(slipway, ["up", SLOW, *plane.one, B, SHORT]) as (second,):
            second.hears("drives this run on the pod pod-a; watching")
            assert len(plane.creations(slipway.mutations())) == 1
            first.process.send_signal(how)
            second.hears("launched attempt 2")
            until(lambda: first_attempt_ended(slipway), 300)
            if how == signal.SIGSTOP:
                first.process.send_signal(signal.SIGCONT)
                assert first.ends() == 8, first.said
                assert "took over; this controller stopped and changes nothing more" in first.said
            let_go(slipway)
            assert second.ends() == 0, second.said
    assert "finished after" in second.said
    assert len(launches(slipway)) == 2


def test_take_over_moves_a_run_to_another_pod(slipway: SlipwayCli, plane: Plane) -> None:
    with controllers(slipway, ["up", SLOW, *plane.one, A]) as (first,):
        first.hears("launched attempt 1")
        with controllers(slipway, ["up", "--take-over", SLOW, *plane.one, B, SHORT]) as (second,):
            second.hears("the workers of pod-a stop the run's program")
            assert first.ends() == 8, first.said
            second.hears("launched attempt 2")
            let_go(slipway)
            assert second.ends() == 0, second.said

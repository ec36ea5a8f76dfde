"""What a run costs and where it ends, end to end on the emulated cloud, on pods of one worker."""

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from controller.run import session
from tests.controller.cli.verbs.test_up import until, workers_home
from tests.controller.conftest import ECHO_COMMAND, SlipwayCli
from tests.planes import Plane, pods
from tests.virtual_time import IN_VIRTUAL_TIME

pytestmark = pytest.mark.e2e
ONE = ["tpu=v6e_1"]
FOREVER = 'program.command=[sh,-c,"echo up; sleep 600"]'
FAILS = 'program.command=[sh,-c,"exit 7"]'
SECOND_IN_HOURS = 1 / 3600


def billed_parts(slipway: SlipwayCli) -> dict[str, Any]:
    return pods(slipway.cloud().get("state"))


def test_what_a_run_cost_is_told_at_its_end_and_by_status(slipway: SlipwayCli) -> None:
    price = "budget.usd_per_hour=3600"
    code, out, _ = slipway("up", ECHO_COMMAND, *ONE, price)
    assert code == 0
    assert "pod minutes, about $" in out
    cost = slipway.json("status", ECHO_COMMAND, *ONE, price)["cost"]
    assert cost["usd"] == pytest.approx(3600 * cost["pod_hours"], rel=0.5)
    assert cost["usd"] > 0
    [pod] = cost["pods"]
    assert (pod["zone"], pod["usd_per_hour"], pod["reason"]) == ("us-east5-b", 3600, "finished")
    assert (
        f"about ${cost['usd']:.2f} at $3600.00 per hour (budget.usd_per_hour)"
        in slipway("status", ECHO_COMMAND, *ONE, price)[1]
    )


@pytest.mark.always_on("compute_engine")
def test_a_run_over_its_budget_is_ended_and_its_pod_deleted(slipway: SlipwayCli, plane: Plane) -> None:
    limit = f"budget.max_hours={2 * SECOND_IN_HOURS:.6f}"
    code, out, err = slipway("up", FOREVER, *plane.one, limit)
    assert code == 7
    assert "over budget: its pods have run for" in out
    assert "Raise the limit and run the same command to resume from the last checkpoint" in err
    assert billed_parts(slipway) == {}
    before = slipway.mutations()
    code, _, err = slipway("up", FOREVER, *plane.one, limit)  # nothing is left of it
    assert code == 7
    assert plane.creations(slipway.mutations()[len(before) :]) == []


@pytest.mark.deep
@pytest.mark.one_plane
def test_a_failed_pod_that_nobody_uses_deletes_itself_though_the_controller_is_gone(
    slipway: SlipwayCli, plane: Plane
) -> None:
    idle = "cleanup.idle_minutes=0.5"
    assert slipway("up", FAILS, *plane.one, idle)[0] == 5
    until(lambda: billed_parts(slipway) == {})
    asked = [r for r in slipway.cloud().requests() if plane.deletions([f"{r['method']} {r['path']}"])]
    [deletion] = [r for r in asked if r["status"] == 200]
    assert re.search("/(queuedResources|instances)/", deletion["path"])
    assert {r["client"].rpartition("/")[2] for r in asked} == {"0"}  # by worker 0, not by the laptop
    cost = slipway.json("status", FAILS, *plane.one, idle)["cost"]
    assert len(cost["pods"]) == 1


@pytest.mark.deep
@pytest.mark.one_plane
def test_a_pod_without_a_controller_ends_with_the_budget(slipway: SlipwayCli, plane: Plane) -> None:
    limits = ["budget.max_hours=1", "cleanup.idle_minutes=null"]
    command = [*IN_VIRTUAL_TIME, "up", FOREVER, *plane.one, *limits, *slipway.base_overrides]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ})
    assert running.stdout is not None
    next(line for line in running.stdout if line.strip() == "up")
    running.send_signal(signal.SIGKILL)
    running.communicate()
    [worker] = workers_home(slipway)
    order = json.loads((worker / ".slipway" / "watchdog.json").read_text())
    assert 0.9 < (order["until"] - order["asked"]) / 3600 < 1.1
    (worker / ".slipway" / "watchdog.json").write_text(json.dumps(order | {"until": order["asked"]}))  # an hour passes
    until(lambda: billed_parts(slipway) == {})
    [pod] = slipway.json("status", FOREVER, *plane.one, *limits)["cost"]["pods"]
    assert pod["reason"] == "the run's budget is spent"


@contextmanager
def billed(config: Any, **how: Any) -> Iterator[Any]:
    """The emulated cloud, as if it were Google's."""
    with really_connected(config, **how) as (context, emulator):
        context.is_billed = True
        yield context, emulator


really_connected = session.open_context


def test_plan_says_what_it_costs_and_nothing_billed_is_made_unasked(
    slipway: SlipwayCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = slipway("plan", ECHO_COMMAND, *ONE, "budget.usd_per_hour=3", "budget.max_hours=2")
    assert code == 0
    assert "price    $3.00 per hour (budget.usd_per_hour)" in out
    assert "limit    at most $6.00 in 2 h (budget.max_hours); then the run ends and the pod is deleted" in out
    assert slipway.json("plan", ECHO_COMMAND, *ONE)["usd_per_hour"] is None
    monkeypatch.setattr(session, "open_context", billed)
    price = "budget.usd_per_hour=3"
    code, _, err = slipway("up", ECHO_COMMAND, *ONE, price)  # no terminal to ask on
    assert code == 2
    assert "nothing was created; pass --yes" in err
    assert slipway.mutations() == []
    asked: list[str] = []
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("rich.console.Console.input", lambda _, question, markup: asked.append(question) or "no")
    assert slipway("up", ECHO_COMMAND, *ONE, price)[0] == 2
    assert asked[0].startswith("Create TPU v6e-1 (1 worker)")
    assert "for $3.00 per hour (budget.usd_per_hour)? Estimate of the run: none: only the program" in asked[0]
    assert "$72.00 per day. Limit: none: billed until the program ends" in asked[0]
    assert slipway.mutations() == []


@pytest.mark.deep
def test_plan_says_what_the_run_and_the_pod_are_doing(slipway: SlipwayCli) -> None:
    assert slipway.json("plan", FOREVER, *ONE)["now"] == ""
    assert slipway("up", "--detach", FOREVER, *ONE)[0] == 0
    assert slipway.json("plan", FOREVER, *ONE)["now"] == "the run is active on the pod: `up` follows it"
    run = slipway.json("plan", FOREVER, *ONE)["run"]
    assert slipway.json("plan", ECHO_COMMAND, *ONE)["now"] == f"the pod is busy with {run}: `up --queue` waits for it"
    assert slipway("up", "--yes", ECHO_COMMAND, *ONE)[0] == 0
    assert "now      the run has already finished" in slipway("plan", ECHO_COMMAND, *ONE)[1]
    whys = [life["reason"] for life in slipway.json("status", FOREVER, *ONE)["cost"]["pods"]]
    assert whys == [f"taken over by {slipway.json('plan', ECHO_COMMAND, *ONE)['run']}"]

"""Two controllers of one pod or of one run, as processes: one acts, the other explains or takes over; and bastions.

The emulated cloud has its own delays and limits, without which no request for a lease competes with its renewals.
"""

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from controller.run.driven_here import LOCK_FILE, is_driven_here
from tests.conftest import wide
from tests.controller.cli.verbs.test_up import SLOW, let_go, until, workers_home
from tests.controller.conftest import ECHO_COMMAND, SlipwayCli
from tests.planes import Plane, pods
from tests.scenarios.chaos.harness import ChaosHarness
from tests.virtual_time import IN_VIRTUAL_TIME

pytestmark = [pytest.mark.e2e, pytest.mark.deep, pytest.mark.one_plane]
A, B = "tpu.name=pod-a", "tpu.name=pod-b"


class Controller:
    """`slipway up` in a process of its own; what it says is collected."""

    def __init__(self, slipway: SlipwayCli, *words: str) -> None:
        slipway.cloud()  # awake: another process would start it with a new interpreter
        command = [*IN_VIRTUAL_TIME, *slipway.line(*words)]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        self.said = ""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said += line

    def hears(self, words: str) -> None:
        end = time.monotonic() + 300
        while words not in self.said and self.process.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        assert words in self.said, self.said

    def ends(self) -> int:
        code = self.process.wait(timeout=300)
        self._thread.join()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


@contextmanager
def controllers(slipway: SlipwayCli, *each: list[str]) -> Iterator[list[Controller]]:
    started = [Controller(slipway, *words) for words in each]
    try:
        yield started
    finally:
        for one in started:
            if one.process.poll() is None:
                one.process.kill()
                one.process.send_signal(signal.SIGCONT)
            one.ends()


def launches(slipway: SlipwayCli) -> list[str]:
    objects = slipway.cloud().get("state")["objects"]
    return sorted(name for names in objects.values() for name in names if "/launches/" in name)


def test_of_two_that_start_together_one_acts_and_when_it_is_killed_the_other_goes_on(
    slipway: SlipwayCli, plane: Plane
) -> None:
    both = ["up", SLOW, *plane.one]
    with controllers(slipway, both, both) as (one, other):
        until(lambda: "launched attempt 1" in one.said + other.said, seconds=300)
        actor, viewer = (one, other) if "launched" in one.said else (other, one)
        viewer.hears("controls this pod; watching, and taking over if it disappears")
        viewer.hears("    up\n")  # it sees what the run says
        assert len(plane.creations(slipway.mutations())) == 1
        assert slipway.json("status", SLOW, *plane.one)["pod"]["driver"].count("(laptop) for run-") == 1
        actor.process.kill()
        viewer.hears("stopped responding; taking over")
        viewer.hears("re-attached to attempt 1")
        let_go(slipway)
        assert viewer.ends() == 0, viewer.said
    assert "finished after" in viewer.said
    assert len(plane.creations(slipway.mutations())) == 1
    assert len(launches(slipway)) == 1


def test_a_controller_that_slept_past_its_lease_is_fenced_and_touches_nothing(
    slipway: SlipwayCli, plane: Plane
) -> None:
    both = ["up", SLOW, *plane.one]
    with controllers(slipway, both) as (asleep,):
        asleep.hears("launched attempt 1")
        asleep.process.send_signal(signal.SIGSTOP)
        with controllers(slipway, both) as (awake,):
            awake.hears("re-attached to attempt 1")
            before = slipway.cloud().requests()[-1]["seq"]
            asleep.process.send_signal(signal.SIGCONT)
            assert asleep.ends() == 8, asleep.said
            assert "took over; this controller stopped and changes nothing more" in asleep.said
            changed = [r for r in slipway.cloud().requests() if r["seq"] > before and r["mutating"]]
            assert {r["query"].get("name", r["path"]).rpartition("/")[2] for r in changed} <= {"lease.json"}
            let_go(slipway)
            assert awake.ends() == 0, awake.said
    assert len(launches(slipway)) == 1


def test_another_run_is_told_who_is_there_and_cancel_and_down_reach_the_holder(
    slipway: SlipwayCli, plane: Plane
) -> None:
    stockout = "cloud.faults=[{kind: stockout, times: 99, at: request}]"
    with controllers(slipway, ["up", SLOW, *plane.one, stockout]) as (holder,):
        holder.hears("no capacity")
        code, _, err = slipway("up", ECHO_COMMAND, *plane.one)
        assert code == 2
        assert "the pod is busy with run-" in err
        assert "(laptop) for run-" in err
        code, out, err = slipway("cancel", SLOW, *plane.one)
        assert code == 0, err
        assert "is cancelled" in out
        assert holder.ends() == 0, holder.said
        assert "cancelled by" in holder.said
    with controllers(slipway, ["up", SLOW, *plane.one, stockout]) as (holder,):
        holder.hears("no capacity")
        with controllers(slipway, ["up", SLOW, *plane.one, stockout]) as (viewer,):
            viewer.hears("controls this pod; watching")
            assert slipway("down", SLOW, *plane.one)[0] == 2  # it would end a run
            code, out, err = slipway("down", "--yes", SLOW, *plane.one)
            assert code == 0, err
            assert holder.ends() == 0, holder.said
            assert viewer.ends() == 0, viewer.said
            assert "deleted by" in viewer.said
    assert pods(slipway.cloud().get("state")) == {}


@pytest.mark.parametrize(
    ("command", "after"),
    [
        ("cancel", 2.0),
        ("down --yes", 4.0),
        ("down --all --yes", 1.0),
        *(pytest.param("cancel", after, marks=pytest.mark.wide) for after in (0.0, 8.0)),
        pytest.param("down --yes", 0.5, marks=pytest.mark.wide),
        *(pytest.param("down --all --yes", after, marks=pytest.mark.wide) for after in (0.0, 2.0, 16.0)),
    ],
)
def test_a_verb_beside_an_up_in_its_first_seconds_ends_it(
    slipway: SlipwayCli, plane: Plane, command: str, after: float
) -> None:
    """In a new project, so that at first there is neither a lease nor a bucket."""
    words, verb = [SLOW, *plane.one], command.split()
    run_id = slipway.json("plan", *words)["run"]
    with controllers(slipway, ["up", *words]) as (holder,):
        until(lambda: is_driven_here(slipway.home / "runs" / run_id / LOCK_FILE), seconds=300)
        time.sleep(after)
        code, out, err = slipway(*verb, *words)
        assert code == 0, out + err + holder.said
        assert holder.ends() == 0, holder.said
        assert "is not running" not in out
        if verb[0] == "cancel":
            assert f"{run_id} is cancelled" in out
            assert slipway.json("status", *words)["run"]["state"] in ("not finished", "cancelled")
        else:
            assert f"ended {run_id}" in out or "deleted" in out + err
            state = slipway.cloud().get("state")
            assert pods(state) == {}
            assert not [path for path in state["compute"] if "--all" in verb and path.endswith("/networks/slipway")]


@pytest.mark.parametrize("after", [1.5, *wide(0.0)])
def test_stop_beside_an_up_in_its_first_seconds_ends_it(slipway: SlipwayCli, after: float) -> None:
    """On a pod that is there, which the `up` would start again."""
    words = ["tpu=v5litepod_8", "tpu.capacity=on_demand", "cleanup.on_success=keep"]
    assert slipway("up", ECHO_COMMAND, *words)[0] == 0
    run_id = slipway.json("plan", SLOW, *words)["run"]
    with controllers(slipway, ["up", SLOW, *words]) as (holder,):
        until(lambda: is_driven_here(slipway.home / "runs" / run_id / LOCK_FILE), seconds=300)
        time.sleep(after)
        code, out, err = slipway("stop", "--yes", SLOW, *words)
        assert code == 0, out + err + holder.said
        assert holder.ends() == 0, holder.said
        assert "stopped by" in holder.said
    assert slipway.json("status", SLOW, *words)["pod"]["state"] == "stopped"


@pytest.mark.parametrize("after", [6.0, *wide(0.0)])
def test_down_beside_a_sweep_in_its_first_seconds_ends_it(slipway: SlipwayCli, plane: Plane, after: float) -> None:
    words = ["-m", SLOW, "run.seed=1,2", *plane.one]
    with controllers(slipway, ["up", *words]) as (holder,):
        until(lambda: [file for file in slipway.home.glob("sweeps/*.lock") if is_driven_here(file)], seconds=300)
        time.sleep(after)
        code, out, err = slipway("down", "--yes", *words)
        assert code == 0, out + err + holder.said
        holder.ends()
        assert "deleted by" in holder.said
        assert pods(slipway.cloud().get("state")) == {}


@pytest.mark.parametrize("verb", [("cancel",), ("down", "--yes"), ("up", "--take-over")], ids=" ".join)
@pytest.mark.parametrize("after", [9.0, *wide(0.0)])
def test_a_running_controller_is_reached_within_ten_seconds(
    slipway: SlipwayCli, plane: Plane, verb: tuple[str, ...], after: float
) -> None:
    with controllers(slipway, ["up", SLOW, *plane.one]) as (holder,):
        holder.hears("    up\n")
        time.sleep(after)
        with controllers(slipway, [*verb, SLOW, *plane.one]) as (asker,):
            asked = time.monotonic()
            if verb[0] == "up":
                asker.hears("waiting for")
                asked = time.monotonic()
            code = holder.ends()
            assert time.monotonic() - asked < 60  # on a busy machine; `test_requests` counts the looks of ten seconds
            assert code == (8 if verb[0] == "up" else 0), holder.said
            if verb[0] == "up":
                asker.hears("re-attached to attempt 1")
                let_go(slipway)
            assert asker.ends() == 0, asker.said


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


@pytest.mark.parametrize("how", [signal.SIGKILL, *wide(signal.SIGSTOP)])
def test_the_second_one_watches_and_goes_on_when_the_first_one_is_gone(
    slipway: SlipwayCli, plane: Plane, how: int
) -> None:
    with controllers(slipway, ["up", SLOW, *plane.one, A]) as (first,):
        first.hears("launched attempt 1")
        with controllers(slipway, ["up", SLOW, *plane.one, B]) as (second,):
            second.hears("drives this run on the pod pod-a; watching")
            assert len(plane.creations(slipway.mutations())) == 1
            first.process.send_signal(how)
            second.hears("launched attempt 2")
            until(lambda: first_attempt_ended(slipway), seconds=300)
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
        with controllers(slipway, ["up", "--take-over", SLOW, *plane.one, B]) as (second,):
            second.hears("the workers of pod-a stop the run's program")
            assert first.ends() == 8, first.said
            second.hears("launched attempt 2")
            there = {path.rpartition("/")[2] for path in pods(slipway.cloud().get("state"))}
            assert {"pod-a", "pod-b"} <= there, "the one that was left is billed until somebody deletes it"
            let_go(slipway)
            assert second.ends() == 0, second.said


BASTION = ["recovery.driver=bastion"]
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


def test_the_bastion_sees_a_run_through_a_preemption_while_nobody_looks(slipway: SlipwayCli, plane: Plane) -> None:
    faults = "cloud.faults=[{kind: preempted, after_object: launches/0001, delay_seconds: 1}]"
    code, out, err = slipway("up", "--detach", WAITS, *plane.one, *BASTION, faults)
    assert (code, err) == (0, ""), out
    assert "the bastion controls the run now: you can disconnect" in out
    [bastion] = bastions(slipway)
    assert bastion.endswith("-driver")
    until(lambda: "/launches/0002" in json.dumps(slipway.cloud().get("state")["objects"]), seconds=300)
    status = slipway.json("status", WAITS, *plane.one, *BASTION)
    assert re.search(r"\(bastion\) for run-\w+ since", status["pod"]["driver"])
    until(lambda: slipway("logs", WAITS, *plane.one, *BASTION)[1] == "attempt 2\n", seconds=300)
    with controllers(slipway, ["up", WAITS, *plane.one, *BASTION]) as (looker,):
        looker.hears("(bastion) for run-")
        looker.hears("attempt 2")
        go(slipway, 2)
        assert looker.ends() == 0, looker.said
        assert "finished after" in looker.said
    until(lambda: not bastions(slipway), seconds=300)
    state = slipway.cloud().get("state")
    assert pods(state) == {}
    objects = json.dumps(state["objects"])
    assert "/bastion.log" in objects
    assert "/launches/0003" not in objects
    assert slipway.json("status", WAITS, *plane.one, *BASTION)["run"]["state"] == "finished"


def test_cancel_and_down_from_this_machine(slipway: SlipwayCli, plane: Plane) -> None:
    assert slipway("up", "--detach", WAITS, *plane.one, *BASTION)[0] == 0
    until(lambda: "/launches/0001" in json.dumps(slipway.cloud().get("state")["objects"]), seconds=300)
    until(lambda: slipway("cancel", WAITS, *plane.one, *BASTION)[1].find("is cancelled") >= 0, seconds=300)
    until(lambda: not bastions(slipway), seconds=300)  # the pod stays, for a look
    assert slipway.json("status", WAITS, *plane.one, *BASTION)["run"]["state"] == "cancelled"
    assert pods(slipway.cloud().get("state"))
    assert slipway("up", "--detach", WAITS, *plane.one, *BASTION)[0] == 0
    until(lambda: "/launches/0002" in json.dumps(slipway.cloud().get("state")["objects"]), seconds=300)
    code, out, err = slipway("down", "--all", "--yes", WAITS, *plane.one, *BASTION)
    assert code == 0, err + out
    state = slipway.cloud().get("state")
    assert (state["node"], state["compute"], state["serviceAccount"], state["bucket"]) == ({}, {}, {}, {})


@pytest.mark.parametrize(
    ("words", "after", "command"),
    [
        ("bastion", 0.0, "cancel"),
        ("to take over", 1.5, "down --yes"),
        pytest.param("bastion", 0.0, "down --yes", marks=pytest.mark.wide),
        pytest.param("to take over", 1.5, "cancel", marks=pytest.mark.wide),
    ],
)
def test_a_run_that_is_ended_while_its_bastion_boots_is_driven_by_nobody(
    slipway: SlipwayCli, plane: Plane, words: str, after: float, command: str
) -> None:
    with controllers(slipway, ["up", WAITS, *plane.one, *BASTION]) as (giver,):
        giver.hears(words)
        time.sleep(after)
        code, out, err = slipway(*command.split(), WAITS, *plane.one, *BASTION)
        assert code == 0, out + err + giver.said
        assert giver.ends() == 0, giver.said
    assert "is not running" not in out
    until(lambda: not bastions(slipway), seconds=300)
    if command != "cancel":
        assert pods(slipway.cloud().get("state")) == {}
    assert slipway.json("status", WAITS, *plane.one, *BASTION)["run"]["state"] in ("not finished", "cancelled")

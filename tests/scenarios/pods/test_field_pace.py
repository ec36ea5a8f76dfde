"""A run on a cloud as slow as Google's, in virtual time: `up` in a new project, a preemption, the recovery, `down`.

No wait gives up early, and nothing is billed that does not run. docs/performance.md has the minutes of each phase.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import pytest

from controller import connect
from controller.localcloud.delays import DELAYS, FIELD_PACE
from tests import virtual_time
from tests.controller.conftest import SlipwayCli
from tests.planes import Plane, pods

pytestmark = [pytest.mark.e2e, pytest.mark.deep]
PROGRAM = """
import json, os, time
from urllib.request import Request, urlopen

attempt, worker = os.environ["SLIPWAY_ATTEMPT"], os.environ["TPU_WORKER_ID"]
host, bucket = os.environ["STORAGE_EMULATOR_HOST"], os.environ["SLIPWAY_BUCKET"].removeprefix("gs://")

def begun():
    return len(json.load(urlopen(f"{host}/storage/v1/b/{bucket}/o?prefix=begun/")).get("items", []))

while worker == "0" and attempt == "1" and begun() < 3:
    time.sleep(0.1)
url = f"{host}/upload/storage/v1/b/{bucket}/o?uploadType=media&name=begun/{worker}-{attempt}"
urlopen(Request(url, data=b"x", method="POST")).read()
while attempt == "1":
    time.sleep(0.1)
print("done in attempt", attempt)
"""
"""Runs on all four workers until it is preempted, and ends in its second attempt."""
RUN = ("program.command=[python,train.py]", f"cloud.operation_seconds={FIELD_PACE}")
SET_UP_MINUTES = 2.0
"""From READY to a program: SSH and host keys."""
SLACK_MINUTES = 0.5


@dataclass
class Play:
    """What happened, by the events of the run."""

    events: list[Mapping[str, Any]]
    minutes: dict[str, float] = field(default_factory=dict[str, float])

    def at(self, kind: str, words: str, number: int = 0) -> float:
        """Return when an event came whose subject or message begins so, in seconds."""
        found = [
            event
            for event in self.events
            if event["kind"] == kind
            and (event["subject"].startswith(words) or event.get("message", "").startswith(words))
        ]
        return datetime.fromisoformat(found[number]["time"]).timestamp()

    def phase(self, name: str, begin: float, end: float) -> None:
        self.minutes[name] = round((end - begin) / 60, 1)


def play(slipway: SlipwayCli, words: tuple[str, ...]) -> Play:
    """Run everything; return it with the virtual minutes of each phase."""
    (slipway.repository / "train.py").write_text(PROGRAM)
    code, _, err = slipway("up", *words, "cloud.faults=[{kind: preempted, after_object: begun/0-1}]")
    assert (code, err) == (0, "")
    run = slipway.json("plan", *words)["run"]
    lines = (slipway.home / "runs" / run / "events.jsonl").read_text().splitlines()
    told = Play([json.loads(line) for line in lines])
    [fault] = slipway.cloud().get("state")["fault"].values()
    begun, lost = told.at("step_started", "services/"), fault["struck"][0]
    asked, ready, launched = (
        told.at("step_started", "node/"),
        told.at("step_done", "node/"),
        told.at("note", "launched"),
    )
    told.phase("project", begun, asked)
    told.phase("pod", asked, ready)
    told.phase("set-up", ready, launched)
    told.phase("preemption seen", lost, told.at("note", "preempted"))
    again = told.at("step_done", "node/", 1)
    told.phase("new pod", told.at("note", "preempted"), again)
    told.phase("set-up again", again, told.at("note", "launched", 1))
    told.phase("pod deleted", told.at("step_started", "node/", -1), told.at("step_done", "node/", -1))
    seen, gone = told.at("note", "preempted"), told.at("step_done", "node/", -1)
    told.phase("there", 0.0, (seen - ready) + (gone - again))
    return told


@pytest.mark.wide  # its table of delays changes seldom
def test_the_flagships_pod_from_a_new_project_to_nothing_at_googles_pace(
    slipway: SlipwayCli, monkeypatch: pytest.MonkeyPatch, plane: Plane, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(connect, "LOCAL_POLL_SECONDS", connect.POLL_SECONDS)
    words, before = (*RUN, *plane.four), slipway.cloud().get("state")["compute"]
    told = play(slipway, words)
    cost = slipway.json("status", *words)["cost"]
    assert len(plane.creations(slipway.mutations())) == 2
    assert pods(slipway.cloud().get("state")) == {}

    shared = virtual_time.SharedTime(slipway.home.parent / "time")
    began = time.monotonic() + shared.skipped
    code, _, err = slipway("down", "--all", "--yes", *words)
    told.phase("down --all", began, time.monotonic() + shared.skipped)
    with capsys.disabled():
        print(f"\nvirtual minutes on {plane}: {told.minutes}, billed {60 * cost['pod_hours']:.1f}")
    assert code == 0, err
    assert slipway.cloud().get("state")["compute"] == before
    assert max(told.minutes["set-up"], told.minutes["set-up again"]) < SET_UP_MINUTES
    not_active_yet = 2 * DELAYS["topology"].most / 60 if plane.is_compute_engine else 0.0  # but its VMs run
    unused = 60 * cost["pod_hours"] - told.minutes["there"]
    assert -SLACK_MINUTES <= unused <= not_active_yet + SLACK_MINUTES
    assert cost["pods"][-1]["reason"] == "finished"

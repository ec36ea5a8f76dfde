"""What the controller does with the alerts of an attempt: events, the record in the bucket, notifications once each."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from controller.alerts.alert import Alert, read_alerts
from controller.alerts.checkpoint_watch import CheckpointWatch
from controller.core.clock import Clock
from controller.core.errors import SlipwayError
from controller.core.events import Events
from controller.records.ledger import Launch, Ledger
from controller.run.alert_watch import AlertWatch
from tests.controller.alerts.test_alert import Written
from tests.controller.alerts.test_judge import settings

RUN = "run-1"


class Hands(Clock):
    """A clock that the test sets."""

    def __init__(self) -> None:
        super().__init__()
        self.time = 1000.0

    def now(self) -> float:
        return self.time


class Bucket(Written):
    """The run's folder, without checkpoints."""

    def checkpoints(self) -> list[int]:
        return []


class Followed:
    """A run that a controller follows, with all that it says."""

    def __init__(self, kind: str = "command") -> None:
        self.clock, self.bucket = Hands(), Bucket()
        self.events = Events(self.clock)
        self.told: list[dict[str, Any]] = []
        self.notified: list[str] = []
        self.events.add_listener(lambda event: self.told.append({"kind": event.kind, **event.data, "": event.message}))
        config = SimpleNamespace(
            alerts=settings(), checkpoint=SimpleNamespace(save_interval=10), program=SimpleNamespace(kind=kind)
        )
        self.plan: Any = SimpleNamespace(run_id=RUN, config=config)
        self.context: Any = SimpleNamespace(clock=self.clock, events=self.events)

    def watch(self, attempt: int = 1, notify: Any = None) -> AlertWatch:
        launched = Launch(attempt, "uid", self.clock.now())
        told = notify or (lambda alert: self.notified.append(alert.name))
        return AlertWatch(self.plan, self.context, cast(Ledger, self.bucket), launched, told)

    def line(self, watch: AlertWatch, **values: Any) -> None:
        self.clock.time += 30
        self.events.emit("metrics", RUN, metrics={"time": self.clock.time, **values})
        watch.tick(0.0)

    def alerts(self) -> list[tuple[str, bool, str]]:
        return [(each["alert"], each["over"], each[""]) for each in self.told if each["kind"] == "alert"]


def test_each_alert_is_told_once_and_is_on_record_until_it_is_over() -> None:
    run = Followed()
    with run.watch().watching() as watch:
        for _ in range(4):
            run.line(watch, step=1, loss=None)
        run.line(watch, step=2, loss=1.0)
        run.line(watch, step=3, loss=1.0)
        run.line(watch, step=4, loss=None)  # it has come back
    assert run.notified == ["not finite", "not finite"]
    assert [(name, over) for name, over, _ in run.alerts()] == [
        ("not finite", False),
        ("not finite", True),
        ("not finite", False),
    ]
    assert run.alerts()[0][2].startswith("not finite: loss is NaN or infinite at step 1; ")
    assert run.alerts()[1][2] == "not finite is over"
    record = read_alerts(cast(Ledger, run.bucket))
    assert (record.attempt, [alert.ended for alert in record.alerts]) == (1, [1180.0, None])


def test_a_controller_that_takes_over_does_not_tell_again_and_a_new_attempt_does() -> None:
    run = Followed()
    with run.watch().watching() as watch:
        run.line(watch, loss=None)
    with run.watch().watching() as watch:  # the laptop was closed, and another machine goes on
        run.line(watch, loss=None)
    assert run.notified == ["not finite"]
    with run.watch(attempt=2).watching() as watch:
        run.line(watch, loss=None)
        watch.end()
    assert run.notified == ["not finite", "not finite"]
    assert run.alerts()[-1] == ("not finite", True, "")  # on record, and not worth a line on the screen
    assert read_alerts(cast(Ledger, run.bucket)).active == []


def test_lines_of_earlier_attempts_and_of_other_runs_are_not_judged() -> None:
    run = Followed()
    with run.watch().watching() as watch:
        run.events.emit("metrics", RUN, metrics={"time": 900.0, "loss": None})
        run.events.emit("metrics", "other-run", metrics={"loss": None})
        watch.tick(0.0)
    assert (run.alerts(), run.bucket.objects) == ([], {})


def test_silence_and_output() -> None:
    run = Followed()
    with run.watch().watching() as watch:
        watch.tick(601.0)
        watch.tick(700.0)
        run.events.emit("log", RUN, "it goes on\n", worker=2)
        watch.tick(0.0)
    assert [(name, over) for name, over, _ in run.alerts()] == [("no output", False), ("no output", True)]
    assert run.notified == ["no output"]


def test_a_bucket_that_refuses_is_a_warning() -> None:
    run = Followed()

    def refuse(alert: Alert) -> None:
        raise SlipwayError("no more space")

    with run.watch(notify=refuse).watching() as watch:
        run.line(watch, loss=None)
    assert "warning: the alerts were not recorded: no more space" in [each[""] for each in run.told]
    assert len(read_alerts(cast(Ledger, run.bucket)).alerts) == 1


@pytest.mark.parametrize("broken", [True, False])
def test_the_newest_checkpoint_is_looked_for_in_the_background(broken: bool) -> None:
    asked: list[int] = []

    def look() -> tuple[int, float] | None:
        asked.append(1)
        if broken and len(asked) == 1:
            raise SlipwayError("later")
        return 40, 1000.0

    watch = CheckpointWatch(look, lambda: 55.0, poll_seconds=0.01)
    found, late = watch.pop(), time.monotonic() + 240
    while found is None and time.monotonic() < late:
        found = watch.pop()
    watch.close()
    assert found == ((40, 1000.0), 55.0)

"""What the controller does with the alerts of an attempt: events, the record in the bucket, notifications once each."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from controller.alerts.alert import Alert, read_alerts
from controller.core.errors import SlipwayError
from controller.records.ledger import Launch
from controller.run.notifications import AlertWatch, CheckpointWatch
from tests.controller.alerts.test_judge import made_ledger, settings
from tests.fakes.clock import ManualClock
from tests.fakes.context import make_context

RUN = "run-1"


class Followed:
    """A run that a controller follows, with all that it says."""

    def __init__(self, folder: Path) -> None:
        self.clock, self.ledger = ManualClock(1000.0), made_ledger(folder)
        self.context = make_context(None, clock=self.clock)
        self.events = self.context.events
        self.told: list[dict[str, Any]] = []
        self.notified: list[str] = []
        self.events.add_listener(lambda event: self.told.append({"kind": event.kind, **event.data, "": event.message}))
        config = SimpleNamespace(alerts=settings(), program=SimpleNamespace(kind="command"))
        self.plan: Any = SimpleNamespace(run_id=RUN, config=config)

    def watch(self, attempt: int = 1, notify: Any = None) -> AlertWatch:
        launched = Launch(attempt, "uid", self.clock.now())
        told = notify or (lambda alert: self.notified.append(alert.name))
        return AlertWatch(self.plan, self.context, self.ledger, launched, told)

    def line(self, watch: AlertWatch, **values: Any) -> None:
        self.clock.elapsed += 30
        self.events.emit("metrics", RUN, metrics={"time": self.clock.now(), **values})
        watch.tick(0.0)

    def alerts(self) -> list[tuple[str, bool, str]]:
        return [(each["alert"], each["over"], each[""]) for each in self.told if each["kind"] == "alert"]


def test_each_alert_is_told_once_and_is_on_record_until_it_is_over(tmp_path: Path) -> None:
    run = Followed(tmp_path)
    with run.watch().watching() as watch:
        for _ in range(4):
            run.line(watch, step=1, loss=None)
        run.line(watch, step=2, loss=1.0)
        run.line(watch, step=3, loss=1.0)
        run.line(watch, step=4, loss=None)  # it has come back
    assert run.notified == ["not finite", "not finite"]
    (*began, why), ended, again = run.alerts()
    assert (began, why.startswith("not finite: loss is NaN or infinite at step 1; ")) == (["not finite", False], True)
    assert (ended, again[:2]) == (("not finite", True, "not finite is over"), ("not finite", False))
    record = read_alerts(run.ledger)
    assert (record.attempt, [alert.ended for alert in record.alerts]) == (1, [1180.0, None])


def test_a_controller_that_takes_over_does_not_tell_again_and_a_new_attempt_does(tmp_path: Path) -> None:
    run = Followed(tmp_path)
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
    assert read_alerts(run.ledger).active == []


def test_silence_and_output_of_this_attempt_of_this_run(tmp_path: Path) -> None:
    run = Followed(tmp_path)
    with run.watch().watching() as watch:
        run.events.emit("metrics", RUN, metrics={"time": 900.0, "loss": None})
        run.events.emit("metrics", "other-run", metrics={"loss": None})
        watch.tick(0.0)
    assert (run.alerts(), [*tmp_path.iterdir()]) == ([], [])
    with run.watch().watching() as watch:
        watch.tick(601.0)
        watch.tick(700.0)
        run.events.emit("log", RUN, "it goes on\n", worker=2)
        watch.tick(0.0)
    assert [(name, over) for name, over, _ in run.alerts()] == [("no output", False), ("no output", True)]
    assert run.notified == ["no output"]


def test_a_bucket_that_refuses_is_a_warning(tmp_path: Path) -> None:
    run = Followed(tmp_path)

    def refuse(alert: Alert) -> None:
        raise SlipwayError("no more space")

    with run.watch(notify=refuse).watching() as watch:
        run.line(watch, loss=None)
    assert "warning: the alerts were not recorded: no more space" in [each[""] for each in run.told]
    assert len(read_alerts(run.ledger).alerts) == 1


def test_the_newest_checkpoint_is_looked_for_in_the_background() -> None:
    asked: list[int] = []

    def look() -> tuple[int, float] | None:
        asked.append(1)
        if len(asked) == 1:
            raise SlipwayError("later")
        return 40, 1000.0

    watch = CheckpointWatch(look, lambda: 55.0, poll_seconds=0.01)
    found, late = watch.pop(), time.monotonic() + 240
    while found is None and time.monotonic() < late:
        found = watch.pop()
    watch.close()
    assert found == ((40, 1000.0), 55.0)

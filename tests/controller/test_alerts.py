"""Which lines of a run raise which alert, from when on, and when it is over."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from conf.schema.run_sections import RunAlerts
from controller.alerts import AlertJudge
from controller.core.this_process import Clock
from controller.gcp.folder_store import FolderClient
from controller.records.ledger import (
    MAX_RECORDED,
    Alert,
    AlertRecord,
    Ledger,
    describe_alert,
    read_alerts,
    write_alerts,
)
from tests.groups import CONF

BEGAN = 1000.0
USUAL, SLOW = {"tokens_per_second": 1000.0, "step_time": 1.0}, {"tokens_per_second": 400.0, "step_time": 2.5}
EVERY = 30.0
"""Seconds between two metrics lines here."""


def settings(**changes: Any) -> RunAlerts:
    return RunAlerts(**yaml.safe_load((CONF / "config.yaml").read_text())["alerts"] | changes)


def made_ledger(folder: Path) -> Ledger:
    return Ledger(FolderClient(Clock()), str(folder), "run-1")


@dataclass
class Run:
    """A judge and a clock that no test waits for."""

    judge: AlertJudge
    now: float = BEGAN
    said: list[tuple[float, str, bool]] = field(default_factory=list)
    step: int = 0

    def lines(self, count: int = 1, **values: Any) -> list[tuple[float, str, bool]]:
        """Add lines EVERY seconds apart; return what changed: seconds since the launch, name, whether it is over."""
        before = len(self.said)
        for _ in range(count):
            self.now, self.step = self.now + EVERY, self.step + 10
            self.judge.add_metrics({"step": self.step, "phase": "train", **values}, self.now)
            self._note()
        return self.said[before:]

    def silence(self, seconds: float) -> list[tuple[float, str, bool]]:
        self.judge.add_silence(seconds, self.now + seconds)
        return self._note()

    def checkpoint(self, step: int | None, age: float, now: float | None = None) -> list[tuple[float, str, bool]]:
        """Find a checkpoint of this age in the bucket."""
        self.now = self.now if now is None else now
        newest = None if step is None else (step, self.now - age)
        self.judge.add_checkpoint(newest, self.judge.step, self.now)
        return self._note()

    def _note(self) -> list[tuple[float, str, bool]]:
        found = [(alert.since - BEGAN, alert.name, alert.ended is not None) for alert in self.judge.pop_changes()]
        self.said += found
        return found


def run(save_interval: int | None = 10, known: tuple[Alert, ...] = (), **changes: Any) -> Run:
    return Run(AlertJudge(settings(**changes), BEGAN, save_interval, known))


def test_a_run_that_is_well_raises_nothing() -> None:
    made = run()
    for loss in (4.0, 3.5, 3.2, 3.3, 2.9, 3.0, 2.8, 2.9, 2.7, 2.8, 2.6, 2.9, 2.5):
        made.lines(loss=loss, grad_norm=1.0, tokens_per_second=1000 - 100 * loss, step_time=1.0, data_time=0.05)
        made.lines(phase="eval", eval_loss=9.0)
    assert made.said == []


def test_half_of_the_usual_throughput_is_slow_after_a_minute_and_once() -> None:
    made = run()
    made.lines(5, **USUAL)
    assert made.lines(2, **SLOW) == []  # 30 s are not yet a minute
    assert made.lines(10, **SLOW) == [(180.0, "slow", False)]
    alert = made.judge.alerts[-1]
    assert alert.message.startswith("400 tokens per second at step 80, 40% of the usual 1,000; see where")
    assert alert.message.endswith("(alerts.slow_fraction)")
    well = {"tokens_per_second": 990.0, "step_time": 1.0}
    assert [made.lines(1, **well), made.lines(1, **well)] == [[], [(180.0, "slow", True)]]  # one line may be chance
    assert made.lines(3, **SLOW) == [(made.now - BEGAN - 60, "slow", False)]  # it has come back


def test_fewer_tokens_in_steps_as_short_as_ever_and_another_phase_are_not_slow() -> None:
    made = run()
    made.lines(5, **USUAL)
    assert made.lines(10, tokens_per_second=300.0, step_time=1.0) == []  # the responses of GRPO became shorter
    assert made.lines(12, phase="grpo", tokens_per_second=100.0, step_time=9.0, loss=8.0) == []


WAITS = {"step_time": 1.0, "data_time": 0.35}
SLOW_WORKER = {"slow_worker": 3.0, "slow_worker_share": 0.38, "slow_worker_host_time": 0.7}
SLOW_WORKER |= {"slow_worker_device_time": 0.0}
FINE_WORKER = {"slow_worker": 2.0, "slow_worker_share": 0.04}


@pytest.mark.parametrize(
    ("changes", "before", "bad", "name", "message"),
    [
        ({"min_tokens_per_second": 500.0, "slow_fraction": None}, {}, {"tokens_per_second": 499.0}, "below floor",
         r"at least 500 \(alerts.min_tokens_per_second\)"),
        ({"save_interval": None}, {"step_time": 1.0}, {"step_time": 3.0}, "slow", r"0\.3333 steps per second"),
        ({}, {"step_time": 1.0, "data_time": 0.0}, WAITS, "data wait", "^35% of each step is spent waiting for data"),
        ({}, {"loss": 1.0, "skipped": 3.0}, {"loss": 1.0, "skipped": 4.0}, "not finite", ""),
        ({}, FINE_WORKER, SLOW_WORKER, "slow worker", "^worker 3 delays the others by 38% of each step at step .* "
         r"0\.7 s by its host;.*\(alerts.slow_worker_fraction\)$"),
    ],
)  # fmt: skip
def test_a_program_that_gets_worse_is_told_of_and_so_is_its_end(
    changes: dict[str, Any], before: dict[str, float], bad: dict[str, float], name: str, message: str
) -> None:
    made = run(**changes)
    assert made.lines(5, **before) == []
    assert made.lines(4, **bad)[0][1:] == (name, False)
    assert re.search(message, made.judge.alerts[0].message)
    if name in ("data wait", "slow worker"):
        assert [told[1:] for told in made.lines(2, **before)] == [(name, True)]


def test_a_loss_spike_at_once_until_the_loss_is_back() -> None:
    made = run()
    for loss in (2.9, 3.0, 3.1) * 4:
        made.lines(loss=loss)
    assert [name for _, name, _ in made.lines(25, loss=6.0)] == ["loss spike"]  # it does not become the usual loss
    assert made.judge.alerts[0].message.startswith("the loss is 6 at step 130, 2.0 times its recent median; if it does")
    assert [(name, over) for _, name, over in made.lines(2, loss=3.1)] == [("loss spike", True)]


@pytest.mark.parametrize("losses", [[0.01, 0.05, 0.02, 0.001] * 5, [-1.0] * 12 + [5.0], [1.0] * 9 + [9.0]])
def test_noise_around_zero_the_first_lines_and_grpo_have_no_spikes(losses: list[float]) -> None:
    made = run()
    assert [made.lines(loss=loss) for loss in losses] == [[]] * len(losses)
    made.lines(12, phase="grpo", loss=0.001)
    assert made.lines(3, phase="grpo", loss=0.5) == [], "the loss of GRPO measures nothing"


@pytest.mark.parametrize("values", [{"loss": None}, {"loss": float("nan")}, {"loss": 1.0, "finite": 0.0}])
def test_a_loss_that_is_no_number(values: dict[str, Any]) -> None:
    made = run()
    made.lines(2, loss=1.0, finite=1.0)
    assert made.lines(2, **values) == [(90.0, "not finite", False)]
    assert "loss is NaN or infinite at step 30; lower optimizer.lr" in made.judge.alerts[0].message
    assert made.lines(2, loss=1.0, finite=1.0) == [(90.0, "not finite", True)]


def test_an_own_program_is_not_told_of_keys_that_it_does_not_have() -> None:
    made = run(save_interval=None)
    made.lines(loss=None, step_time=1.0, data_time=0.9)
    made.lines(3, loss=1.0, step_time=1.0, data_time=0.9)
    assert [alert.name for alert in made.judge.alerts] == ["not finite", "data wait"]
    assert not [alert for alert in made.judge.alerts if "optimizer." in alert.message or "docs/" in alert.message]


def test_silence_until_something_is_printed() -> None:
    made = run()
    made.lines()
    assert made.silence(599) == []
    assert made.silence(601) == [(30.0, "no output", False)]
    assert made.silence(700) == []
    assert made.judge.alerts[0].message.startswith("no worker has printed or logged anything for 10:01; see `slip")
    made.judge.add_output(made.now)
    assert [alert.ended is not None for alert in made.judge.pop_changes()] == [True]


def test_a_checkpoint_of_the_trainer_is_stale_by_updates() -> None:
    made = run(save_interval=20)
    made.lines(2)
    assert made.checkpoint(20, age=10) == []
    made.lines(3)
    assert made.checkpoint(20, age=400) == []  # 30 updates behind, with one due every 20
    made.lines(3)
    assert made.checkpoint(20, age=200) == []  # too young
    made.now += 300
    assert made.checkpoint(20, age=400) == [(540.0, "stale checkpoint", False)]
    assert made.judge.alerts[0].message.startswith(
        "the newest checkpoint is of step 20, 6:40 old, and 60 updates behind, with one due every 20: a failure would"
    )
    assert made.checkpoint(80, age=5) == [(540.0, "stale checkpoint", True)]
    none = run(save_interval=10)
    assert none.checkpoint(None, age=0, now=BEGAN + 3000) == []  # it may still compile
    none.lines(3)
    none.now += 400
    assert [name for _, name, _ in none.checkpoint(None, age=0)] == ["stale checkpoint"]
    assert none.judge.alerts[0].message.startswith("there is no checkpoint yet")


def test_the_checkpoints_of_an_own_program_come_as_they_used_to() -> None:
    made = run(save_interval=None)
    assert made.checkpoint(None, age=0, now=BEGAN + 9999) == []  # it need not save any
    made.checkpoint(1, age=0)
    made.checkpoint(2, age=0, now=made.now + 200)
    assert made.checkpoint(2, age=490, now=made.now + 490) == []
    assert [name for _, name, _ in made.checkpoint(2, age=510, now=made.now + 20)] == ["stale checkpoint"]
    assert "while they came at most 3:20 apart" in made.judge.alerts[0].message
    bound = run(save_interval=None, checkpoint_minutes=5.0)
    assert bound.checkpoint(None, age=0, now=BEGAN + 299) == []
    assert [name for _, name, _ in bound.checkpoint(None, age=0, now=BEGAN + 301)] == ["stale checkpoint"]


def test_a_program_raises_alerts_of_its_own() -> None:
    made = run()
    said = {"alert": "entropy", "message": "the policy\nhardly explores\x1b[31m"}
    assert made.lines(3, **said) == [(30.0, "entropy", False)]
    assert made.judge.alerts[0].message == "the policy hardly explores"
    assert made.lines(1, alert="entropy", over=True) == [(30.0, "entropy", True)]
    assert [name for _, name, _ in made.lines(1, alert="slow")] == ["slow (program)"]
    made.said.clear()
    for number in range(50):
        made.lines(alert=f"number {number}")
    assert len(made.said) == 18  # with the two before them, twenty


def test_a_controller_that_comes_back_goes_on_with_what_it_had_raised() -> None:
    first = run()
    first.lines(5, **USUAL)
    first.lines(3, **SLOW)
    known = tuple(Alert.from_json(alert.to_json()) for alert in first.judge.alerts)
    second = run(known=known)
    assert second.lines(3, **SLOW) == []  # raised before
    assert [told[1:] for told in second.lines(5, tokens_per_second=900.0, step_time=1.0)] == [("slow", True)]
    assert [(name, over) for _, name, over in second.lines(9, tokens_per_second=400.0)] == [("slow", False)]


@pytest.mark.parametrize("off", ["slow_fraction", "data_wait_fraction", "loss_spike_factor", "silent_minutes"])
def test_each_alert_can_be_turned_off(off: str) -> None:
    changes: dict[str, Any] = {off: None, "not_finite": False, "checkpoint_intervals": None}
    made = Run(AlertJudge(settings(**changes), BEGAN, 10))
    made.lines(12, loss=1.0, tokens_per_second=1000.0, step_time=1.0, data_time=0.0)
    made.lines(4, loss=9.0, tokens_per_second=100.0, step_time=9.0, data_time=5.0)
    made.lines(1, loss=None)
    made.silence(1000)
    made.checkpoint(None, age=0)
    all_names = {"slow_fraction": "slow", "data_wait_fraction": "data wait", "loss_spike_factor": "loss spike"}
    expected = {*all_names.values(), "no output"} - {all_names.get(off, "no output")}
    assert {name for _, name, _ in made.said} == expected
    made.judge.end_all(2000.0)
    assert {alert.ended for alert in made.judge.pop_changes()} <= {2000.0}


def test_a_record_is_read_as_it_was_written_with_the_newest_alerts(tmp_path: Path) -> None:
    ledger = made_ledger(tmp_path)
    assert read_alerts(ledger) == AlertRecord(0)
    record = AlertRecord(3, (Alert("slow", "40 %", 10.0, limit=500.0), Alert("no output", "silent", 10.0, 20.0)))
    write_alerts(ledger, record)
    assert read_alerts(ledger) == record
    assert [alert.name for alert in record.active] == ["slow"]
    write_alerts(ledger, AlertRecord(1, tuple(Alert(str(number), "", 0.0) for number in range(MAX_RECORDED + 5))))
    assert [alert.name for alert in read_alerts(ledger).alerts][:1] == ["5"]
    told = [describe_alert(Alert("slow", "40 %", *times), 100.0) for times in ((10.0,), (10.0, 40.0), (110.0,))]
    assert told[:2] == ["ALERT slow (for 1:30): 40 %", "past alert slow (for 0:30, until 1:00 ago): 40 %"]
    assert told[2] == "ALERT slow (for 0:00): 40 %", "by another clock"

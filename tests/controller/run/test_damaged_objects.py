"""Each object of a run's record in turn is deleted or damaged while the run goes on: it ends, and says what it met.

Driver, ledger, leases, spending and recorder are the real ones, in a bucket that is a folder; only the pod is not.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from controller.context import Context
from controller.core.events import Event
from controller.lease import Lease
from controller.plan.build import Plan
from controller.records import recorder as records
from controller.records.ledger import Alert, AlertRecord, Launch, Ledger, Result, write_alerts
from controller.recovery.responses import AttemptOutcome, Incident, Verdict, VerdictKind
from controller.run.attempt import AttemptResult, AttemptRunner
from controller.run.drive import drive, open_run
from controller.run.notifications import AlertWatch
from controller.run.options import RunOptions

OBJECTS = {
    "runs/*/launches/0001.json": ("is missing", "is damaged"),
    "runs/*/lease.json": ("the lease of the run was deleted", "the lease of the run was overwritten"),
    "runs/*/verdicts/0001.json": ("", "is damaged"),
    "runs/*/pods/*.json": ("", "is damaged"),
    "runs/*/record.json": ("is missing", "is damaged"),
    "runs/*/alerts.json": ("", "is damaged"),
    "runs/*/result.json": ("", "is damaged"),
    "runs/*/run.yaml": ("", ""),
    "runs/*/plan.yaml": ("", ""),
    "runs/*/git.json": ("", ""),
    "index/*.json": ("", ""),
    "pods/*/lease.json": ("the lease of the pod was deleted", "the lease of the pod was overwritten"),
    "pods/*/claims/*.json": ("", "is damaged"),
    "pods/*/waiting/*.json": ("", "is damaged"),
}
"""What a run says about each object that somebody deletes, or overwrites; "" where it neither needs nor reads it."""
CONTENTS = {
    "cut": '{"format": 1, "att',
    "other": "[]",
    "keyless": '{"format": 1}',
    "types": '{"format": 1, "attempt": {}, "time": "x", "began": [], "latest": 5, "since": "y", "alerts": 3}',
}
CASES = [(name, how) for i, name in enumerate(OBJECTS) for how in ("deleted", list(CONTENTS)[i % len(CONTENTS)])]
"""Each object deleted, and damaged in one way, in turns: test_ledger, test_store and others give every reader all."""
NODE: Any = SimpleNamespace(
    name="this-machine",
    status=SimpleNamespace(uid="uid-1", created=0.0, billed_since=0.0, spec=SimpleNamespace(accelerator_type="cpu-1")),
    place=SimpleNamespace(zone="here", capacity="on_demand"),
)


class HeardScreen:
    """A screen that keeps what it is told, and agrees to everything."""

    def __init__(self) -> None:
        self.said, self.shown = list[str](), list[Any]()

    def __call__(self, event: Event) -> None:
        self.said.append(event.message)

    def ask(self, question: str, yes: bool) -> bool:
        return True

    def set_price(self, usd_per_hour: float | None) -> None: ...

    def show_detached(self) -> None: ...

    def show_result(self, result: Any, **_: object) -> None:
        self.shown.append(result)


@dataclass
class OpenedRun:
    """A run of `cloud=here` that is opened and not begun."""

    options: RunOptions
    plan: Plan
    context: Context
    screen: HeardScreen = field(default_factory=HeardScreen)

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.context.google, self.plan.bucket, self.plan.run_id)

    def drive(self) -> Result | None:
        return drive(self.options, self.plan, self.context, None, self.screen)

    def told(self, words: str) -> list[str]:
        return [text for text in self.screen.said if words in text]


def begin(runner: AttemptRunner) -> float:
    """Acquire the pod and launch the program; return when."""
    now = runner.context.clock.now()
    runner.lease.ensure()
    assert runner.ledger.record_launch(Launch(1, "uid-1", now, 1))
    runner.spending.open_billing(NODE)
    runner.recorder.begin(cast(Any, SimpleNamespace(call_all=lambda *_, **__: [None])))
    return now


def ended(verdict: Verdict, launched: float, **summary: Any) -> AttemptResult:
    end: Any = {"summary": {"loss": 1.5} | summary, "log_tail": "", "code": 0, "signal": None}
    return AttemptResult(1, AttemptOutcome(verdict, ((0, end),)), launched=launched)


class Scene:
    """A run of two attempts; between them somebody damages an object, and the controller reads all again."""

    def __init__(self, runner: AttemptRunner, damage: Any, *, damages_result: bool) -> None:
        self.runner, self.damage, self.damages_result = runner, damage, damages_result

    def attempt(self) -> AttemptResult:
        runner, now = self.runner, begin(self.runner)
        ledger, recovery = runner.ledger, runner.recovery
        recovery._record_incident(Incident(1, "preempted", "gone", "replace_node", 1, now))
        write_alerts(ledger, AlertRecord(1, (Alert("idle", "no output", now),)))
        if self.damages_result:
            ledger.write("result.json", "written by somebody else")
        (place := runner.waiter.queue.place("run-2", "1")).take()
        self.damage()
        for lease in (cast(Lease, runner.lease._first), runner.lease):
            lease._renew()
        recovery._incidents = recovery._incident_recorded = None  # type: ignore[assignment]
        recovery._record_incident(Incident(1, "killed", "again", "restart_program", 1, now))
        runner.spending._loaded = False
        assert runner.spending.usage().hours >= 0
        runner.spending.close_billing("stopped")
        runner.spending.open_billing(NODE)
        runner.waiter.queue.waiting_runs()
        place.leave()
        with AlertWatch(runner.plan, runner.context, ledger, Launch(1, "uid-1", now), lambda _: None).watching():
            pass
        return ended(Verdict(VerdictKind.FINISHED), now)


@contextmanager
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenedRun]:
    (repository := tmp_path / "repository").mkdir()
    (repository / "train.py").write_text("print(1)\n")
    monkeypatch.chdir(repository)
    monkeypatch.setenv("SLIPWAY_HOME", str(tmp_path / "state"))
    words = ("cloud=here", "cloud.backend=cpu", "program=command", "program.command=[python,train.py]")
    options = RunOptions((*words, "env.packages=none"))
    with open_run(options) as (plan, context, _):
        monkeypatch.setattr(type(plan.node), "find", lambda *_, **__: None)
        yield OpenedRun(options, plan, context)


@pytest.mark.parametrize(("name", "how"), CASES)
def test_the_run_ends_and_says_so(
    name: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with opened(tmp_path, monkeypatch) as run:
        bucket, google = Path(run.plan.bucket), run.context.google

        def damage() -> None:
            found = [str(file.relative_to(bucket)) for file in bucket.glob(name)]
            assert found, f"there is no {name}"
            for file in found:
                if how == "deleted":
                    google.call("storage", "objects.delete", bucket=run.plan.bucket, object=file)
                else:
                    google.upload(run.plan.bucket, file, CONTENTS[how].encode())

        result_too = name.endswith("result.json")
        monkeypatch.setattr(AttemptRunner, "run", lambda self: Scene(self, damage, damages_result=result_too).attempt())
        result = run.drive()
        assert result
        assert (result, result.summary) == (run.ledger.result(), {"loss": 1.5})
        kinds = [incident.kind for incident in run.ledger.incidents(Incident.from_json)]
        assert kinds[-1] == "killed", "the second incident is on record beside a damaged first one"
        record = json.loads((bucket / "runs" / run.plan.run_id / records.RECORD_FILE).read_text())
        assert record["run"] == run.plan.run_id
    said = run.told("warning")
    wanted = OBJECTS[name][how != "deleted"]
    assert any(wanted in note for note in said) if wanted else said == [], run.screen.said
    assert "Traceback" not in capsys.readouterr().err

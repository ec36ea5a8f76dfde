"""Webhooks and notifiers: what they are sent, when again, and that their failure is only a warning."""

import json
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from controller.checks.preflight import preflight
from controller.core.errors import SlipwayError
from controller.core.this_process import Clock, InterruptedSleepError
from controller.inputs.env_inputs import address_problem
from controller.records.ledger import Alert, Launch, Result, read_alerts
from controller.run.notifications import ATTEMPTS, AlertWatch, CheckpointWatch, Notifications
from tests.composed import config_of as compose_config
from tests.controller.test_alerts import made_ledger, settings
from tests.fakes.clock import ManualClock
from tests.fakes.context import make_context
from tests.fakes.loopback import Loopback

OWN = ["program=command", "program.command=[python, -V]", "cloud=local"]
RESULT = Result(
    run_id="run-1", outcome="finished", attempts=1, ended=100.0, seconds=90.0, summary={"loss": 0.12345, "steps": 3}
)


class Hook(Loopback, BaseHTTPRequestHandler):
    """A webhook that answers with these statuses in turn, then with 200."""

    statuses: list[int]
    bodies: list[dict[str, Any]]

    def do_POST(self) -> None:
        assert self.headers["Content-Type"] == "application/json"
        self.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.answer(self.statuses.pop(0) if self.statuses else 200, b"")


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Its `statuses` and `bodies`."""
    made = SimpleNamespace(statuses=[], bodies=[])
    with Hook.serving(**vars(made)) as url:
        monkeypatch.setenv("MY_HOOK", f"{url}services/SECRET")
        yield made


def notifications(tmp_path: Path, *overrides: str) -> tuple[Notifications, list[str], ManualClock]:
    """What sends the events of a run of these overrides, the notes that it makes, and its pauses."""
    config, clock = compose_config(*OWN, *overrides), ManualClock()
    node, snapshot, notes = SimpleNamespace(name="pod"), SimpleNamespace(root=tmp_path), list[str]()
    plan: Any = SimpleNamespace(config=config, run_id="run-1", node=node, snapshot=snapshot)
    return Notifications(plan, make_context(None, clock=clock, notes=notes)), notes, clock


def test_the_webhook_gets_each_event_as_slack_reads_it(hook: Any, tmp_path: Path) -> None:
    made, notes, _ = notifications(tmp_path, "notify.webhook=env:MY_HOOK")
    made.pod_preempted("node is PREEMPTED")
    made.run_failed(failure := "program error: worker 2 ended with code 1\nTraceback …")
    made.run_ended(RESULT)
    made.alert_raised(Alert("slow", "400 tokens per second", 10.0))
    told = {
        "preemption": ("node is PREEMPTED", "preempted: node is PREEMPTED"),
        "failure": (failure, "failed: program error: worker 2 ended with code 1"),
        "end": ("finished", "finished after 1.5 min: loss 0.1235, steps 3"),
        "alert": ("slow: 400 tokens per second", "alert: slow: 400 tokens per second"),
    }
    assert hook.bodies == [
        {"event": event, "run": "run-1", "pod": "pod", "verdict": verdict, "text": f"run-1 on pod: {text}"}
        | {"results": RESULT.summary if event == "end" else {}}
        for event, (verdict, text) in told.items()
    ]
    assert "SECRET" not in str(hook.bodies)
    assert notes == []


def test_only_the_events_asked_for_are_sent(hook: Any, tmp_path: Path) -> None:
    made, _, _ = notifications(tmp_path, "notify.webhook=env:MY_HOOK", "notify.events=[failure]")
    made.run_ended(RESULT)
    made.run_failed("")
    assert [body["event"] for body in hook.bodies] == ["failure"]


def test_a_busy_webhook_is_asked_again_and_a_refusal_is_a_warning(hook: Any, tmp_path: Path) -> None:
    made, notes, clock = notifications(tmp_path, "notify.webhook=env:MY_HOOK")
    hook.statuses[:] = [503, 429]
    made.run_ended(RESULT)
    assert (len(hook.bodies), len(clock.sleeps), notes) == (3, 2, [])
    hook.statuses[:] = [404]
    made.run_ended(RESULT)
    assert len(hook.bodies) == 4
    hook.statuses[:] = [500] * 10
    made.run_ended(RESULT)
    assert len(hook.bodies) == 4 + ATTEMPTS
    assert [note.split(": nobody")[1] for note in notes] == [
        " was notified: the webhook answered 404 Not Found",
        " was notified: the webhook answered 500 Internal Server Error",
    ]
    assert "SECRET" not in "".join(notes)


def test_a_webhook_that_is_not_there_is_a_secret_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, notes, clock = notifications(tmp_path, "notify.webhook=env:MY_HOOK")
    for value, words in (
        ("http://127.0.0.1:1/SECRET", "the webhook cannot be reached: "),
        ("ftp://example.com/SECRET", "the address must begin with https://"),
        ("", "notify.webhook: environment variable MY_HOOK is not set"),
    ):
        monkeypatch.setenv("MY_HOOK", value)
        made.run_ended(RESULT)
        assert words in notes[-1]
        assert "SECRET" not in notes[-1]
    assert len(clock.sleeps) == ATTEMPTS - 1
    monkeypatch.setenv("MY_HOOK", "http://127.0.0.1:1/")
    clock.interrupt_at, known = 0.0, len(notes)
    with pytest.raises(InterruptedSleepError):
        made.run_ended(RESULT)
    assert len(notes) == known, "being interrupted is no failed notification"


def test_a_notifier_of_ones_own_is_found_with_its_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a bastion there is only the shipped code, with the modules in `modules/`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "my_two_notifiers.py").write_text(
        "import json, pathlib\n"
        "def keep(event): pathlib.Path('event.json').write_text(json.dumps(event))\n"
        "def fail(event): raise RuntimeError('no')\n"
    )
    made, notes, _ = notifications(tmp_path, "notify.notifier=my_two_notifiers:keep")
    made.run_ended(RESULT)
    assert json.loads((tmp_path / "event.json").read_text())["results"] == RESULT.summary
    assert notes == []
    made, notes, _ = notifications(tmp_path, "notify.notifier=my_two_notifiers:fail")
    made.run_ended(RESULT)
    assert notes == ["warning: notify.notifier: nobody was notified: RuntimeError: no"]


def test_a_webhook_that_cannot_work_is_found_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose_config(*OWN, "notify.webhook=env:MY_HOOK")
    for value, words in (
        ("", "the environment variable MY_HOOK is not set"),
        ("hooks.slack.com/x", "env:MY_HOOK: the address must begin with https://"),
    ):
        monkeypatch.setenv("MY_HOOK", value)
        [found] = preflight(config)
        assert words in str(found)
    monkeypatch.setenv("MY_HOOK", "https://hooks.slack.com/x")
    assert preflight(config) == []
    (nowhere,) = preflight(compose_config(*OWN, "notify.webhook=file:/nowhere"))
    assert (nowhere.key, nowhere.severity) == ("notify.webhook", "error")


def test_other_addresses_are_refused_without_repeating_them() -> None:
    for url in ("http://example.com/", "https://", "file:///SECRET", "", "http://127.0.0.1.example"):
        assert address_problem(url) == "the address must begin with https://"
    for rest in ("example.com/T SECRET", "example.com/SECRET\u00e9", "[::1/SECRET", "example.com:port/SECRET"):
        problem = address_problem(f"https://{rest}")
        assert problem
        assert "SECRET" not in problem


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

    watch = CheckpointWatch(Clock(), look, lambda: 55.0, poll_seconds=0.01)
    found, late = watch.pop(), time.monotonic() + 240
    while found is None and time.monotonic() < late:
        found = watch.pop()
    watch.close()
    assert found == ((40, 1000.0), 55.0)

"""The threads that drive pods of samplers: when they start, and what becomes of their pods and of replaced ones."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from controller import sampler_crew, sampler_release
from controller.cli import main
from controller.core.errors import CloudError, ConfigError, LeaseLostError, OverBudgetError, SlipwayError
from controller.core.events import Event, Events
from controller.core.this_process import Clock, InterruptedSleepError
from controller.lease import Lease, pod_lease
from controller.records import index
from controller.run.options import RunOptions
from controller.run.session import open_session
from controller.sampler_release import end_pod
from tests.controller.conftest import ECHO_COMMAND, SlipwayCli
from tests.fakes.context import make_context
from tests.planes import pods

NOTHING = cast(Any, None)
PODS = ["run-sampler-1", "run-sampler-2"]


class Stage:
    """A trainer's run with two pods of samplers: what drives each is the test's, what is deleted is on record."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.notes, self.ended, self.driven = Clock(), list[str](), list[tuple[str, str]](), list[str]()
        self.context = make_context(None, clock=self.clock, notes=self.notes)
        self.trainer: Callable[[], Any] = lambda: None
        self.sampler: Callable[[str, Any], Any] = self.work
        self.plan = self.plan_of("run")
        self.lock, self.is_cancelled, self.may_be_training = threading.Lock(), False, True
        self.closed, self.before_budget = list[str](), cast(Any, None)
        plans = tuple(map(self.plan_of, PODS))
        monkeypatch.setattr(sampler_crew, "sampler_plans", lambda *_: plans)
        monkeypatch.setattr(sampler_crew, "price_of_pods", lambda *_: SimpleNamespace(total=3.0))
        monkeypatch.setattr(sampler_crew, "open_context", self.open)
        monkeypatch.setattr(sampler_crew, "end_pod", self.end)
        monkeypatch.setattr(sampler_crew, "_is_cancelled", lambda *_: self.is_cancelled)
        monkeypatch.setattr(sampler_crew, "_may_be_training", lambda *_: self.may_be_training)
        monkeypatch.setattr(
            sampler_crew.Spending, "close_vanished", lambda spending, *_: self.closed.append(spending._run_id)
        )
        monkeypatch.setattr(sampler_crew.running, "drive", self.drive)

    @staticmethod
    def plan_of(run_id: str) -> Any:
        node = SimpleNamespace(name=f"pod of {run_id}")
        config = SimpleNamespace(checkpoint=SimpleNamespace(max_outage_hours=1.0))
        return SimpleNamespace(run_id=run_id, bucket="b", config=config, node=node)

    @contextmanager
    def open(self, *_: object, **__: object) -> Iterator[tuple[Any, None]]:
        yield make_context(None, clock=Clock()), None

    def end(self, plan: Any, _: object, why: str, *, only_idle: bool) -> bool:
        assert only_idle == (not self.driven or self.is_cancelled), "what another controller drives is left to it"
        self.ended.append((plan.run_id, why))
        return True

    def drive(self, _: object, plan: Any, context: Any, *__: object, before_budget: Any = None, **___: object) -> Any:
        if plan.run_id == "run":
            self.before_budget = before_budget
            return self.trainer()
        with self.lock:
            self.driven.append(plan.run_id)
        return self.sampler(plan.run_id, context)

    def work(self, _: str, context: Any) -> None:
        """Sample until the controller leaves."""
        context.clock.sleep(600)

    def fail(self, error: BaseException, *, launched: str = "") -> Any:
        """What a trainer's run does that raises this."""

        def act(*_: object, **__: object) -> Any:
            if launched:
                self.launch(launched)
            raise error

        return act

    def launch(self, run: str = "run") -> None:
        self.context.events.note(run, "launched attempt", launched=True)

    def run(self, **options: bool) -> Any:
        return sampler_crew.drive(RunOptions(**options), self.plan, self.context, None, NOTHING)


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(monkeypatch)


def test_pods_start_with_the_trainer_and_go_on_without_this_controller(stage: Stage) -> None:
    stage.trainer = stage.launch
    assert stage.run() is None
    assert (sorted(stage.driven), stage.ended) == (PODS, [])
    done = list[str]()
    stage.sampler = lambda run, _: done.append(run)
    stage.run(detach=True)
    assert (sorted(done), stage.ended) == (PODS, []), "with --detach each pod is started before it returns"


def test_pods_of_a_finished_run_do_not_wait_for_the_bucket(stage: Stage) -> None:
    def end_of_program() -> None:
        stage.launch()
        stage.context.events.note("run", "the bucket has not taken the result", ended=True)
        late = stage.clock.deadline(60)
        while len(stage.ended) < 2 and not late():
            stage.clock.sleep(0.01)
        assert {why for _, why in stage.ended} == {"the trainer's run has ended"}

    stage.trainer = end_of_program
    stage.run()


def test_without_a_launch_nothing_is_driven_or_deleted(stage: Stage) -> None:
    stage.trainer = stage.fail(ConfigError("the pod is busy"), launched="another-run")
    with pytest.raises(ConfigError):
        stage.run()
    assert (stage.driven, stage.ended) == ([], [])


@pytest.mark.parametrize(
    ("error", "launched", "may_be_training", "ends"),
    [
        (ConfigError("no capacity"), "", False, True),
        (OverBudgetError("it has cost $3"), "", True, True),
        (SlipwayError("failed"), "run", True, True),
        (LeaseLostError("taken over"), "run", True, False),
        (InterruptedSleepError(), "run", True, False),
    ],
)
def test_pods_end_with_a_run_that_fails_and_not_with_its_controller(
    stage: Stage, error: BaseException, launched: str, may_be_training: bool, ends: bool
) -> None:
    stage.trainer, stage.may_be_training = stage.fail(error, launched=launched), may_be_training
    with pytest.raises(type(error)):
        stage.run()
    assert [run for run, _ in stage.ended] == (PODS if ends else [])


def test_pods_that_vanished_are_closed_only_when_this_controller_acts(stage: Stage) -> None:
    """While another one drives the run its accounts change: what was read before would be out of date."""

    def check() -> None:
        assert stage.closed == []
        stage.before_budget()
        assert stage.closed == ["run", *PODS]

    stage.trainer = check
    stage.run()


def test_pods_end_with_a_run_that_was_cancelled(stage: Stage) -> None:
    stage.trainer, stage.is_cancelled = stage.launch, True
    assert stage.run() is None
    assert [why for _, why in stage.ended] == ["the trainer's run was cancelled"] * 2


def test_samplers_of_a_finished_run_end_by_themselves_and_what_is_left_is_deleted(stage: Stage) -> None:
    result = object()

    def finish() -> Any:
        stage.launch()
        return result

    stage.trainer, stage.sampler = finish, lambda *_: None
    assert stage.run() is result
    assert [run for run, _ in stage.ended] == PODS
    stage.ended, stage.driven = [], []
    stage.trainer = object  # it is only reported
    stage.run()
    assert len(stage.ended) == 2


def test_a_pod_that_is_given_up_is_deleted_and_tried_again_at_the_next_attempt(stage: Stage) -> None:
    def two_attempts() -> None:
        for _ in range(2):
            stage.launch()
            for thread in threading.enumerate():
                if thread.name.startswith("samplers-"):
                    thread.join()

    stage.sampler, stage.trainer = stage.fail(SlipwayError("no capacity\nhint")), two_attempts
    stage.run()
    assert sorted(stage.driven) == sorted(PODS * 2)
    assert len(stage.ended) == 4
    assert "sampler pod 1: given up until the trainer's next attempt: no capacity" in stage.notes


def test_a_pod_that_cannot_be_deleted_hides_no_failure(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_crew, "end_pod", stage.fail(SlipwayError("permission denied")))
    stage.trainer = stage.fail(ConfigError("the cause"), launched="run")
    with pytest.raises(ConfigError, match="the cause"):
        stage.run()
    told = "sampler pod 2: pod of run-sampler-2 was not deleted (permission denied); `slipway down` deletes it"
    assert told in stage.notes


@pytest.mark.parametrize("error", [InterruptedSleepError(), LeaseLostError("cancelled by another command")])
def test_a_command_that_takes_over_while_pods_are_ended_is_told_without_a_traceback(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    monkeypatch.setattr(sampler_crew, "end_pod", stage.fail(error))
    stage.trainer, stage.is_cancelled = stage.launch, True
    assert stage.run() is None
    assert "sampler pod 1: pod of run-sampler-1 is left to the command that has taken it over" in stage.notes


def test_what_happens_on_a_pod_is_told_but_for_warnings(stage: Stage) -> None:
    members = sampler_crew.Crew(RunOptions(), stage.plan, (), stage.context)
    screen = sampler_crew._Screen(members, 1)
    for kind, message in (("note", "launched"), ("note", "warning: no quota"), ("log", "text")):
        screen(Event(0.0, cast(Any, kind), "run-sampler-1", message))
    assert stage.notes == ["sampler pod 1: launched"]
    assert screen.ask("go?", yes=False) is False


@contextmanager
def replacing(monkeypatch: pytest.MonkeyPatch, end: Callable[..., list[str]]) -> Iterator[tuple[Events, list[str]]]:
    """Listen for runs that `new` replaces; yield the events, and the notes that appear."""
    notes = list[str]()
    context = make_context(None, notes=notes)

    @contextmanager
    def opened(*_: object, **__: object) -> Iterator[tuple[Any, None]]:
        yield SimpleNamespace(), None

    monkeypatch.setattr(sampler_release, "open_context", opened)
    monkeypatch.setattr(sampler_release, "end_pods", end)
    monkeypatch.setattr(sampler_release.ReplacedRuns, "_plan_of", lambda self, run, context: f"plan of {run}")
    plan: Any = SimpleNamespace(run_id="new", config=None)
    with sampler_release.ReplacedRuns(plan, {"pod-sampler-1"}, context).ended_on_exit():
        yield context.events, notes


def test_those_of_a_stopped_run_end_but_for_names_that_the_new_run_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = list[Any]()
    with replacing(monkeypatch, lambda plan, _, why, keep: ended.append((plan, why, keep)) or []) as (events, notes):
        events.note("other", "stopped x", stopped="x")  # of another run's command
        events.note("new", "launched attempt 1", launched=True)
        events.note("new", "stopped old", stopped="old")
    assert ended == [("plan of old", "new has replaced its run", {"pod-sampler-1"})]
    assert "stopped old" in notes


@pytest.mark.parametrize("error", [CloudError("permission denied"), ConfigError("its code is missing")])
def test_what_cannot_be_ended_is_told_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def end(*_: object, **__: object) -> list[str]:
        raise error

    with replacing(monkeypatch, end) as (events, notes):
        events.note("new", "stopped old", stopped="old")
    told = f"not deleted: pods of samplers of old: {error}; they end by themselves within about an hour"
    assert any(note.startswith(told) for note in notes)


def test_a_record_of_an_older_version_without_such_pods_is_no_problem() -> None:
    def has_pods(**config: object) -> bool:
        document: Any = {"config": {"cloud": {"kind": "local"}, **config}}
        return sampler_release._has_sampler_pods(document)

    assert has_pods(loop={"kind": "grpo", "sampler": {"workers": 1, "pods": 2}})
    assert not any(has_pods(loop=loop) for loop in ({"kind": "grpo"}, {"kind": "lm"}, None))
    assert not has_pods()


FOREVER = 'program.command=[sh,-c,"echo up; sleep 600"]'


def end(slipway: SlipwayCli, *words: str, only_own: bool = True) -> bool:
    with open_session(main.parse(slipway.line("status", *words)).options, keep_awake=True) as session:
        return end_pod(session.plan, session.context, "the test is over", only_own=only_own)


@pytest.mark.e2e
def test_a_pod_ends_with_its_run_and_stays_if_another_run_uses_it(slipway: SlipwayCli) -> None:
    assert not end(slipway, FOREVER), "there is none"
    assert slipway("up", "--detach", FOREVER)[0] == 0
    assert not end(slipway, ECHO_COMMAND), "the pod of another run"
    assert len(pods(slipway.cloud().get("state"))) > 0
    assert slipway.json("status", FOREVER)["run"]["id"] == index.load_rows(slipway.home)[0]["run"]
    assert end(slipway, FOREVER)
    assert pods(slipway.cloud().get("state")) == {}
    found = slipway.json("status", FOREVER)
    assert found["run"]["state"] == "cancelled"
    assert [life["reason"] for life in found["cost"]["pods"]] == ["the test is over"]
    assert [row["state"] for row in index.load_rows(slipway.home)] == ["cancelled"]
    assert not end(slipway, FOREVER)


@pytest.mark.e2e
@pytest.mark.deep
def test_one_that_is_acquired_meanwhile_stays_until_down(slipway: SlipwayCli, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lease was free at the look at it."""
    assert slipway("up", "--detach", FOREVER)[0] == 0
    with open_session(main.parse(slipway.line("status", FOREVER)).options, keep_awake=True) as session:
        other = pod_lease(session.plan, session.context)
        other.ensure()
        monkeypatch.setattr(Lease, "current_other", lambda lease: None)
        assert not end_pod(session.plan, session.context, "the test is over", only_idle=True)
        other.release()
    assert len(pods(slipway.cloud().get("state"))) > 0
    assert end(slipway, ECHO_COMMAND, only_own=False)
    assert pods(slipway.cloud().get("state")) == {}

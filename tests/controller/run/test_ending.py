"""The program has ended and the bucket does not answer: what is billed goes at once, the records follow."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from controller import sampler_release as samplers
from controller.cleanup import teardown
from controller.context import Context
from controller.core.errors import OverBudgetError, ProgramFailedError, WrongDevicesError
from controller.gcp.folder_store import FolderClient
from controller.gcp.google_errors import ForbiddenError, GoogleError
from controller.gcp.outages import ATTEMPTS, OUTAGE_SECONDS, Retries
from controller.lease import pod_lease
from controller.records import index
from controller.records.ledger import Result
from controller.records.spending import Spending
from controller.records.unfinished import ResultNotRecordedError, kept_file, record_kept_result
from controller.recovery.responses import Verdict, VerdictKind
from controller.run import ending
from controller.run.attempt import AttemptResult, AttemptRunner
from controller.run.launch import PodQueue
from controller.sweep import sweep_session as pods
from tests.controller.gcp.test_outages import STORM, answering
from tests.controller.run.test_damaged_objects import NODE, OpenedRun, begin, ended, opened
from tests.fakes.clock import ManualClock

FORBIDDEN = ForbiddenError("storage objects.insert", 403, "forbidden", "no")
FOREVER = 10.0**9
SECONDS_TO_DELETE = 60.0
"""Most that a pod may be billed after the end of its program; each request of the bucket waits for none of it here."""


class Stage:
    """A run on a pod that is billed; its bucket fails from the end of the program on, its time passes in sleeps."""

    def __init__(self, run: OpenedRun, patch: pytest.MonkeyPatch) -> None:
        plan, context = self.plan, self.context = run.plan, run.context
        self.run, self.patch, self.ledger = run, patch, run.ledger
        self.clock, self.outage_until, self.error = ManualClock(), 0.0, STORM
        self.deleted, self.attempts = list[float](), 0
        self.others, self.verdict = set[str](), Verdict(VerdictKind.FINISHED)
        self.summary = dict[str, Any]()
        for name in ("sleep", "monotonic"):
            patch.setattr(context.clock, name, getattr(self.clock, name))
        patch.setattr(context.clock, "boot_time", self.clock.monotonic)
        for name in ("upload", "download", "call", "object_metadata"):
            patch.setattr(FolderClient, name, self.failing(getattr(FolderClient, name)))
        there = SimpleNamespace(
            **vars(NODE), title="the pod", is_ready=True, is_managed=True, adopt=False, fleet=lambda _: None
        )
        patch.setitem(vars(plan.node), "adopt", False)
        patch.setattr(type(plan.node), "find", lambda *_, **__: None if self.deleted else there)
        for module in (ending, samplers, pods, teardown):
            patch.setattr(module, "destroy", self.destroy)
        for module in (ending, samplers):
            patch.setattr(module, "running_runs", lambda _: self.others)
        patch.setattr(ending, "stop", lambda *_: None)
        patch.setattr(AttemptRunner, "run", lambda runner: self.attempt(runner))

    def failing(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def act(*arguments: Any, **more: Any) -> Any:
            if self.clock.elapsed < self.outage_until:
                raise self.error
            return real(*arguments, **more)

        return act

    def destroy(self, _: object, context: Context) -> None:
        context.before_pod_write()
        self.deleted.append(self.clock.elapsed)

    def attempt(self, runner: AttemptRunner) -> AttemptResult:
        """The program ends, and with it the bucket."""
        self.attempts += 1
        now = begin(runner)
        self.outage_until = self.clock.elapsed + self.outage_seconds
        return ended(self.verdict, now, **self.summary)

    def up(self, outage_seconds: float = FOREVER, **cleanup: str) -> Result | None:
        self.outage_seconds = outage_seconds
        for key, value in {"on_success": "delete", **cleanup}.items():
            self.patch.setitem(vars(self.plan.config.cleanup), key, value)
        return self.run.drive()

    def has_deleted_soon(self) -> None:
        [when] = self.deleted
        assert when <= SECONDS_TO_DELETE

    def lives(self) -> list[bool]:
        spending = Spending(self.context.google, self.clock, self.plan.bucket, self.plan.run_id, self.plan.config)
        return [life.ended is not None for life in spending.lifetimes()]


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    with opened(tmp_path, monkeypatch) as run:
        yield Stage(run, monkeypatch)


def test_a_pod_that_google_does_not_show_at_the_end_is_deleted_once_it_does(stage: Stage) -> None:
    """A refusal to show it is no absence: it would stay, billed."""
    shown, refused = type(stage.plan.node).find, GoogleError("look for p", 503, "REFUSED", "not now")

    def find(*arguments: Any, surely: bool = False, **more: Any) -> Any:
        if surely and stage.clock.elapsed < 120:
            raise refused
        return shown(*arguments, **more)

    stage.patch.setattr(type(stage.plan.node), "find", find)
    stage.up(0.0)
    [when] = stage.deleted
    assert when >= 120


@pytest.mark.parametrize("error", [STORM, FORBIDDEN])
def test_a_result_that_is_never_taken_is_kept_and_recorded_by_the_next_verb(stage: Stage, error: GoogleError) -> None:
    stage.error = error
    message = r"has finished; its pod is deleted, but .* It is kept in"
    with pytest.raises(ResultNotRecordedError, match=message) as raised:
        stage.up()
    assert raised.value.exit_code == 2
    stage.has_deleted_soon()
    assert stage.clock.elapsed <= OUTAGE_SECONDS + SECONDS_TO_DELETE
    file = kept_file(stage.context.state_dir, stage.plan.run_id)
    assert str(file) in str(raised.value)
    [row] = index.load_rows(stage.context.state_dir)
    assert (row["state"], row["metrics"]) == ("finished", {"loss": 1.5})
    record_kept_result(stage.context, stage.ledger)
    assert file.is_file(), "the bucket is still out"
    stage.outage_until = 0.0
    assert stage.lives() == [False]
    result = stage.up()
    assert (stage.attempts, stage.lives()) == (1, [True]), "nothing runs again"
    assert result is not None
    assert (result, result.summary) == (stage.ledger.result(), {"loss": 1.5})
    assert not file.exists()


def test_a_number_that_json_has_not_is_one_in_the_result(stage: Stage) -> None:
    """The bundled trainer writes its summary as all JSON is written."""
    stage.summary = {"accuracy": None, "not_finite": {"accuracy": "nan"}}
    result = stage.up(outage_seconds=0.0)
    for found in (result, stage.ledger.result()):
        assert found is not None
        assert repr(found.summary) == repr({"loss": 1.5, "accuracy": math.nan})


@pytest.mark.parametrize(
    ("seconds", "cleanup", "others"),
    [(0.0, "delete", set()), (180.0, "delete", set()), (180.0, "keep", set()), (180.0, "delete", {"run-2"})],
)
def test_a_bucket_that_is_back_takes_the_result(stage: Stage, seconds: float, cleanup: str, others: set[str]) -> None:
    stage.others = others  # which the workers tell, and the bucket does not
    result = stage.up(seconds, on_success=cleanup)
    assert result
    assert result == stage.ledger.result()
    is_deleted = cleanup == "delete" and not others
    assert (len(stage.deleted), stage.lives()) == (is_deleted, [is_deleted])
    assert not kept_file(stage.context.state_dir, stage.plan.run_id).exists()
    assert bool(stage.run.told("has not taken the result")) == bool(seconds)
    assert bool(stage.run.told("the pod stays for the next run: run-2")) == bool(others)


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        (VerdictKind.OVER_BUDGET, OverBudgetError, "was ended: it is over"),
        (VerdictKind.DEVICE_MISMATCH, WrongDevicesError, "device mismatch: worker 0"),
        (VerdictKind.PROGRAM_ERROR, ProgramFailedError, "program error: worker 0"),
    ],
)
def test_a_run_that_is_ended_leaves_no_pod(stage: Stage, kind: VerdictKind, error: type[Exception], words: str) -> None:
    stage.verdict = Verdict(kind, ("it is over",), 0)
    with pytest.raises(error, match=words):
        stage.up(on_failure="delete")
    stage.has_deleted_soon()
    assert stage.run.told("is not on record")


@pytest.mark.parametrize("verdict", [VerdictKind.FINISHED, VerdictKind.PROGRAM_ERROR])
@pytest.mark.parametrize("is_taken", [True, False])
def test_a_pod_is_left_to_the_run_that_waits_for_it_and_deleted_if_that_goes(
    stage: Stage, verdict: VerdictKind, is_taken: bool
) -> None:
    """It has ended, with its last words, before it waits for the next one."""
    stage.verdict = Verdict(verdict, ("worker 0",), 0)
    plan, context, failed = stage.plan, stage.context, verdict is VerdictKind.PROGRAM_ERROR
    place = PodQueue(context.google, context.clock, plan.bucket, plan.node.name).place("run-2", "2")
    next_lease = pod_lease(plan, context)
    place.take()

    def sleep(_: float) -> None:
        said = next_lease.read()
        assert said is not None
        assert (said.record.released, said.record.exit_code) == (True, ProgramFailedError.exit_code if failed else 0)
        if is_taken:
            next_lease.ensure()
        else:
            place.leave()

    stage.patch.setattr(context.clock, "sleep", sleep)
    with suppress(ProgramFailedError):
        stage.up(0.0, on_failure="delete")
    place.leave()
    next_lease.release()
    assert stage.run.told("the pod stays for the next run: run-2")
    assert (len(stage.deleted), stage.lives()) == (not is_taken, [not is_taken])
    assert bool(stage.run.told("no run waits for the pod any more")) == (not is_taken)
    assert not stage.run.told("`slipway down` deletes it")


def test_a_cancelled_run_ends_within_minutes(stage: Stage) -> None:
    stage.verdict = Verdict(VerdictKind.CANCELLED, ("cancelled",))
    assert stage.up() is None
    assert stage.clock.elapsed <= OUTAGE_SECONDS + SECONDS_TO_DELETE
    assert stage.run.told("warning: the end of the run is not on record")


@contextmanager
def out(stage: Stage) -> Iterator[None]:
    stage.outage_until = FOREVER
    yield
    stage.outage_until = 0.0
    assert stage.clock.elapsed <= SECONDS_TO_DELETE


def test_pods_of_samplers_and_of_sweeps_wait_for_no_bucket(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, context, there = stage.plan, stage.context, stage.plan.node.find(stage.context)
    monkeypatch.setattr(type(plan), "observe_pod", lambda *_: there)
    monkeypatch.setattr(samplers, "Node", SimpleNamespace)
    monkeypatch.setattr(pods, "managed_node", lambda *_: there)
    monkeypatch.setattr(pods, "running_runs", lambda *_: stage.others)
    acts: list[Callable[[], object]] = [
        lambda: samplers.end_pod(plan, context, "over"),
        lambda: samplers.end_pod(plan, context, "over", only_own=False),
        lambda: pods.delete_if_unused(plan, context, "over"),
        lambda: pods.force_delete(plan, context, cast(Any, there)),
    ]
    for count, act in enumerate(acts, 1):
        with out(stage):
            act()
        assert len(stage.deleted) == count
    stage.deleted.clear()
    place = PodQueue(context.google, context.clock, plan.bucket, plan.node.name).place("run-2", "2")
    place.take()
    stage.clock.on_sleep = place.leave
    pods.delete_if_unused(plan, context, "over")
    assert stage.clock.sleeps, "the run that waits may take it"
    assert len(stage.deleted) == 1, "once it has left"
    stage.deleted.clear()
    stage.others = {"run-2"}
    with out(stage):
        assert not samplers.end_pod(plan, context, "over")
        pods.delete_if_unused(plan, context, "over")
    assert stage.deleted == [], "what another run uses stays"
    assert pod_lease(plan, context).last_token == 0


def test_a_hurried_client_asks_a_silent_bucket_once_a_request() -> None:
    clock = ManualClock()
    retries, asked = Retries(clock), list[int]()

    def ask(*errors: GoogleError | None) -> None:
        sent, request = list[str](), answering(*errors)
        with suppress(GoogleError):
            retries.call(lambda: sent.append("sent") or request(), api="storage")
        asked.append(len(sent))

    ask(STORM)
    retries.is_hurried = True
    ask(STORM)
    ask(None)
    ask(STORM)
    assert asked == [ATTEMPTS, 1, 1, ATTEMPTS]
    with pytest.raises(GoogleError):
        retries.call(answering(STORM), api="tpu")
    assert clock.elapsed > 0

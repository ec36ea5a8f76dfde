"""The start and the end of `up`, and a bucket that does not answer meanwhile; a run that somebody else has finished."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from controller.core.errors import CloudError, LeaseLostError, SlipwayError
from controller.gcp.google_errors import GoogleError, NotFoundError
from controller.lease import Lease, LeaseHeldError, pod_lease
from controller.lease_store import BucketLeaseStore, Identity, LeaseSnapshot
from controller.records import index
from controller.records.ledger import Ledger, Result
from controller.records.recorder import Recorder
from controller.records.spending import PodLifetime
from controller.recovery.recover import RecoveryExecutor
from controller.recovery.responses import AttemptOutcome, Verdict, VerdictKind
from controller.run.attempt import AttemptResult, AttemptRunner
from controller.run.drive import RunDriver
from controller.run.ending import Ending
from controller.run.options import RunOptions
from controller.run.session import open_session
from tests.controller.gcp.test_outages import STORM
from tests.controller.recovery.test_recover import recovery as policy
from tests.controller.run.test_attempt import Watched
from tests.controller.run.test_damaged_objects import OpenedRun, Scene, begin, opened
from tests.fakes.clock import ManualClock
from tests.fakes.context import make_context


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenedRun]:
    with opened(tmp_path, monkeypatch) as opened_run:
        monkeypatch.setattr(opened_run.context.clock, "sleep", lambda _: None)
        yield opened_run


def refusing(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def test_a_storm_at_the_start_is_waited_out(run: OpenedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    done, answers = Result(run.plan.run_id, "finished", 1, 2.0, 1.0), [STORM] * 3

    def result(_: Ledger) -> Result | None:
        if answers:
            raise answers.pop()
        return done

    monkeypatch.setattr(Ledger, "result", result)
    assert run.drive() == done
    assert not answers
    assert run.told("answers 503 UNAVAILABLE; waiting, for at most 10 minutes")


def test_a_failure_is_told_although_the_bucket_is_gone(run: OpenedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Google does not say whether the pod exists, and the failure cannot be recorded."""
    outage = GoogleError("tpu queuedResources.get", 500, "INTERNAL", "Internal error")
    no_bucket = NotFoundError("storage objects.insert", 404, "NOT_FOUND", "The specified bucket does not exist.")
    monkeypatch.setattr(RunDriver, "run", refusing(outage))
    monkeypatch.setattr(Ending, "own_pod", lambda _: None)
    monkeypatch.setattr(Recorder, "record_stop", refusing(no_bucket))
    with pytest.raises(GoogleError) as raised:
        run.drive()
    assert raised.value is outage
    assert run.told("the failure is not on record: storage objects.insert: 404")


def test_a_run_that_somebody_finished_meanwhile_is_not_run_again(
    run: OpenedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = Result(run.plan.run_id, "finished", 1, 2.0, 1.0, {"loss": 1.0})

    def provision(_: AttemptRunner) -> Any:
        run.ledger.record_result(done)  # while this controller was stopped
        run.context.before_pod_write()
        raise AssertionError("the pod was changed")

    monkeypatch.setattr(AttemptRunner, "run", provision)
    assert run.drive() == done
    assert run.screen.shown == [done]
    assert "another controller has finished the run in the meantime" in run.screen.said


def test_what_another_controller_spent_in_the_meantime_counts(run: OpenedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """It took the lease first and ends later; this controller waits, says so once, and acts after it."""
    life = PodLifetime("uid-1", "pod", "v6e-1", "us-east5-b", "spot", 2.0, 0.0, 7200.0, "finished")
    seen: list[float] = []
    slept: list[float] = []
    record = Identity("laptop", run.plan.run_id).new_record(1, 0.0, 1.0)

    def provision(runner: AttemptRunner) -> AttemptResult:
        seen.append(runner.spending.usage().hours)
        if len(seen) == 1:
            run.ledger.write(f"pods/{life.key}.json", json.dumps(life.to_json()))
        if len(seen) <= 3:
            raise LeaseHeldError(LeaseSnapshot(record, 1, 0.0), "run")
        return AttemptResult(1)

    monkeypatch.setattr(AttemptRunner, "run", provision)
    monkeypatch.setattr(run.context.clock, "sleep", slept.append)
    assert run.drive() is None
    assert seen == [0.0, 2.0, 2.0, 2.0]
    assert len(slept) == 3
    assert min(slept) > 0
    [said] = run.told("took the lease first")
    assert f"{record} controls this run; waiting until it acts, releases the lease" in said
    assert said.endswith("for 1 s")


def test_a_run_that_has_finished_does_not_run_again_in_the_table(run: OpenedRun) -> None:
    google, bucket = run.context.google, run.plan.bucket
    recorder, states = Recorder(run.plan, run.context, run.ledger, []), list[str]()
    recorder.folder.mkdir(parents=True)

    def stopped() -> int:
        """Another controller finishes the run while this one is stopped."""
        index.publish_row(google, bucket, {"run": run.plan.run_id, "state": "finished"})
        return 1

    for act in (lambda: 1, stopped):
        run.context.before_pod_write = act
        recorder.begin(cast(Any, SimpleNamespace(call_all=lambda *_, **__: [None])))
        states += [row["state"] for row in index.list_published_rows(google, bucket)]
    assert states == ["running", "finished"]


@pytest.mark.parametrize("method", ["record_result", "launches", "checkpoints"])
def test_the_end_is_recorded_when_the_bucket_is_back(
    method: str, run: OpenedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, storms, has_ended = getattr(Ledger, method), [STORM] * 3, list[bool]()

    def disturbed(ledger: Ledger, *arguments: Any) -> Any:
        if storms and has_ended:
            raise storms.pop()
        return real(ledger, *arguments)

    def attempt(runner: AttemptRunner) -> Any:
        ended = Scene(runner, lambda: None, damages_result=False).attempt()
        has_ended.append(True)
        return ended

    monkeypatch.setattr(Ledger, method, disturbed)
    monkeypatch.setattr(AttemptRunner, "run", attempt)
    result = run.drive()
    assert result is not None
    assert result == run.ledger.result()
    waits = run.told("has not taken the result: backend error")
    assert len(waits) == (method != "checkpoints"), "what the end does not need is not asked"


def executor(hours: float) -> tuple[RecoveryExecutor, ManualClock, list[str]]:
    said, none = list[str](), cast(Any, None)
    context = make_context(None, clock=(clock := ManualClock()), notes=said)
    config = SimpleNamespace(checkpoint=SimpleNamespace(max_outage_hours=hours), recovery=policy())
    plan: Any = SimpleNamespace(config=config, bucket="b", run_id="run-1")

    context.before_pod_write = refusing(STORM)
    return RecoveryExecutor(plan, context, none, none, 5.0, none), clock, said


def test_a_response_waits_for_the_lease_and_ends_with_the_key() -> None:
    recovery, clock, said = executor(2)
    outcome = AttemptOutcome(Verdict(VerdictKind.PREEMPTED, ("gone",)))
    with pytest.raises(
        CloudError, match=r"gs://b has not answered for 2 h, the limit \(checkpoint\.max_outage_hours\)"
    ):
        recovery.respond(outcome, 1)
    assert 2 * 3600 <= clock.elapsed <= 2 * 3600 + 60
    assert set(said) == {"Google's API does not respond (backend error); waiting"}


def test_launches_that_fail_one_after_the_other_share_one_bound() -> None:
    recovery, clock, _ = executor(2)
    lost = AttemptOutcome(Verdict(VerdictKind.NETWORK_LOST, ("Google's API does not respond",)))

    def fail_for(seconds: float) -> None:
        until = clock.elapsed + seconds
        while clock.elapsed < until:
            recovery.respond(lost, 0, STORM)

    fail_for(3600)
    recovery.respond(lost, 1)  # an attempt was launched in between: that was another outage
    fail_for(3600)
    with pytest.raises(CloudError, match=r"checkpoint\.max_outage_hours"):
        fail_for(3700)


def test_a_standby_goes_on_watching() -> None:
    scene, looks = Watched(None, result="the result"), 0
    real = scene.lease.read

    def read() -> Any:
        nonlocal looks
        looks += 1
        if looks in (2, 3):
            raise STORM
        return real()

    scene.lease.read = read
    assert scene.watch() == "the result"
    assert any("still watching" in note for note in scene.notes)


def test_a_lease_that_expires_in_the_outage_stops_each_change(run: OpenedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real lease in a bucket that is a folder: no change without a renewal, and the same token afterwards."""
    lease = pod_lease(run.plan, run.context)
    now = [run.context.clock.boot_time()]
    monkeypatch.setattr(lease, "_watch", lambda stop: None)
    monkeypatch.setattr(run.context.clock, "boot_time", lambda: now[0])
    token = lease.ensure()
    with monkeypatch.context() as outage:
        outage.setattr(type(run.context.google), "upload", refusing(STORM))
        now[0] += 40 * 60
        with pytest.raises(GoogleError):
            lease.ensure()
        lease.raise_if_lost()
    assert lease.ensure() == token
    lease.release()


def taken_over(run: OpenedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another controller takes pod and run over while this one is stopped for longer than its term."""
    later = run.context.clock.boot_time() + 3600.0
    monkeypatch.setattr(run.context.clock, "boot_time", lambda: later)
    for name, folder in ((run.plan.node.name, "pods"), (run.plan.run_id, "runs")):
        store = BucketLeaseStore(run.context.google, run.plan.bucket, name, folder)
        held = store.read()
        assert held is not None
        other = Identity("laptop", run.plan.run_id).new_record(held.record.token + 1, 0.0, 60.0)
        store.write(other, held.generation)


def test_a_controller_that_fails_after_it_was_taken_over_records_nothing(
    run: OpenedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attempt(runner: AttemptRunner) -> Any:
        begin(runner)
        taken_over(run, monkeypatch)
        raise CloudError("the pod was not ready in time")

    monkeypatch.setattr(Lease, "_watch", lambda *_: None)
    monkeypatch.setattr(AttemptRunner, "run", attempt)
    with pytest.raises(LeaseLostError, match="took over; this controller stopped"):
        run.drive()
    assert [row["state"] for row in index.list_published_rows(run.context.google, run.plan.bucket)] == ["running"]


def test_a_controller_that_is_woken_up_while_it_records_the_end_was_taken_over(
    run: OpenedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = LeaseLostError("laptop of somebody else took over; this controller stopped")

    def finish(driver: RunDriver) -> Any:
        driver.lease._mark_lost(lost)
        return Result(run.plan.run_id, "finished", 1, 2.0, 1.0)

    monkeypatch.setattr(RunDriver, "run", finish)
    monkeypatch.setattr(Recorder, "finish", lambda *_: run.context.clock.raise_if_interrupted())
    with pytest.raises(LeaseLostError) as raised:
        run.drive()
    assert raised.value is lost


@pytest.mark.usefixtures("home")
def test_reading_a_record_shows_a_spinner_until_an_error() -> None:
    shown: list[str] = []

    @contextmanager
    def waiting() -> Iterator[Callable[[str], object]]:
        yield shown.append
        shown.append("not reached: the error passes through")

    options = RunOptions(run_id="quickstart-00000000", overrides=("cloud=here",), waiting=waiting)
    with pytest.raises(SlipwayError, match="quickstart-00000000"), open_session(options):
        pass
    assert shown == ["reading the record of quickstart-00000000"]

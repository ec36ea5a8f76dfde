"""The start and the end of `up`, and a bucket that does not answer meanwhile; a run that somebody else has finished."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from controller.core.errors import CloudError, SlipwayError
from controller.gcp.errors import GoogleError, NotFoundError
from controller.lease.lease import LeaseHeldError, pod_lease
from controller.lease.store import Identity, LeaseSnapshot
from controller.records import index
from controller.records.ledger import Ledger, Result
from controller.records.recorder import Recorder
from controller.records.spending import PodLifetime
from controller.recovery.recover import RecoveryExecutor
from controller.recovery.verdict import AttemptOutcome, Verdict, VerdictKind
from controller.run.attempt import AttemptResult, AttemptRunner
from controller.run.drive import RunDriver, drive
from controller.run.ending import Ending
from controller.run.options import RunOptions
from controller.run.session import open_session
from tests.controller.gcp.test_retries import STORM
from tests.controller.recovery.test_policy import recovery as policy
from tests.controller.run.test_attempt import Watched
from tests.controller.run.test_damaged_objects import HeardScreen, Scene, opened
from tests.fakes.clock import ManualClock
from tests.fakes.context import make_context


def test_a_storm_at_the_start_is_waited_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path, monkeypatch) as (options, plan, context):
        done = Result(plan.run_id, "finished", 1, 2.0, 1.0)
        answers = [STORM] * 3

        def result(_: Ledger) -> Result | None:
            if answers:
                raise answers.pop()
            return done

        monkeypatch.setattr(Ledger, "result", result)
        monkeypatch.setattr(context.clock, "sleep", lambda _: None)
        screen = HeardScreen()
        assert drive(options, plan, context, None, screen) == done
        assert not answers
        assert [text for text in screen.said if "answers 503 UNAVAILABLE; waiting, for at most 10 minutes" in text]


def test_a_failure_is_told_although_the_bucket_of_an_earlier_launch_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Google does not say whether the pod exists, and the failure cannot be recorded."""
    outage = GoogleError("tpu queuedResources.get", 500, "INTERNAL", "Internal error")

    def fail(*_: Any, **__: Any) -> Any:
        raise outage

    def no_bucket(*_: Any, **__: Any) -> Any:
        raise NotFoundError("storage objects.insert", 404, "NOT_FOUND", "The specified bucket does not exist.")

    with opened(tmp_path, monkeypatch) as (options, plan, context):
        monkeypatch.setattr(RunDriver, "run", fail)
        monkeypatch.setattr(Ending, "own_pod", lambda _: None)
        monkeypatch.setattr(Recorder, "record_stop", no_bucket)
        screen = HeardScreen()
        with pytest.raises(GoogleError) as raised:
            drive(options, plan, context, None, screen)
        assert raised.value is outage
        assert [text for text in screen.said if "the failure is not on record: storage objects.insert: 404" in text]


def test_a_run_that_somebody_finished_before_the_lease_was_acquired_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, monkeypatch) as (options, plan, context):
        done = Result(plan.run_id, "finished", 1, 2.0, 1.0, {"loss": 1.0})
        ledger = Ledger(context.google, plan.bucket, plan.run_id)

        def provision(_: AttemptRunner) -> Any:
            ledger.record_result(done)  # while this controller was stopped
            context.before_pod_write()
            raise AssertionError("the pod was changed")

        monkeypatch.setattr(AttemptRunner, "run", provision)
        screen = HeardScreen()
        assert drive(options, plan, context, None, screen) == done
        assert screen.shown == [done]
        assert "another controller has finished the run in the meantime" in screen.said


def test_what_another_controller_spent_in_the_meantime_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It took the lease first, and this controller acts after it."""
    with opened(tmp_path, monkeypatch) as (options, plan, context):
        life = PodLifetime("uid-1", "pod", "v6e-1", "us-east5-b", "spot", 2.0, 0.0, 7200.0, "finished")
        seen: list[float] = []

        def provision(runner: AttemptRunner) -> AttemptResult:
            seen.append(runner.spending.usage().hours)
            if len(seen) == 1:
                name = f"runs/{plan.run_id}/pods/{life.key}.json"
                context.google.upload(plan.bucket, name, json.dumps(life.to_json()).encode())
                record = Identity("laptop", plan.run_id).new_record(1, 0.0, 1.0)
                raise LeaseHeldError(LeaseSnapshot(record, 1, 0.0), "pod")
            return AttemptResult(1)

        monkeypatch.setattr(AttemptRunner, "run", provision)
        screen = HeardScreen()
        assert drive(options, plan, context, None, screen) is None
        assert seen == [0.0, 2.0]


def test_a_run_that_has_finished_does_not_run_again_in_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, monkeypatch) as (_, plan, context):
        ledger = Ledger(context.google, plan.bucket, plan.run_id)
        recorder, states = Recorder(plan, context, ledger, []), list[str]()
        fleet: Any = SimpleNamespace(call_all=lambda *_, **__: [None])
        recorder.folder.mkdir(parents=True)

        def stopped() -> int:
            """Another controller finishes the run while this one is stopped."""
            index.publish_row(context.google, plan.bucket, {"run": plan.run_id, "state": "finished"})
            return 1

        for act in (lambda: 1, stopped):
            context.before_pod_write = act
            recorder.begin(fleet)
            states += [row["state"] for row in index.list_published_rows(context.google, plan.bucket)]
        assert states == ["running", "finished"]


@pytest.mark.parametrize("method", ["record_result", "launches", "checkpoints"])
def test_the_end_of_a_run_is_recorded_when_the_bucket_is_back(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, monkeypatch) as (options, plan, context):
        real, storms = getattr(Ledger, method), [STORM] * 3

        def disturbed(ledger: Ledger, *arguments: Any) -> Any:
            if storms and scene:
                raise storms.pop()
            return real(ledger, *arguments)

        scene: list[Scene] = []

        def attempt(runner: AttemptRunner) -> Any:
            ended = Scene(runner, lambda: None, damages_result=False).attempt()
            scene.append(cast(Any, "the attempt has ended"))
            return ended

        monkeypatch.setattr(Ledger, method, disturbed)
        monkeypatch.setattr(AttemptRunner, "run", attempt)
        monkeypatch.setattr(context.clock, "sleep", lambda _: None)
        screen = HeardScreen()
        result = drive(options, plan, context, None, screen)
        assert result is not None
        assert result == Ledger(context.google, plan.bucket, plan.run_id).result()
        waits = [text for text in screen.said if "has not taken the result: backend error" in text]
        assert len(waits) == (method != "checkpoints"), "what the end does not need is not asked"


def executor(hours: float) -> tuple[RecoveryExecutor, ManualClock, list[str]]:
    said, none = list[str](), cast(Any, None)
    context = make_context(None, clock=(clock := ManualClock()), notes=said)
    config = SimpleNamespace(checkpoint=SimpleNamespace(max_outage_hours=hours), recovery=policy())
    plan: Any = SimpleNamespace(config=config, bucket="b", run_id="run-1")

    def held_back() -> int:
        raise STORM

    context.before_pod_write = held_back
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


def test_a_lease_that_expires_during_the_outage_stops_every_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real lease in a bucket that is a folder: no change without a renewal, and the same token afterwards."""
    with opened(tmp_path, monkeypatch) as (_, plan, context):
        lease = pod_lease(plan, context)
        monkeypatch.setattr(lease, "_renew_loop", lambda stop: None)
        now = [context.clock.boot_time()]
        monkeypatch.setattr(context.clock, "boot_time", lambda: now[0])
        token = lease.ensure()
        with monkeypatch.context() as outage:

            def refuse(*_: Any, **__: Any) -> Any:
                raise STORM

            outage.setattr(type(context.google), "upload", refuse)
            now[0] += 40 * 60
            with pytest.raises(GoogleError):
                lease.ensure()
            lease.raise_if_lost()
        assert lease.ensure() == token
        lease.release()


def test_reading_a_record_shows_a_spinner_that_ends_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPWAY_HOME", str(tmp_path))
    shown: list[str] = []

    @contextmanager
    def waiting() -> Iterator[Callable[[str], object]]:
        yield shown.append
        shown.append("not reached: the error passes through")

    options = RunOptions(run_id="quickstart-00000000", overrides=("cloud=here",), waiting=waiting)
    with pytest.raises(SlipwayError, match="quickstart-00000000"), open_session(options):
        pass
    assert shown == ["reading the record of quickstart-00000000"]

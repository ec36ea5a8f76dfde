"""The start of `up`: a bucket that answers nothing but 503 for a while, a run that somebody else has finished."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from controller.gcp.errors import GoogleError, NotFoundError
from controller.lease.lease import LeaseHeldError
from controller.lease.store import Identity, LeaseSnapshot
from controller.records import index
from controller.records.ledger import Ledger, Result
from controller.records.recorder import Recorder
from controller.records.spending import PodLifetime
from controller.run.attempt import AttemptResult, AttemptRunner
from controller.run.drive import RunDriver, drive
from controller.run.ending import Ending
from tests.controller.run.test_damaged_objects import HeardScreen, opened


def test_a_storm_at_the_start_is_waited_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path, monkeypatch) as (options, plan, context):
        done = Result(plan.run_id, "finished", 1, 2.0, 1.0)
        storm = GoogleError("storage objects.get_media", 503, "UNAVAILABLE", "backend error")
        answers: list[Any] = [storm, storm, storm]

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

"""The bucket does not answer while a run is driven: the controller waits for it, up to the bound."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from controller.core.errors import CloudError
from controller.gcp.client import GoogleClient
from controller.gcp.errors import GoogleError
from controller.lease.lease import Lease
from controller.records.ledger import Ledger
from controller.recovery.recover import RecoveryExecutor
from controller.recovery.verdict import AttemptOutcome, Verdict, VerdictKind
from controller.run.attempt import AttemptRunner
from controller.run.drive import drive
from tests.controller.gcp.test_retries import STORM
from tests.controller.recovery.test_policy import recovery as policy
from tests.controller.run.test_damaged_objects import HeardScreen, Scene, opened
from tests.controller.run.test_standby import Scene as StandbyScene
from tests.fakes.clock import ManualClock


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
    clock, said = ManualClock(), list[str]()
    config = SimpleNamespace(checkpoint=SimpleNamespace(max_outage_hours=hours), recovery=policy())
    plan: Any = SimpleNamespace(config=config, bucket="b", run_id="run-1")
    events = SimpleNamespace(note=lambda _, message: said.append(message))
    context: Any = SimpleNamespace(clock=clock, events=events)

    def held_back() -> int:
        raise STORM

    context.before_pod_write = held_back
    none = cast(Any, None)
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
    scene, looks = StandbyScene(None, result="the result"), 0
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
        from controller.lease.lease import pod_lease

        lease: Lease = pod_lease(plan, context)
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
        assert isinstance(context.google, GoogleClient) or context.google is not None
        lease.release()

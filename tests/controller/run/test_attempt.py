"""A question about another run may be moot when it is answered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from controller.core.errors import ConfigError
from controller.lease.lease import LeaseHeldError
from controller.lease.store import Identity, LeaseSnapshot
from controller.run import attempt
from controller.run.attempt import AttemptRunner


@pytest.mark.parametrize(("still_runs", "said"), [(True, "stopped q-1"), (False, "q-1 has ended meanwhile")])
def test_a_run_that_ended_while_the_question_stood_is_not_stopped(
    monkeypatch: pytest.MonkeyPatch, still_runs: bool, said: str
) -> None:
    seen = [{"q-1"}, {"q-1"} if still_runs else set()]
    stopped: list[str] = []
    notes: list[str] = []
    monkeypatch.setattr(attempt, "running_runs", lambda fleet: seen.pop(0))
    monkeypatch.setattr(attempt, "stop", lambda fleet, run: stopped.append(run))
    runner: Any = SimpleNamespace(
        plan=SimpleNamespace(run_id="q-2"),
        options=SimpleNamespace(yes=False),
        screen=SimpleNamespace(ask=lambda question, yes: True),
        _note=lambda message, **data: notes.append(message),
        _may_stop=None,
        _ask_to_stop=lambda other: None,
    )
    AttemptRunner._stop_leftover_program(runner, fleet=None)  # pyright: ignore[reportArgumentType]
    assert (stopped, notes) == (["q-1"] if still_runs else [], [said])


def test_a_busy_pod_is_said_before_anything_is_changed_there(monkeypatch: pytest.MonkeyPatch) -> None:
    node = SimpleNamespace(is_ready=True, accepts_our_key=lambda context: True, fleet=lambda context: None)
    monkeypatch.setattr(attempt, "Node", SimpleNamespace)
    monkeypatch.setattr(attempt, "running_runs", lambda fleet: {"q-1", "q-2"})
    answers, changed = [False, True], list[str]()

    class Runner(AttemptRunner):
        def __init__(self) -> None:
            self.plan: Any = SimpleNamespace(run_id="q-2", observe_pod=lambda context: node)
            self.context, self.options = cast(Any, None), cast(Any, SimpleNamespace(yes=False))
            self.screen = cast(Any, SimpleNamespace(ask=lambda question, yes: answers.pop(0)))

        def _reconcile(self) -> Any:
            changed.append("the pod")
            raise ConfigError("enough")

    with pytest.raises(ConfigError, match="the pod is busy with q-1; --queue waits for it"):
        Runner().provision()
    assert changed == []
    agreed = Runner()
    for _ in range(2):  # who agreed is not asked again
        with pytest.raises(ConfigError, match="enough"):
            agreed.provision()
    assert (changed, answers, agreed._may_stop) == (["the pod", "the pod"], [], {"q-1"})


@pytest.mark.parametrize("is_billed", [False, True])
def test_a_pod_that_another_controller_has_acquired_is_not_billed_to_this_run(
    monkeypatch: pytest.MonkeyPatch, is_billed: bool
) -> None:
    """Nothing had to be changed there, so nothing else has asked for the lease."""
    other = LeaseSnapshot(Identity("laptop", "q-1").new_record(1, 0.0, 60.0), 1, 0.0)
    billed = list[str]()

    def held() -> None:
        raise LeaseHeldError(other, "pod")

    class Runner(AttemptRunner):
        def __init__(self) -> None:
            self.plan = cast(Any, SimpleNamespace(run_id="q-2"))
            self.context = cast(Any, SimpleNamespace(before_pod_write=held))
            self.lease = cast(Any, SimpleNamespace(check=held))
            opening = {"open_billing": lambda node: billed.append("the pod"), "is_billed": lambda node: is_billed}
            self.spending = cast(Any, SimpleNamespace(**opening))

        def _reconcile(self) -> Any:
            return SimpleNamespace(fleet=lambda context: None)

    monkeypatch.setattr(attempt, "running_runs", lambda fleet: set())
    runner = Runner()
    runner._may_stop = set()
    with pytest.raises(LeaseHeldError, match="for q-1"):
        runner.provision()
    assert billed == []

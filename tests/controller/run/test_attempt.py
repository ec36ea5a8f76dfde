"""A question about another run may be moot when it is answered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

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
        _note=notes.append,
    )
    AttemptRunner._stop_leftover_program(runner, fleet=None)  # pyright: ignore[reportArgumentType]
    assert (stopped, notes) == (["q-1"] if still_runs else [], [said])

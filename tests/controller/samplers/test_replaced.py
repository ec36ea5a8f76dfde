"""Pods of samplers of a run that another one replaces."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from controller.core.clock import Clock
from controller.core.errors import CloudError, ConfigError
from controller.core.events import Events
from controller.samplers import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NOTHING = cast(Any, None)


@contextmanager
def replacing(monkeypatch: pytest.MonkeyPatch, end: Callable[..., list[str]]) -> Iterator[tuple[Events, list[str]]]:
    """Listen for runs that `new` replaces; yield the events, and the notes that appear."""
    events, notes = Events(Clock()), list[str]()
    events.add_listener(lambda event: notes.append(event.message))

    @contextmanager
    def opened(*_: object, **__: object) -> Iterator[tuple[Any, None]]:
        yield SimpleNamespace(), None

    monkeypatch.setattr(replaced, "open_context", opened)
    monkeypatch.setattr(replaced, "end_pods", end)
    monkeypatch.setattr(replaced.ReplacedRuns, "_plan_of", lambda self, run, context: f"plan of {run}")
    plan: Any = SimpleNamespace(run_id="new", config=None)
    with replaced.ReplacedRuns(plan, {"pod-sampler-1"}, cast(Any, SimpleNamespace(events=events))).ended_on_exit():
        yield events, notes


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


@pytest.mark.parametrize(
    ("loop", "pods"),
    [
        ({"kind": "grpo", "sampler": {"workers": 1, "pods": 2}}, True),
        ({"kind": "grpo"}, False),
        ({"kind": "lm"}, False),
        (None, False),
    ],
)
def test_a_record_of_an_older_version_without_such_pods_is_no_problem(loop: object, pods: bool) -> None:
    document: Any = {"config": {"cloud": {"kind": "local"}} | ({} if loop is None else {"loop": loop})}
    assert replaced._has_sampler_pods(document) == pods

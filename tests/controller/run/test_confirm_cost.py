"""What `up` asks before anything is billed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from controller.core.errors import ConfigError
from controller.core.finding import Finding
from controller.reconcile.resource import Absent
from controller.run import preview
from controller.run.preview import confirm_cost

CAUTION = "the original program never ends; native in its place: +experiment=trm_sudoku"


def confirm(answer: bool, caution: str | None = CAUTION, billed: bool = True, stand_in: bool = False) -> list[str]:
    """Confirm the cost of a run on a pod that exists already; return what was asked."""
    asked: list[str] = []

    def ask(question: str, yes: bool) -> bool:
        asked.append(question)
        return answer

    config = SimpleNamespace(program=SimpleNamespace(caution=caution), code=SimpleNamespace(stand_in=stand_in))
    plan: Any = SimpleNamespace(config=config, observe_pod=lambda context: object())
    context: Any = SimpleNamespace(is_billed=billed)
    screen: Any = SimpleNamespace(ask=ask)
    confirm_cost(plan, context, screen, yes=False)
    return asked


def test_a_program_that_is_known_not_to_finish_is_confirmed_even_on_a_pod_that_exists() -> None:
    assert confirm(True) == [f"{CAUTION}. Start it all the same?"]
    with pytest.raises(ConfigError, match=r"program\.caution: .*nothing was created; pass --yes"):
        confirm(False)


def test_a_warning_is_shown_before_the_pod_is_created_and_a_note_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [Finding("a", "note", "tpu.zone", "harmless"), Finding("b", "warning", "tpu.zone", "look here")]
    monkeypatch.setattr(preview, "probe_cloud", lambda config, context: found)
    monkeypatch.setattr(preview, "probe_plan", lambda plan, context: [])
    said: list[str] = []
    events = SimpleNamespace(note=lambda subject, message: said.append(message))
    config = SimpleNamespace(program=SimpleNamespace(caution=None), code=SimpleNamespace(stand_in=False))
    plan: Any = SimpleNamespace(config=config, observe_pod=lambda context: Absent(), run_id="r-1")
    context: Any = SimpleNamespace(is_billed=False, events=events)
    screen: Any = SimpleNamespace()
    confirm_cost(plan, context, screen, yes=False)
    assert said == ["warning: tpu.zone: look here"]


@pytest.mark.parametrize("how", [{"caution": None}, {"billed": False}, {"stand_in": True}])
def test_others_are_not_asked(how: dict[str, Any]) -> None:
    assert confirm(False, **how) == []

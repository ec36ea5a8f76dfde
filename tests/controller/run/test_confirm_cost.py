"""What `up` asks before anything is billed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from controller.core.errors import ConfigError
from controller.core.finding import Finding
from controller.gcp.prices import HourlyPrice
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

    config = SimpleNamespace(
        program=SimpleNamespace(kind="command", caution=caution), code=SimpleNamespace(stand_in=stand_in)
    )
    plan: Any = SimpleNamespace(config=config, observe_pod=lambda context: object(), node=None)
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
    config = SimpleNamespace(
        program=SimpleNamespace(kind="command", caution=None), code=SimpleNamespace(stand_in=False)
    )
    plan: Any = SimpleNamespace(config=config, observe_pod=lambda context: Absent(), run_id="r-1", node=None)
    context: Any = SimpleNamespace(is_billed=False, events=events)
    screen: Any = SimpleNamespace()
    confirm_cost(plan, context, screen, yes=False)
    assert said == ["warning: tpu.zone: look here"]


@pytest.mark.parametrize("how", [{"caution": None}, {"billed": False}, {"stand_in": True}])
def test_others_are_not_asked(how: dict[str, Any]) -> None:
    assert confirm(False, **how) == []


@pytest.mark.parametrize(
    ("absent", "said"),
    [((), ""), ((1,), "Create TPU 1 for $6.00 per hour"), ((0, 1, 2), "Create TPU 0 and 2 more pods for")],
)
def test_pods_of_samplers_are_confirmed_even_if_the_pod_exists(
    absent: tuple[int, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preview, "probe_cloud", lambda config, context: [])
    monkeypatch.setattr(preview, "probe_plan", lambda plan, context: [])
    monkeypatch.setattr(preview, "price_of_pods", lambda *_: HourlyPrice(6.0, 0.0, "list price"))
    monkeypatch.setattr(preview, "dearest_pod", lambda *_: HourlyPrice(2.0, 0.0, "list price"))
    monkeypatch.setattr(preview, "describe_estimate", lambda *_: "an hour")
    budget = SimpleNamespace(max_usd=None, max_hours=3.0)
    config = SimpleNamespace(
        program=SimpleNamespace(kind="trainer", caution=None), code=SimpleNamespace(stand_in=False), budget=budget
    )
    plans: list[Any] = [
        SimpleNamespace(
            config=config,
            run_id=f"r-{number}",
            node=SimpleNamespace(title=f"TPU {number}", adopt=False),
            observe_pod=lambda _, number=number: Absent() if number in absent else object(),
        )
        for number in range(3)
    ]
    monkeypatch.setattr(preview, "sampler_plans", lambda *_: tuple(plans[1:]))
    asked: list[str] = []
    context: Any = SimpleNamespace(is_billed=True, clock=SimpleNamespace(now=lambda: 0.0))
    screen: Any = SimpleNamespace(ask=lambda question, yes: asked.append(question) or True)
    confirm_cost(plans[0], context, screen, yes=False)
    assert len(asked) == bool(absent)
    assert all(question.startswith(said) and "at most $6.00 in 3 h" in question for question in asked)

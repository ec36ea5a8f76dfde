"""What `up` asks before anything is billed."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from controller.core.errors import ConfigError
from controller.core.finding import Finding
from controller.gcp.prices import HourlyPrice
from controller.reconcile.resource import Absent
from controller.run import preview
from controller.run.preview import confirm_cost
from tests.fakes.context import make_context

CAUTION = "the original program never ends; native in its place: +experiment=trm_sudoku"


def planned(number: int = 0, exists: bool = True, caution: str | None = None, stand_in: bool = False) -> Any:
    program, code = SimpleNamespace(kind="command", caution=caution), SimpleNamespace(stand_in=stand_in)
    config = SimpleNamespace(program=program, code=code, budget=SimpleNamespace(max_usd=None, max_hours=3.0))
    node, pod = SimpleNamespace(title=f"TPU {number}", adopt=False), object() if exists else Absent()
    return SimpleNamespace(config=config, observe_pod=lambda _: pod, node=node, run_id=f"r-{number}")


def confirm(plan: Any, answer: bool = True, billed: bool = True, said: list[str] | None = None) -> list[str]:
    """Confirm the cost of a run; return what was asked."""
    asked: list[str] = []

    def ask(question: str, yes: bool) -> bool:
        asked.append(question)
        return answer

    context = make_context(SimpleNamespace(), notes=said)
    context.is_billed = billed
    confirm_cost(plan, context, cast(Any, SimpleNamespace(ask=ask)), yes=False)
    return asked


def test_a_program_that_is_known_not_to_finish_is_confirmed_even_on_a_pod_that_exists() -> None:
    assert confirm(planned(caution=CAUTION)) == [f"{CAUTION}. Start it all the same?"]
    with pytest.raises(ConfigError, match=r"program\.caution: .*nothing was created; pass --yes"):
        confirm(planned(caution=CAUTION), answer=False)


@pytest.mark.parametrize(
    ("caution", "billed", "stand_in"), [(None, True, False), (CAUTION, False, False), (CAUTION, True, True)]
)
def test_others_are_not_asked(caution: str | None, billed: bool, stand_in: bool) -> None:
    assert confirm(planned(caution=caution, stand_in=stand_in), billed=billed) == []


@pytest.fixture
def findings(monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    found: list[Finding] = []
    monkeypatch.setattr(preview, "probe_cloud", lambda *_: found)
    monkeypatch.setattr(preview, "probe_plan", lambda *_: [])
    return found


def test_a_warning_is_shown_before_the_pod_is_created_and_a_note_is_not(findings: list[Finding]) -> None:
    findings += [Finding("a", "note", "tpu.zone", "harmless"), Finding("b", "warning", "tpu.zone", "look here")]
    said: list[str] = []
    confirm(planned(exists=False), billed=False, said=said)
    assert said == ["warning: tpu.zone: look here"]


@pytest.mark.parametrize(
    ("absent", "said"),
    [((), ""), ((1,), "Create TPU 1 for $6.00 per hour"), ((0, 1, 2), "Create TPU 0 and 2 more pods for")],
)
@pytest.mark.usefixtures("findings")
def test_pods_of_samplers_are_confirmed_too(
    absent: tuple[int, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preview, "price_of_pods", lambda *_: HourlyPrice(6.0, 0.0, "list price"))
    monkeypatch.setattr(preview, "dearest_pod", lambda *_: HourlyPrice(2.0, 0.0, "list price"))
    monkeypatch.setattr(preview, "describe_estimate", lambda *_: "an hour")
    plan, *others = (planned(number, exists=number not in absent) for number in range(3))
    monkeypatch.setattr(preview, "sampler_plans", lambda *_: tuple(others))
    asked = confirm(plan)
    assert len(asked) == bool(absent)
    assert all(question.startswith(said) and "at most $6.00 in 3 h" in question for question in asked)

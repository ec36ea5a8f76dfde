"""What a sweep asks before anything is billed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from controller.core.errors import ConfigError
from controller.run.options import RunOptions
from controller.sweep import drive
from controller.sweep.definition import SweepDefinition, SweepJob
from controller.sweep.session import SweepSession

CAUTION = "the original program never ends; native in its place: +experiment=trm_sudoku"


def session(*cautions: str | None, stand_in: bool = False, finished: tuple[str, ...] = ()) -> SweepSession:
    """A sweep of runs r0, r1 … with these values of program.caution."""
    code, base = SimpleNamespace(stand_in=stand_in), SimpleNamespace(sweep=SimpleNamespace(search=None))
    configs: list[Any] = [SimpleNamespace(code=code, program=SimpleNamespace(caution=text)) for text in cautions]
    variant: Any = None
    jobs = tuple(SweepJob(variant, config, f"r{i}") for i, config in enumerate(configs))
    billed: Any = SimpleNamespace(is_billed=True)
    definition: Any = SimpleNamespace(base_config=base, sweep=base.sweep, jobs=jobs, space=None)
    assert SweepDefinition.__dataclass_fields__.keys() >= {"jobs", "space"}
    return SweepSession(definition, billed, "bucket", set(finished), {})


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The questions of a sweep; each is answered with yes, except the second."""
    found: list[str] = []

    def confirm(question: str) -> bool:
        found.append(question)
        return len(found) != 2

    monkeypatch.setattr(drive, "confirm", confirm)
    return found


def test_runs_that_are_known_not_to_finish_are_confirmed_once(asked: list[str]) -> None:
    with pytest.raises(ConfigError, match="nothing was created; pass --yes to skip the prompt"):
        drive.confirm_cost(session(CAUTION, CAUTION, None), RunOptions([]))
    assert asked == [f"{CAUTION}. Start such runs all the same?", "Start 3 runs?"]


def test_each_reason_is_a_question_and_no_ends_it(asked: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"program\.caution: it forgets; nothing was created"):
        drive.confirm_cost(session(CAUTION, "it forgets"), RunOptions([]))
    assert len(asked) == 2


def test_json_cannot_ask() -> None:
    with pytest.raises(ConfigError, match=r"program\.caution: .*pass --yes to start such runs"):
        drive.confirm_cost(session(CAUTION), RunOptions([], json=True))
    drive.confirm_cost(session(CAUTION), RunOptions([], json=True, yes=True))


@pytest.mark.parametrize("without", [{"stand_in": True}, {"finished": ("r0",)}])
def test_stand_ins_and_finished_runs_need_no_caution(asked: list[str], without: dict[str, Any]) -> None:
    drive.confirm_cost(session(CAUTION, None, **without), RunOptions([]))
    assert [question[:5] for question in asked] == ["Start"]

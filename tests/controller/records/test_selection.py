"""Which runs a verb means."""

from __future__ import annotations

import pytest

from controller.core.errors import ConfigError
from controller.records.selection import select_runs

ROWS = [
    {"run": "q-1", "sweep": "q-aaaa", "name": "q", "overrides": ["sweep=seeds"]},
    {"run": "q-2", "sweep": "q-bbbb", "name": "q", "overrides": ["++sweep=seeds"]},
    {"run": "q-3", "sweep": "q-cccc", "name": "q", "overrides": []},
    {"run": "../../etc", "sweep": "../q", "name": "q", "overrides": []},
]


def names(**asked: object) -> tuple[str, list[str]]:
    name, rows = select_runs(ROWS, **asked)  # pyright: ignore[reportArgumentType]
    return name, [row["run"] for row in rows]


def test_by_id_by_name_and_the_newest() -> None:
    assert names(sweep="q-aaaa") == ("q-aaaa", ["q-1"])
    assert names(sweep="seeds") == ("q-bbbb", ["q-2"])
    assert names(sweep="q") == ("q-cccc", ["q-3"])
    assert names() == ("q-cccc", ["q-3"])
    assert names(runs=["q-2", "q-1"]) == ("runs", ["q-1", "q-2"])
    assert names(runs=["q-2"]) == ("q-2", ["q-2"])
    assert names(where=["name=q"], last=2) == ("runs", ["q-2", "q-3"])


def test_the_newest_run_is_none_of_samplers() -> None:
    samplers = {"run": "q-4-sampler-1", "sweep": "", "name": "q", "overrides": [], "samples_for": "q-4"}
    trainer = {"run": "q-4", "sweep": "", "name": "q", "overrides": []}
    assert select_runs([*ROWS, trainer, samplers])[0] == "q-4"
    assert select_runs([samplers])[0] == "q-4-sampler-1"
    assert select_runs([*ROWS, trainer, samplers], ["q-4-sampler-1"])[0] == "q-4-sampler-1"


def test_a_sweep_has_runs_that_an_earlier_one_made() -> None:
    boards = {"q-dddd": ["q-1", "q-3", "q-9"]}
    assert names(sweep="q-dddd", boards=boards) == ("q-dddd", ["q-1", "q-3"])
    assert names(sweep="q-aaaa", boards=boards) == ("q-aaaa", ["q-1"])


def test_what_is_no_id_is_no_run() -> None:
    with pytest.raises(ConfigError, match="no such run"):
        select_runs(ROWS, ["../../etc"])
    with pytest.raises(ConfigError, match="no such sweep"):
        select_runs(ROWS, sweep="../q")

"""A mapping that names another kind replaces the mapping: on the command line, in files of groups and experiments."""

from __future__ import annotations

from pathlib import Path

import pytest

from conf.schema.training.schedule import ConstantSchedule, DecaySchedule
from controller.config.compose import compose, compose_raw, compose_variants, with_overrides

LINEAR = {"kind": "linear", "warmup_steps": 5, "horizon_steps": 80, "final_fraction": 0.1}
KEY = "optimizer.schedule"
CONSTANT = "{kind: constant, warmup_steps: 1}"


def schedule(*words: str, folder: Path | None = None) -> dict[str, object]:
    return compose_raw(["+experiment=quickstart", *words], extra_dir=folder)["optimizer"]["schedule"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], LINEAR),
        ([f"{KEY}={CONSTANT}"], {"kind": "constant", "warmup_steps": 1}),
        ([f"+{KEY}={CONSTANT}"], {"kind": "constant", "warmup_steps": 1}),
        (
            [f"{KEY}={CONSTANT}", "optimizer.schedule.warmup_steps=3"],
            {"kind": "constant", "warmup_steps": 3},
        ),
        (
            ["optimizer.schedule.warmup_steps=3", f"{KEY}={CONSTANT}"],
            {"kind": "constant", "warmup_steps": 1},
        ),
        (["optimizer.schedule={kind: linear, warmup_steps: 1}"], LINEAR | {"warmup_steps": 1}),
        (["optimizer.schedule={warmup_steps: 1}"], LINEAR | {"warmup_steps": 1}),
        (["optimizer.schedule.kind=constant"], LINEAR | {"kind": "constant"}),
        (["~optimizer.schedule.horizon_steps"], {k: v for k, v in LINEAR.items() if k != "horizon_steps"}),
    ],
)
@pytest.mark.usefixtures("composed_by_hydra")
def test_the_command_line_replaces(words: list[str], expected: dict[str, object]) -> None:
    assert schedule(*words) == expected


def test_a_planned_file_and_a_sweep_replace_too() -> None:
    whole = compose_raw(["+experiment=quickstart"])
    assert with_overrides(whole, [f"{KEY}={CONSTANT}"])["optimizer"]["schedule"] == {
        "kind": "constant", "warmup_steps": 1,
    }  # fmt: skip
    cases = [["+experiment=quickstart", *case] for case in ([f"{KEY}={CONSTANT}"], [])]
    found = [config.optimizer.schedule for config, _ in compose_variants(cases) if config and config.optimizer]
    assert [*map(type, found)] == [ConstantSchedule, DecaySchedule]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The user's own folder: a group built on a bundled one, and three experiments that build on each other."""
    files = {
        "optimizer/mine.yaml": "defaults: [muon]\n"
        "schedule: {kind: linear, warmup_steps: 2, horizon_steps: 9, final_fraction: 0}\n",
        "experiment/base.yaml": "defaults: [quickstart, {override /optimizer: mine}, _self_]\n"
        "optimizer: {schedule: {warmup_steps: 3}}\n",
        "experiment/other.yaml": f"defaults: [base, _self_]\noptimizer: {{schedule: {CONSTANT}}}\n",
        "experiment/more.yaml": "defaults: [other, _self_]\noptimizer: {schedule: {warmup_steps: 4}}\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("# @package _global_\n" * name.startswith("experiment") + text)
    return tmp_path


@pytest.mark.usefixtures("composed_by_hydra")
def test_files_replace_in_their_order(folder: Path) -> None:
    expected = {
        "base": LINEAR,  # quickstart's own values come after those of the optimizer's file
        "other": {"kind": "constant", "warmup_steps": 1},
        "more": {"kind": "constant", "warmup_steps": 4},
    }
    for name, values in expected.items():
        found = compose_raw([f"+experiment={name}"], extra_dir=folder)
        assert found["optimizer"]["schedule"] == values | ({"warmup_steps": 3} if name == "base" else {}), name
    words = ["program=trainer", "optimizer=mine"]
    assert compose_raw(words, extra_dir=folder)["optimizer"]["schedule"]["horizon_steps"] == 9


def test_a_section_is_chosen_as_a_group_and_keeps_what_it_builds_on() -> None:
    assert compose_raw(["cloud=local", "program=command"])["cloud"]["apis"]
    _, problems = compose(["+experiment=quickstart", "optimizer.kind=lion"])
    assert "optimizer.b2: belongs" not in " ".join(map(str, problems)), "lion has it"
    assert "another kind of this section; choose its group (optimizer=…)" in " ".join(map(str, problems))


def test_a_kind_alone_is_told_how_to_replace_the_mapping() -> None:
    _, problems = compose(["+experiment=quickstart", "optimizer.schedule.kind=constant"])
    assert [str(problem) for problem in problems] == [
        f"optimizer.schedule.{key}: belongs to another kind of this section; set the section whole "
        f"(optimizer.schedule={{kind: …}}), or remove the key (~optimizer.schedule.{key})"
        for key in ("horizon_steps", "final_fraction")
    ]

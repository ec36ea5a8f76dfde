"""Validation reports every error at once, each with its key and a suggestion."""

from __future__ import annotations

from conf.schema.validation import validate
from controller.config.compose import compose, compose_raw
from tests.conf.schema.test_config import TINY, config


def words(*overrides: str) -> list[str]:
    return [str(problem) for problem in compose([*TINY, *overrides])[1]]


def test_a_typo_names_the_right_key() -> None:
    assert words("tpu.acelerator_type=v4-8") == ["tpu.acelerator_type: unknown key; did you mean tpu.accelerator_type?"]


def test_a_typo_inside_a_tagged_section_names_the_right_key() -> None:
    assert words("loop.stepz=3") == ["loop.stepz: unknown key; did you mean loop.steps?"]


def test_every_error_comes_at_once() -> None:
    found = words("loop.steps=-1", "run.seed=-2", "tpu.accelerator_type=v5litepod-17", "modle.dim=3")
    assert [line.partition(":")[0] for line in found] == ["tpu.accelerator_type", "loop.steps", "run.seed", "modle"]
    assert "v5litepod-16" in found[0]
    assert "(got -1)" in found[1]


def test_unknown_keys_do_not_hide_the_config() -> None:
    found, problems = validate({**compose_raw(TINY), "colour": "red"})
    assert found is not None
    assert [p.key for p in problems] == ["colour"]


def test_a_rule_of_a_section_names_its_keys_and_does_not_show_all_others() -> None:
    problems = [*compose(["+experiment=trm_sudoku", "loop.steps=100"])[1], *words("data.prompt.answer='{a.b}'")]
    assert [line.partition(": ")[2] for line in map(str, problems)] == [
        "steps: 50000 epochs are 65104 updates; set either epochs or steps to null",
        "answer: {…} must contain only a column name; write {{ for a literal brace",
    ]


def test_a_nul_is_refused_and_named() -> None:
    config, problems = validate(
        compose_raw(["program=command", "program.command=[a]"]) | {"env": {"vars": {"A\0": "b", "C": "d\0"}}}
    )
    assert config is None
    assert [p.key for p in problems] == ["env.vars.A\0", "env.vars.C"]
    assert "NUL" in problems[0].message


def test_a_long_value_is_shown_in_part() -> None:
    [problem] = validate(compose_raw(["program=command", "program.command=[a]"]) | {"code": "x" * 100_000})[1]
    assert len(str(problem)) < 1000
    assert "(100002 characters)" in problem.message


def test_a_python_that_is_a_number_asks_for_quotes() -> None:
    [said] = words("env.python=3.10")
    assert said.startswith("env.python: must be quoted, because YAML reads 3.10 as 3.1")
    assert config('env.python="3.12"').env.python == "3.12"

"""Text stays as it was written for every key that takes text, in YAML and on the command line; numbers stay numbers."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from conf.schema.run_sections import Sweep
from conf.schema.text_keys import is_text
from controller.config.compose import compose, compose_variants
from controller.config.texts import quote_numbers, restore_texts
from controller.core.errors import ConfigError
from controller.sweep.grid import expand_grid
from tests.composed import config_of, problems_of
from tests.conf.schema.test_text_keys import TEXT_KEYS

FORMS = [
    "3.10", "no", "on", "12:30", "12:30:00", "007", "1_000", "1E5", "0x1F", "True", "false", "+5", ".5", "5.", "0b11",
    "1e5", "off", "Yes", "-0", ".inf", "nan", "190:20:30.15", "1",
]  # fmt: skip
"""What YAML 1.1 or Hydra's grammar takes for a number or a boolean, or may."""
NUMBERED = [(path, form) for path, form in zip(TEXT_KEYS * 2, itertools.cycle(FORMS), strict=False)]
COMMAND = ["program=command", "program.command=[a]"]


def nested(path: tuple[str, ...], leaf: str, braces: tuple[str, str]) -> str:
    """The leaf inside lists and mappings, in a grammar that YAML's flow style and Hydra share."""
    for part in reversed(path):
        leaf = f"[{leaf}]" if part.isdigit() else f"{braces[0]}{part}: {leaf}{braces[1]}"
    return leaf


def at(value: Any, path: tuple[str, ...]) -> Any:
    for part in path:
        value = value[0] if part.isdigit() else value[part]
    return value


def test_every_text_of_a_file_is_as_written(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    changed = 0
    for path, form in NUMBERED:
        file.write_text(nested(path, form, ("{", "}")))
        config = OmegaConf.load(file)
        changed += at(config, path) != form
        restore_texts(config, OmegaConf.to_container(config), file, "")
        assert at(config, path) == form, path
    assert changed > len(NUMBERED) / 2


@pytest.mark.parametrize("split", [1, 2, 9])
def test_every_text_of_the_command_line_is_as_written(split: int) -> None:
    """Whether the key is written in full or a section of it is set as a mapping."""
    parse = OverridesParser.create().parse_override
    for path, form in NUMBERED:
        plain = itertools.takewhile(lambda part: not part.isdigit(), path[:split])
        key = ".".join(plain)
        depth = key.count(".") + 1
        word = f"{key}={nested(path[depth:], form, ('{', '}'))}"
        if depth > 1 or len(path) > 1:
            assert at(parse(quote_numbers(word)).value(), path[depth:]) == form, word


@pytest.mark.parametrize(
    ("word", "quoted"),
    [
        ("run.seed=1_0", None),
        ("env={vars: {A: 3.10}, min_free_gb: 3.10}", 'env={vars: {A: "3.10"}, min_free_gb: 3.10}'),
        ("program.command=[python, 'x 1', \"2\", 3, a 4]", 'program.command=[python, \'x 1\', "2", "3", a 4]'),
        ("program.command=[a, ${run.name}, 3]", 'program.command=[a, ${run.name}, "3"]'),
        (r"env.vars.A=\,1", None),
        ("env.vars.A=1.0,2", 'env.vars.A="1.0","2"'),
        ("env.vars.A=choice(1.0, 2)", 'env.vars.A=choice("1.0", "2")'),
        ("env.vars.A=shuffle(1.0, 2)", 'env.vars.A=shuffle("1.0", "2")'),
        ("env.python=sort(3.10,3.9,reverse=true)", 'env.python=sort("3.10","3.9",reverse=true)'),
        ("env.python=shuffle(choice(3.10,3.12))", 'env.python=shuffle(choice("3.10","3.12"))'),
        ("env.vars.A=shuffle(range(1,3))", None),
        ("run.seed=shuffle(1_0,2)", None),
        ("env.vars.A=range(1,3)", None),
        ("env.vars.A=", None),
        ("env.vars={A: [1", None),
        ("~env.vars.A", None),
        ("tpu=1", 'tpu="1"'),
        ("model@loop.teacher=1e5", 'model@loop.teacher="1e5"'),
    ],
)
def test_only_numbers_in_the_place_of_text_are_quoted(word: str, quoted: str | None) -> None:
    assert quote_numbers(word) == (quoted or word)


@pytest.mark.parametrize(
    ("section", "form", "said"),
    [
        (
            "budget: {max_hours: %s}",
            "1:30",
            r"budget\.max_hours: YAML reads 1:30 as 90; write the number that is meant",
        ),
        ("budget: {max_usd: %s}", "-1:30.5", r"budget\.max_usd: YAML reads -1:30\.5 as -90\.5"),
        ("run: {seed: %s}", "010", r"run\.seed: YAML reads 010 as 8"),
        ("run: {seed: %s}", "0_17", r"run\.seed: YAML reads 0_17 as 15"),
        ("run: {seed: %s}", "007", None),
        ("run: {seed: %s}", "0x1F", None),
        ("run: {seed: %s}", "1_0", None),
        ("run: {seed: %s}", "0_", None),
        ("run: {name: t, seed: 1} # 12:30, %s", "010", None),
        ("run: {name: %s}", "010", None),
    ],
)
def test_a_number_of_a_file_means_what_people_read(section: str, form: str, said: str | None, tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{section % form}\n")
    words = [*COMMAND, "+experiment=mine"]
    if said is None:
        assert compose(words, extra_dir=tmp_path)[1] == []
    else:
        with pytest.raises(ConfigError, match=rf"^\S+/experiment/mine\.yaml, line 2: {said}"):
            compose(words, extra_dir=tmp_path)


def test_a_file_and_the_command_line_reach_the_config(tmp_path: Path) -> None:
    written = dict(zip((f"V_{number}" for number in range(len(FORMS))), FORMS, strict=True))
    lines = "".join(f"    {name}: {form}\n" for name, form in written.items())
    (tmp_path / "experiment").mkdir()
    (tmp_path / "tpu").mkdir()
    (tmp_path / "tpu" / "mine.yaml").write_text("defaults: [v5litepod_16]\nruntime_version: 1.10\n")
    (tmp_path / "experiment" / "vals.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /program: command\n  - _self_\n"
        "run: {name: vals}\nprogram: {command: &words [python, 3.10, 007]}\n"
        f"env:\n  vars:\n    <<: {{M: 1_1, SEED: '${{run.seed}}'}}\n{lines}"
    )
    config = config_of("+experiment=vals", "env.vars.V_0=1.10", "env.python=3.10", "run.seed=1_0", folder=tmp_path)
    assert config.env.vars == {"M": "1_1", "SEED": "10", **written, "V_0": "1.10"}
    assert config.program.command == ("python", "3.10", "007")
    assert (config.env.python, config.run.seed) == ("3.10", 10)
    for name in ("vals", "vals.yaml"):
        assert config_of(f"+experiment={name}", folder=tmp_path).env.vars["V_0"] == "3.10"
    assert config_of("+experiment=vals", "tpu=mine", folder=tmp_path).tpu.runtime_version == "1.10"
    assert problems_of("+experiment=vals", "run.name=1.10", folder=tmp_path)[0].startswith(
        "run.name: '1.10' is invalid"
    )


def test_the_bundled_files_hold_no_number_in_the_place_of_text() -> None:
    """So that composing them reads no file twice."""
    from controller.config.compose import CONFIG_DIR
    from controller.config.texts import _unquoted

    for file in CONFIG_DIR.glob("*/*.yaml"):
        data = yaml.safe_load(file.read_text())
        inside = data if "@package _global_" in file.read_text() else {file.parent.name: data}
        assert [path for path, _ in _unquoted(inside, ()) if is_text(tuple(map(str, path)))] == [], file


def test_a_sweep_keeps_texts_too() -> None:
    words = [*COMMAND, "env.vars.A=3.10,3.1,true", "env.vars.B=choice(007,1_0)", "run.seed=1_0,2"]
    nothing = Sweep.model_validate(
        {"pods": 1, "on_failure": "retry", "retries": 1, "params": {}, "cases": {}, "search": None}
    )
    found = expand_grid(words, nothing, Path("/nowhere"))
    assert found[0].title == "env.vars.A=3.10 env.vars.B=007 run.seed=10"
    configs = [config for config, _ in compose_variants([variant.overrides for variant in found])]
    assert {(c.env.vars["A"], c.env.vars["B"]) for c in configs if c is not None} == {
        *itertools.product(("3.10", "3.1", "true"), ("007", "1_0"))
    }


def test_a_number_with_thousands_of_digits_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"run\.seed"):
        compose([*COMMAND, f"run.seed={'9' * 5000}"])

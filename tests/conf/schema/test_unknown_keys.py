"""Unknown keys: what they are taken for, by name and value, in the words of other tools too."""

import pytest

from conf.schema.unknown_keys import unknown_key
from conf.schema.validation import validate
from controller.config.compose import compose_raw
from controller.core.errors import ConfigError
from tests.composed import problems_of
from tests.conf.schema.test_config import TINY, config


def test_unknown_keys_do_not_hide_the_config() -> None:
    found, problems = validate({**compose_raw(TINY), "colour": "red"})
    assert found is not None
    assert [p.key for p in problems] == ["colour"]
    assert config('env.python="3.12"').env.python == "3.12"


def test_a_key_that_is_misspelt_is_not_missing_too() -> None:
    said = problems_of(*TINY, "model.lora={rank: 8, alpha: 8}")
    assert said[0] == "model.lora.rank: unknown key; did you mean model.lora.r?"
    assert said[-1] == "model.lora: lacks target_modules; set model.lora.target_modules=… too"


@pytest.mark.parametrize(
    ("key", "meant"), [("optimiser", "optimizer"), ("cleanups", "cleanup"), ("loop.stepz", "loop.steps")]
)
def test_a_section_that_is_misspelt_is_named_as_keys_are(key: str, meant: str) -> None:
    assert unknown_key(compose_raw(TINY), key.split("."), {}) == f"unknown key; did you mean {meant}?"


@pytest.mark.parametrize(
    ("key", "given", "said"),
    [
        ("model.activation", "swiglu", "did you mean model.mlp?"),
        ("model.activation", "bfloat16", "did you mean model.activation_dtype?"),
        ("cleanup.mode", "keep", "did you mean cleanup.on_failure or cleanup.on_success?"),
        ("loop.stepz", "ten", "did you mean loop.steps?"),
        ("model.zzz", 1, "`slipway help model` lists them"),
        ("run.zzz", 1, "choices: compile_cache, name, seed, state_dir"),
        ("checkpoint.resume", True, "the same command again resumes a run, from its last checkpoint"),
        ("training", {"max_steps": 3, "lr": 1}, "did you mean loop.steps or optimizer.lr?"),
    ],
)
def test_an_unknown_key_is_meant_by_its_name_and_its_value(key: str, given: object, said: str) -> None:
    assert unknown_key(compose_raw(TINY), key.split("."), given) == f"unknown key; {said}"


@pytest.mark.parametrize(
    ("word", "said"),
    [
        (
            "tpu.fallback_zones=all",
            "must be a list of words, not 'all'; did you mean 'tpu.fallback_zones=[all]'? Then 'all' is inva",
        ),
        ("tpu.fallback_zones=us-east5-a", "must be a list of words, not 'us-east5-a'; did you mean 'tpu.fallback_z"),
        (
            "loop.rewards=exact",
            "must be a mapping {NAME: NUMBER, …}, not 'exact'; did you mean 'loop.rewards={exact: 1.0}'? Then unknown",
        ),
        ("loop.rewards=format", "must be a mapping {NAME: NUMBER, …}, not 'format'; did you mean 'loop.rewards={for"),
        (
            "code.repository=me/repo",
            "is a section with keys, not 'me/repo'; set one of them, such as code.repository.u",
        ),
        ("optimizer.schedule=warmup", "is a section with keys, not 'warmup'; set optimizer.schedule.kind=constant, "),
        ("optimizer.schedule=[0,1]", "must be a section with its kind and keys"),
    ],
)
def test_what_is_proposed_is_accepted(word: str, said: str) -> None:
    try:
        found = problems_of("+experiment=quickstart", word)
    except ConfigError as error:  # where Hydra refuses it already
        found = error.problems
    assert found[0].startswith(f"{word.partition('=')[0]}: {said}")


@pytest.mark.parametrize(
    ("word", "on"),
    [
        ("true", 1),
        ("yes", 1),
        ("On", 1),
        ("{}", 1),
        ("{mode: offline}", 1),
        ("false", 0),
        ("no", 0),
        ("off", 0),
        ("null", 0),
    ],
)
def test_wandb_is_switched_in_every_spelling(word: str, on: int) -> None:
    assert (config(*TINY, f"logging.wandb={word}").logging.wandb is not None) == on

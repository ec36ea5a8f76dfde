"""Unknown keys: what they are taken for, by name and value, in the words of other tools too."""

import pytest

from conf.schema.forms import misspelled
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
        ("tpu.spot", False, "did you mean tpu.capacity=on_demand?"),
        ("tpu.spot", True, "did you mean tpu.capacity=spot?"),
        (
            "env.WANDB_PROJECT",
            "x",
            "did you mean env.vars.WANDB_PROJECT, or env.secrets.WANDB_PROJECT, whi",
        ),
        ("ssh.timeout", 30, "did you mean ssh.connect_timeout_seconds or ssh.ready_timeout_seconds?"),
        ("optimizer.type", "AdamW", "did you mean optimizer.kind?"),
        ("loop.maxNewTokens", 9, "did you mean loop.max_new_tokens?"),
        ("model.dimension", 256, "did you mean model.dim?"),
        ("model.normalization", "rms", "did you mean model.norm?"),
        ("data.seq_len", 128, "did you mean loop.max_new_tokens or loop.max_prompt_length?"),
        ("data.num_workers", 4, "choices: bos, chat_template, chat_template_kwargs, eos, kind, largest_first"),
        ("data.dataset", "gsm8k", "a file of the group is chosen: data=gsm8k, in a file `override /data: gsm8k`"),
        ("dataset_name", "gsm8k", "a file of the group is chosen: data=gsm8k, in a file `override /data: gsm8k`"),
        ("lora_target_modules", ["x"], "did you mean model.lora.target_modules?"),
        ("service", {"replicas": 2, "type": "x"}, "did you mean mesh.data?"),
        ("cleanup.keep", True, "did you mean cleanup.on_failure=keep or cleanup.on_success=keep?"),
        ("tpu.count", 2, "choices: accelerator_type, adopt, boot_disk_gb"),
        ("tpu.generation", "v6e", "choices: accelerator_type, adopt, boot_disk_gb"),
        ("data.file", "x.jsonl", "choices: bos, chat_template"),
        ("envs", {"A": "1"}, "did you mean env.vars?"),
        ("code.include", "src", "choices: checks, exclude, max_mb, modules, repository, resources, stand_in"),
        ("ssh.port", 22, "choices: connect_timeout_seconds, host_keys, method, os_login, ready_timeout_seconds, user"),
        (
            "model.size",
            "2b",
            "a file of the group is chosen: model=NAME, in a file `override /model: NAME` in `defaults`",
        ),
        ("script", "train.py", "did you mean `slipway run -- python train.py`?"),
        ("training", {"max_steps": 3, "lr": 1}, "did you mean loop.steps or optimizer.lr?"),
    ],
)
def test_an_unknown_key_is_meant_by_its_name_and_its_value(key: str, given: object, said: str) -> None:
    assert unknown_key(compose_raw(TINY), key.split("."), given).startswith(f"unknown key; {said}")


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
    ("word", "name", "is_meant"),
    [
        ("stepz", "steps", True),
        ("temprature", "temperature", True),
        ("maxsteps", "max_steps", True),
        ("num_layer", "num_layers", True),
        ("disk_gb", "boot_disk_gb", True),
        ("boot_disk_size_gb", "boot_disk_gb", True),
        ("--folow", "--follow", True),
        ("include", "exclude", False),
        ("min_hours", "max_hours", False),
        ("autoscale", "scale", False),
        ("size", "vocab_size", False),
        ("idle_hours", "idle_minutes", False),
        ("nonsense_word", "open_to_world", False),
    ],
)
def test_a_misspelling_is_no_other_word(word: str, name: str, is_meant: bool) -> None:
    assert misspelled(word, [name]) == [name] * is_meant


@pytest.mark.parametrize("word", ["unlimited", "inf", "Infinite", "none", "never", "-1"])
@pytest.mark.parametrize("key", ["budget.max_usd", "tpu.max_run_hours", "cleanup.idle_minutes"])
def test_no_limit_is_null(key: str, word: str) -> None:
    [said] = problems_of(*TINY, f"{key}={word}")
    assert said.startswith((f"{key}: must be a number, not ", f"{key}: input should be greater"))
    assert said.endswith(f"; did you mean {key}=null?")


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


def test_a_key_leads_to_that_of_the_kind_of_the_config() -> None:
    lm = compose_raw(["loop=lm", "data=text", "model=tiny", "optimizer=adamw", "cloud=local", "data.path=x"])
    assert unknown_key(lm, ["data", "seq_len"], 128) == "unknown key; did you mean loop.seq_len?"
    puzzle = compose_raw(["+experiment=trm_sudoku"])
    assert unknown_key(puzzle, ["data", "seq_len"], 81) == "unknown key; did you mean model.seq_len?"
    for key in (["optimizer", "T_max"], ["lr_decay_iters"]):
        meant = unknown_key(compose_raw(["+experiment=quickstart"]), key, 9)
        assert meant == "unknown key; did you mean optimizer.schedule.horizon_steps?"
    [said] = problems_of("+experiment=quickstart", "optimizer.schedule.decay_steps=100")
    assert "did you mean optimizer.schedule.horizon_steps? Else set the section whole" in said


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("checkpoint.save_interval=10m", "must be a whole number, not '10m'; updates between checkpoints"),
        ("checkpoint.save_interval=30min", "must be a whole number, not '30min'; updates between checkpoints"),
        ("loop.steps=10M", "must be a whole number, not '10M'; did you mean 'loop.steps=10000000'?"),
    ],
)
def test_a_number_with_a_unit_is_told_what_is_counted(word: str, said: str) -> None:
    assert problems_of("+experiment=quickstart", word) == [f"{word.partition('=')[0]}: {said}"]

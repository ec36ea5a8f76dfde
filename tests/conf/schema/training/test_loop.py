"""Rows, accumulation, rewards and losses of a loop; run.yaml: one message that names every wrong key."""

from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from conf.formats import RunFileError, attempt_token
from conf.schema.training.loop import REWARDS, GrpoLoop, LmLoop, UnevenError
from conf.schema.training.loop_parts import Sampling
from conf.schema.training.run_yaml import RunFile, load
from tests.groups import load_group
from tests.paths import ROOT

UNFILTERED = {"filter_zero_variance_groups": False}
TOKENS, ROWS = "loop.total_batch_tokens", "loop.micro_batch_size"


def loop(tokens: int, seq_len: int, micro_batch_size: int | None) -> LmLoop:
    lengths = {"total_batch_tokens": tokens, "seq_len": seq_len, "micro_batch_size": micro_batch_size}
    return LmLoop(**load_group("loop/lm") | lengths)


@pytest.mark.parametrize(
    ("seq_len", "micro_batch_size", "devices", "accumulation"),
    [
        (1024, 8, 8, 8),  # nanochat on v5litepod-8
        (2048, 8, 4, 8),  # and on v6e-4
        (1024, None, 8, 1),
        (1024, 8, 64, 1),
        (1024, 8, 256, 1),  # a device has 2 rows: fewer than it may compute at a time
    ],
)
def test_accumulation_of_half_a_million_tokens(seq_len, micro_batch_size, devices, accumulation):
    assert loop(524_288, seq_len, micro_batch_size).accumulation(devices) == accumulation


@pytest.mark.parametrize(
    ("micro_batch_size", "devices", "key", "words"),
    [
        (None, 6, TOKENS, "32 rows of 64 tokens cannot be split evenly over 6 devices; use 1920 or 2304"),
        (None, 64, TOKENS, "32 rows of 64 tokens cannot be split evenly over 64 devices; use 4096"),
        (3, 2, ROWS, "the 16 rows of a device cannot be computed 3 at a time; use 2 or 4"),
    ],
)  # fmt: skip
def test_what_does_not_divide_names_the_key_and_the_nearest_values(micro_batch_size, devices, key, words):
    with pytest.raises(UnevenError) as error:
        loop(2048, 64, micro_batch_size).accumulation(devices)
    assert (error.value.key, error.value.message) == (key, words)
    assert str(error.value) == f"{key}: {words}"


def test_rows_are_whole():
    assert loop(2048, 64, None).rows == 32
    with pytest.raises(ValidationError, match=r"\(100\) must be a multiple of seq_len \(64\): 64 or 128"):
        loop(100, 64, None)


def test_a_reward_is_one_of_ours_or_a_function_of_a_module():
    grpo = load_group("loop/grpo")
    rewards = dict.fromkeys(("my_rewards:brevity", "my.package.rewards:brevity", *REWARDS), 1.0)
    assert GrpoLoop(**grpo | {"rewards": rewards}).rewards == rewards
    unknown = r"unknown reward .*; choices: answer_match, answer_match_lenient, boxed, .*, length, |no module:function"
    for name in ("answer_macth", "my_rewards", "my_rewards:", "my/rewards.py:f", "a:b:c", ""):
        with pytest.raises(ValidationError, match=unknown):
            GrpoLoop(**grpo | {"rewards": {name: 1.0}})


@pytest.mark.parametrize("name", ["token_mean", "dr_grpo", "dapo", "gspo", "rloo"])
def test_each_loss_has_a_file_with_its_values(name):
    assert GrpoLoop(**load_group(f"loop/{name}")).loss_type == name
    assert load_group(f"scale/loop/tiny_{name}") == load_group("scale/loop/tiny_grpo")


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"loss_type": "dr_grpo", "advantage_std": "population"}, "advantage_std"),
        ({"loss_type": "rloo", "advantage_std": "sample"}, "advantage_std"),
        ({"loss_type": "dapo", "clip_ratio_high": 0.28} | UNFILTERED, "filter_zero_variance_groups"),
        ({"loss_type": "dapo", "clip_ratio_high": 0.2, "filter_zero_variance_groups": True}, "clip_ratio_high"),
    ],
)
def test_a_loss_with_a_papers_name_is_the_papers(values, key):
    with pytest.raises(ValidationError, match="use") as error:
        GrpoLoop(**load_group("loop/grpo") | values)
    assert [e["loc"] for e in error.value.errors()] == [(key,)]


def test_samplers_are_remote_on_workers_of_the_pod_or_on_further_pods():
    sampler = load_group("loop/grpo")["sampler"]
    assert [Sampling(**sampler | more).is_remote for more in ({}, {"workers": 1}, {"pods": 1})] == [False, True, True]


def test_each_attempt_of_a_sampler_has_its_own_token():
    """The values are fixed: a controller and a trainer of two versions must agree."""
    first, second = attempt_token("secret", 1), attempt_token("secret", 2)
    assert first == "b07e8b6ba761865c21350ca0982c277b46c99b398befeec94b3ea27af1d9f2ff"
    assert first != second


@pytest.fixture
def raw() -> dict:
    groups = {"model": "tiny", "loop": "lm", "optimizer": "adamw", "mesh": "data"}
    return {
        "format": 1,
        "id": "quickstart-0a1b2c3d",
        "name": "quickstart",
        "seed": 0,
        "dir": "gs://bucket/runs/quickstart-0a1b2c3d",
        "compile_cache": False,
        "pod": {"accelerator_type": "v5litepod-16", "workers": 4, "devices": 16, "backend": "tpu",
                "hbm_bytes_per_chip": 17_000_000_000, "bf16_flops_per_chip": 1.97e14},
        "data": load_group("data/text") | {"path": "input.txt"},
        "checkpoint": {"save_interval": 100, "max_to_keep": 3, "best": None, "verify_interval": 0, "verify_data": True,
                       "max_outage_hours": 24},
        "logging": {"log_interval": 10, "profile": None, "wandb": None},
    } | {name: load_group(f"{name}/{file}") for name, file in groups.items()}  # fmt: skip


def refused(tmp_path: Path, text: str) -> list[str]:
    """The lines that are said of a run.yaml with this text."""
    (path := tmp_path / "run.yaml").write_text(text)
    with pytest.raises(RunFileError) as error:
        load(path)
    return str(error.value).splitlines()


def test_a_written_run_file_is_read_back(raw, tmp_path):
    path = tmp_path / "run.yaml"
    written = RunFile.model_validate(raw)
    path.write_text(yaml.safe_dump(written.model_dump(mode="json")))
    assert load(path) == written


def test_what_is_no_run_file_is_one_clear_error(raw, tmp_path):
    with pytest.raises(RunFileError, match="cannot be read: No such file"):
        load(path := tmp_path / "run.yaml")
    unversioned = {key: value for key, value in raw.items() if key != "format"}
    for text, words in {
        yaml.safe_dump(unversioned | {"format": 2}): "has format 2; this slipway reads format 1: update",
        yaml.safe_dump(unversioned): "has no format; ",
        "- 1": "must be a mapping of sections, not list",
    }.items():
        [message] = refused(tmp_path, text)
        assert message.startswith(str(path))
        assert words in message
    assert "not YAML" in "".join(refused(tmp_path, "a: [1"))


def test_every_wrong_key_is_named(raw, tmp_path):
    raw["optimizer"]["schedule"]["warmup_steps"] = -3
    raw["model"]["layerz"] = 2
    del raw["loop"]["total_batch_tokens"]
    raw["optimizer"]["param_groups"] = [{"match": "*", "b1": 2.0}]
    assert refused(tmp_path, yaml.safe_dump(raw))[1:] == [
        "  model.layerz: unknown key",
        "  loop.total_batch_tokens: missing",
        "  optimizer.schedule.warmup_steps: Input should be greater than or equal to 0 (got -3)",
        "  optimizer.param_groups.0.b1: Input should be less than 1 (got 2.0)",
    ]


@pytest.mark.parametrize(
    ("section", "values", "words"),
    [
        ("model", {"num_kv_heads": 3}, "  model: num_heads (4) must be a multiple of num_kv_heads (3)"),
        ("mesh", {"data": -1, "fsdp": -1}, "  mesh: only one axis may be -1"),
        ("mesh", {"tensor": 0}, "  mesh: tensor: must be at least 1, or -1 for the remaining devices"),
        ("loop", {"kind": "dpo"}, "  loop: Input tag 'dpo' found using 'kind' does not match any of the expected tags"),
        ("optimizer", {"schedule": {"kind": "cosine", "warmup_steps": 5, "horizon_steps": 5, "final_fraction": 0}},
         "  optimizer.schedule: warmup_steps (5) must be below horizon_steps (5)"),
    ],
)  # fmt: skip
def test_rules_between_keys(raw, tmp_path, section, values, words):
    raw[section] |= values
    _, message = refused(tmp_path, yaml.safe_dump(raw))
    assert message.startswith(words)


def test_model_groups_are_valid(raw):
    """Those of Hugging Face have neither sizes nor switches: config.json has."""
    for name in {path.stem for path in (ROOT / "conf" / "model").glob("*.yaml")} - {"pretrained", "hf"}:
        values = load_group(f"model/{name}")
        assert RunFile.model_validate(raw | {"model": values}).model.model_dump(mode="json") == values

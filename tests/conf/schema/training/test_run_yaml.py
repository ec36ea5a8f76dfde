"""run.yaml: one message that names every wrong key."""

from pathlib import Path

import pytest
import yaml

from conf.schema.training.run_yaml import RunFile, RunFileError, load
from tests.groups import load_group
from tests.paths import ROOT

CONF = ROOT / "conf"


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
    for name in {path.stem for path in (CONF / "model").glob("*.yaml")} - {"pretrained", "hf"}:
        values = load_group(f"model/{name}")
        assert RunFile.model_validate(raw | {"model": values}).model.model_dump(mode="json") == values

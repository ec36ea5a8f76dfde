"""An old key names its new one: in a file, on the command line, in what Hydra itself refuses, and in run.yaml."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from conf.schema.renamed_keys import RENAMED
from conf.schema.training import run_yaml
from controller.config.compose import compose
from controller.core.errors import ConfigError
from tests.docs.test_guides import is_key

OLD = {key: key.replace("*", "mine") for key in RENAMED}
NEW = {key: new.replace("*", "mine") for key, new in RENAMED.items()}


def base(key: str) -> list[str]:
    """Return overrides that compose to a config in which `key` is unknown, and whose kinds know its successor."""
    kinds = {
        "loop.samples.": "+experiment=lm_tinyshakespeare",
        "model.rope_scaling.": "model=llama3_1b",
        "optimizer.adamw.": "optimizer=muon",
        "assets.": f"{OLD[key].removesuffix('.mine.token')}={{mine: {{url: 'https://h/f', sha256: {'0' * 64}}}}}",
    }
    return ["+experiment=quickstart", *(choice for prefix, choice in kinds.items() if key.startswith(prefix))]


def problems(overrides: list[str], folder: Path | None = None) -> list[str]:
    """Return what the schema finds wrong with the composed config."""
    return [str(problem) for problem in compose(overrides, extra_dir=folder)[1]]


@pytest.mark.parametrize("key", RENAMED)
def test_only_the_new_name_is_a_key(key: str) -> None:
    assert is_key(RENAMED[key].replace(".*", ""))
    assert RENAMED[key] not in RENAMED


BASES = sorted({tuple(base(key)) for key in RENAMED})


def old_keys(overrides: tuple[str, ...]) -> list[str]:
    return [key for key in RENAMED if tuple(base(key)) == overrides]


def new_names(found: list[str]) -> list[str]:
    """Return the names that the problems give, sorted; several old keys of one section are one problem."""
    names = [problem.partition(": unknown key; renamed to ")[2] for problem in found]
    assert all(names), found
    return sorted(name for of_one in names for name in of_one.split(", "))


@pytest.mark.parametrize("overrides", BASES)
def test_overrides_of_old_keys_name_the_new_ones(overrides: tuple[str, ...]) -> None:
    keys = old_keys(overrides)
    found = problems([*overrides, *(f"{OLD[key]}=1" for key in keys)])
    assert new_names(found) == sorted(NEW[key] for key in keys)


@pytest.mark.parametrize("overrides", BASES)
def test_old_keys_in_a_file_name_the_new_ones(overrides: tuple[str, ...], tmp_path: Path) -> None:
    content = OmegaConf.from_dotlist([f"{OLD[key]}=1" for key in old_keys(overrides)])
    (tmp_path / "scale").mkdir()
    (tmp_path / "scale" / "old.yaml").write_text("# @package _global_\n" + OmegaConf.to_yaml(content))
    found = problems([*overrides, "scale=old"], tmp_path)
    assert new_names(found) == sorted(NEW[key] for key in old_keys(overrides))


@pytest.mark.parametrize("refused", ["~loop.device_batch", "loop.steps=${loop.device_batch}"])
def test_what_hydra_refuses_names_the_new_key(refused: str) -> None:
    with pytest.raises(ConfigError, match=r"loop\.device_batch.*; renamed to loop\.micro_batch_size$"):
        compose(["+experiment=quickstart", refused])


def test_an_old_key_without_its_section_is_found() -> None:
    with pytest.raises(ConfigError, match=r"did you mean loop\.micro_batch_size=4\?"):
        compose(["+experiment=quickstart", "device_batch=4"])


def test_a_run_yaml_with_an_old_key_names_the_new_one(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("format: 1\nloop: {kind: grpo, device_batch: 4}\n")
    with pytest.raises(
        run_yaml.RunFileError, match=r"loop\.device_batch: unknown key; renamed to loop\.micro_batch_size"
    ):
        run_yaml.load(tmp_path / "run.yaml")

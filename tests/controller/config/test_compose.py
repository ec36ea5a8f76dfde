"""Overrides and groups become one config; Hydra's complaints become ours."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from controller.config.compose import compose, compose_raw, compose_variants, config_groups, normalize_override
from controller.core.errors import ConfigError

pytestmark = pytest.mark.usefixtures("composed_by_hydra")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("tpu.zone=us-west4-a", "++tpu.zone=us-west4-a"),
        ("+tpu.zone=a", "++tpu.zone=a"),
        ("experiment=quickstart", "experiment=quickstart"),
        ("+experiment=quickstart", "experiment=quickstart"),
        ("hydra.verbose=true", "hydra.verbose=true"),
        ("~data", "~data"),
    ],
)
def test_normalize(typed: str, meant: str) -> None:
    assert normalize_override(typed) == meant


def test_an_unknown_experiment_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"no experiment named 'quickstrat'; did you mean experiment=quickstart\?"):
        compose(["+experiment=quickstrat"])
    with pytest.raises(ConfigError, match=r"choices: .*gemma2b_gsm8k"):
        compose(["+experiment=zzz"])


def test_an_unknown_group_lists_the_groups() -> None:
    with pytest.raises(ConfigError, match=r"colour: unknown group; .*groups: .*tpu"):
        compose(["colour=red"])


def test_a_value_hydra_cannot_parse_is_one_line() -> None:
    with pytest.raises(ConfigError) as caught:
        compose(["tpu.zone=[1"])
    assert "\n" not in str(caught.value)
    assert "tpu.zone" in str(caught.value)


def test_the_command_line_beats_the_scale() -> None:
    config, _ = compose(["+experiment=quickstart", "scale=tiny", "loop.steps=9"])
    assert config is not None
    assert config.loop is not None
    assert config.loop.steps == 9


def test_scale_comes_last(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\nrun:\n  name: from-experiment\n")
    (tmp_path / "scale").mkdir()
    (tmp_path / "scale" / "mini.yaml").write_text("# @package _global_\nrun:\n  name: from-scale\n")
    config, _ = compose(["+experiment=mine", "scale=mini", "program=command"], extra_dir=tmp_path)
    assert config is not None
    assert config.run.name == "from-scale"
    (tmp_path / "scale" / "mini_command.yaml").write_text("run:\n  name: from-scale-of-program\n")
    config, _ = compose(["+experiment=mine", "scale=mini", "program=command"], extra_dir=tmp_path)
    assert config is not None
    assert config.run.name == "from-scale-of-program"


def test_the_user_has_a_folder_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "tpu").mkdir()
    (tmp_path / "tpu" / "mine.yaml").write_text("defaults: [v5litepod_16]\nzone: europe-west4-b\n")
    config, problems = compose(["tpu=mine", "program=command"], extra_dir=tmp_path)
    assert problems == []
    assert config is not None
    assert config.tpu.zone == "europe-west4-b"
    assert "mine" in config_groups(tmp_path)["tpu"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.lr=1e-4,7e-4", "for a sweep add -m, for a list write 'optimizer.lr=[1e-4,7e-4]'"),
        ('loop.rewards={"trainer.x:brief": 0.1}', "write keys without quotes, and a colon in a key as \\:"),
        ("run.name=été", "quote a value with the character é: 'run.name=\"été\"'"),
    ],
)
def test_a_value_that_hydra_reads_otherwise_gets_the_cure(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(["+experiment=quickstart", override])
    assert message in str(caught.value)


def test_a_case_of_a_sweep_that_gives_several_values_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.lr: '1e-4,7e-4' is several values; for a sweep add -m"):
        list(compose_variants([["+experiment=quickstart", "optimizer.lr=1e-4,7e-4"]]))


def test_the_cures_are_understood_and_rewards_are_replaced() -> None:
    cures = [r"loop.rewards={my_rewards\:brief: 0.1}", "env.vars.LEVEL=0", "env.vars.FAST=true", "env.vars.RATE=0.5"]
    config, problems = compose(["+experiment=quickstart", *cures])
    assert problems == []
    assert config is not None
    assert config.loop is not None
    assert config.loop.rewards == {"my_rewards:brief": 0.1}  # pyright: ignore[reportAttributeAccessIssue]
    assert config.env.vars == {"LEVEL": "0", "FAST": "true", "RATE": "0.5"}


def test_several_threads_may_compose_at_once() -> None:
    """Runs of samplers that were replaced are composed from their records in threads."""
    chunks = [1, 2, 3, 4, 5, 6]
    with ThreadPoolExecutor(len(chunks)) as pool:
        made = list(pool.map(lambda chunk: compose_raw([f"run.seed={chunk}", "cloud=local"]), chunks))
    assert [one["run"]["seed"] for one in made] == chunks

"""Keys that were renamed: wherever an old one is written, the error names the new one."""

import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from conf.schema.base import RENAMED
from conf.schema.training import run_yaml
from controller.config.compose import compose
from controller.core.errors import ConfigError
from tests.composed import problems_of
from tests.docs.test_guides import is_key

OLD = {key: key.replace("*", "mine") for key in RENAMED}
NEW = {key: new.replace("*", "mine") for key, new in RENAMED.items()}


def base(key: str) -> tuple[str, ...]:
    """Return overrides that compose to a config in which `key` is unknown, and whose kinds know its successor."""
    kinds = {
        "loop.samples.": "+experiment=lm_tinyshakespeare",
        "model.rope_scaling.": "model=llama3_1b",
        "optimizer.adamw.": "optimizer=muon",
        "assets.": f"{OLD[key].removesuffix('.mine.token')}={{mine: {{url: 'https://h/f', sha256: {'0' * 64}}}}}",
    }
    return ("+experiment=quickstart", *(choice for prefix, choice in kinds.items() if key.startswith(prefix)))


@pytest.mark.parametrize("overrides", sorted({base(key) for key in RENAMED}))
@pytest.mark.parametrize("in_a_file", [False, True])
def test_old_keys_name_the_new_ones(overrides: tuple[str, ...], in_a_file: bool, tmp_path: Path) -> None:
    """On the command line and in a file; several old keys of one section are one problem."""
    old = [key for key in RENAMED if base(key) == overrides]
    assert all(is_key(RENAMED[key].replace(".*", "")) and RENAMED[key] not in RENAMED for key in old)
    words = [f"{OLD[key]}=1" for key in old]
    if in_a_file:
        (tmp_path / "scale").mkdir()
        text = OmegaConf.to_yaml(OmegaConf.from_dotlist(words))
        (tmp_path / "scale" / "old.yaml").write_text(f"# @package _global_\n{text}")
    found = problems_of(*overrides, *(["scale=old"] if in_a_file else words), folder=tmp_path)
    places = [re.search(r" \(.*/scale/old\.yaml, line \d+\)$", problem) for problem in found]
    has_place = in_a_file and not any(word.startswith("assets.") for word in overrides)  # an override sets these, too
    assert [place is not None for place in places] == [has_place] * len(found)
    texts = [problem[: place.start()] if place else problem for problem, place in zip(found, places, strict=True)]
    names = [text.partition(": unknown key; renamed to ")[2] for text in texts]
    assert all(names), found
    assert sorted(name for of_one in names for name in of_one.split(", ")) == sorted(NEW[key] for key in old)


@pytest.mark.parametrize(
    ("refused", "said"),
    [
        ("~loop.device_batch", r"loop\.device_batch.*; renamed to loop\.micro_batch_size$"),
        ("loop.steps=${loop.device_batch}", r"loop\.device_batch.*; renamed to loop\.micro_batch_size$"),
        ("device_batch=4", r"did you mean loop\.micro_batch_size=4\?"),
    ],
)
def test_what_hydra_refuses_names_the_new_key(refused: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        compose(["+experiment=quickstart", refused])


def test_a_run_yaml_with_an_old_key_names_the_new_one(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("format: 1\nloop: {kind: grpo, device_batch: 4}\n")
    renamed = r"loop\.device_batch: unknown key; renamed to loop\.micro_batch_size"
    with pytest.raises(run_yaml.RunFileError, match=renamed):
        run_yaml.load(tmp_path / "run.yaml")

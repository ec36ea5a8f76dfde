"""A first experiment of one's own: what is wrong with the file is said, and which file it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from controller.config.compose import compose
from controller.core.errors import ConfigError

BODY = "defaults:\n  - override /loop: grpo\nloop: {steps: 7}\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (f"{BODY}", "slipway/experiment/mine.yaml: must begin with the line '# @package _global_'"),
        (f"# mine\n# @package _global_\n{BODY}", "must begin with the line '# @package _global_'"),
        (f"\ufeff# @package _global_\n{BODY}", "slipway/experiment/mine.yaml: begins with a byte-order mark"),
        ("", "slipway/experiment/mine.yaml: is empty; begin with '# @package _global_'"),
        ("# @package _global_\n\n", "slipway/experiment/mine.yaml: is empty"),
    ],
)
def test_the_file_and_the_missing_line_are_named(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "slipway/experiment/mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        compose(["+experiment=mine"], extra_dir=tmp_path / "slipway")
    assert message in str(caught.value)


def test_a_blank_line_may_stand_above_the_header(tmp_path: Path) -> None:
    file = tmp_path / "slipway/experiment/mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("\n# @package _global_\n# my first\nrun: {name: mine}\n")
    config, problems = compose(["+experiment=mine", "program=command"], extra_dir=tmp_path / "slipway")
    assert problems == []
    assert config is not None
    assert config.run.name == "mine"

"""A first experiment of one's own: what is wrong with the file is said, and which file it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from controller.checks.preflight import preflight
from controller.config.compose import CONFIG_DIR, compose
from controller.core.errors import ConfigError

LAUNCHED = {
    file.stem: text
    for file in (CONFIG_DIR / "experiment").glob("*.yaml")
    if "caution:" in (text := file.read_text()) or "code:\n  repository:" in text
}
"""Experiments that launch someone else's program."""
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


@pytest.mark.parametrize("experiment", sorted(LAUNCHED))
def test_a_launched_program_says_first_what_is_known_of_it_and_what_takes_its_place(experiment: str) -> None:
    header = LAUNCHED[experiment].split("\n", 1)[1]
    first = " ".join(line.lstrip("# ") for line in header.split("# Guide")[0].splitlines())
    config, _ = compose([f"+experiment={experiment}"])
    assert config is not None
    caution = config.program.caution or ""
    why, _, native = caution.removeprefix("the original program ").partition("; native in its place: +experiment=")
    assert first.startswith(("Known not to finish: it ", "Not known to finish: it "))
    assert first.split(": it ", 1)[1] == f"{why}. Native in its place: +experiment={native}."
    instead, _ = compose([f"+experiment={native}"])
    assert instead is not None
    assert instead.program.kind == "trainer"
    assert instead.program.caution is None
    said = [str(finding) for finding in preflight(config) if finding.check == "caution"]
    assert said == [f"program.caution: {caution}"]
    tiny, _ = compose([f"+experiment={experiment}", "scale=tiny"])
    assert tiny is not None
    assert [finding for finding in preflight(tiny) if finding.check == "caution"] == []

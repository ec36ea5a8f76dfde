"""`slipway help KEY` and `slipway plan --config`: what a key is, its value, and the file that sets it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from controller.cli import main
from controller.config.compose import CONFIG_DIR
from controller.config.origins import composed_with_origins, file_values
from tests.groups import load_yaml

OWN = """# @package _global_
defaults: [quickstart, override /loop: mine]
run: {seed: 7}
checkpoint: {save_interval: 9}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with an experiment and a loop of its own."""
    for group, text in {"experiment": OWN, "loop": "defaults: [grpo]\nsteps: 5\n"}.items():
        (tmp_path / "slipway" / group).mkdir(parents=True)
        (tmp_path / "slipway" / group / "mine.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLIPWAY_HOME", str(tmp_path / "home"))
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main.run(words) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main.run(words) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["+experiment=quickstart", "scale=tiny"],
        ["+experiment=gemma2b_gsm8k", "tpu=v6e_8"],
        ["+experiment=lm_tinyshakespeare", "cloud=local"],
        ["+experiment=trm_sudoku_4x4"],
        ["+experiment=quickstart", "model@loop.teacher=tiny"],
    ],
)
def test_each_value_is_the_one_that_its_file_has(words: list[str], folder: Path) -> None:
    found = composed_with_origins(words, None)
    assert len(found) > 150
    origins = {origin for _, origin in found.values()}
    assert len(origins) > 10
    for origin in origins:
        file = CONFIG_DIR.parent / origin
        values = dict(file_values(file, ""))
        for key, (value, _) in [(key, each) for key, each in found.items() if each[1] == origin]:
            ends = [each for name, each in values.items() if key == name or key.endswith(f".{name}")]
            assert ends, (key, origin)
            if not any("${" in str(each) for each in ends):
                assert value in ends, (key, origin)


def test_what_is_typed_and_what_an_own_file_sets_is_told_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("plan", "--config", "+experiment=mine", "run.seed=8", "tpu=v5litepod_8", "loop.rewards={format: 1.0}")
    told = json.loads(said(capsys, *words, "--json"))
    expected: dict[str, tuple[Any, str]] = {
        "run.seed": (8, "the command line"),
        "loop.rewards.format": (1.0, "the command line"),
        "loop.steps": (80, "conf/experiment/quickstart.yaml"),
        "checkpoint.save_interval": (9, "slipway/experiment/mine.yaml"),
        "tpu.accelerator_type": ("v5litepod-8", "conf/tpu/v5litepod_8.yaml"),
        "optimizer.b1": (0.9, "conf/optimizer/adamw.yaml"),
    }
    assert {key: (told[key]["value"], told[key]["origin"]) for key in expected} == expected
    assert "loop.rewards.answer_match" not in told
    lines = said(capsys, *words).splitlines()
    assert len(lines) == len(told)
    assert "run.seed=8                                                # the command line" in lines
    assert all(re.fullmatch(r"[\w.\-/]+=.*  # \S.*", line) for line in lines)


def test_a_key_is_explained(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = said(capsys, "help", "checkpoint.save_interval", "+experiment=mine")
    assert "integer ≥ 1. Updates between checkpoints." in page
    assert "now      9, by slipway/experiment/mine.yaml" in page
    assert "set by   slipway/experiment/mine.yaml: 9" in page
    assert "conf/config.yaml: 100" in page
    assert "read by  the trainer, on every worker" in page
    page = said(capsys, "help", "tpu.zone")
    assert ("now" in page, "read by  the controller" in page) == (False, True)
    assert "kind=puzzle" not in said(capsys, "help", "optimizer.lr")
    assert "Local file or folder." in said(capsys, "help", "assets.models.mine.path")
    assert "now      3, by the command line" in said(capsys, "help", "env.vars.MINE", "env.vars.MINE=3")
    assert 'now      {"answer_match": 1.0}' in said(capsys, "help", "loop.rewards", "+experiment=mine")
    document = json.loads(said(capsys, "help", "optimizer.lr", "+experiment=quickstart", "--json"))
    assert (document["key"], document["value"]) == ("optimizer.lr", 0.0007)
    assert {"file", "value"} == document["set_by"][0].keys()


def test_a_section_lists_its_keys(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = said(capsys, "help", "optimizer")
    kinds = {load_yaml(file)["kind"] for file in (CONFIG_DIR / "optimizer").glob("*.yaml") if "kind" in load_yaml(file)}
    assert all(f"kind={kind}" in page for kind in kinds)
    assert "  optimizer.lr  number > 0 ≤ 10. Peak learning rate." in page
    assert said(capsys, "help", "mesh").count("\n") == 5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["help", "lr"], "lr: is neither a verb nor a key of the config; did you mean optimizer.lr"),
        (["help", "optimizer.lrr"], "did you mean optimizer.lr"),
        (["help", "launch"], "unknown verb 'launch'"),
        (["help", "up", "run.seed=1"], "help: overrides are for a key: slipway help optimizer.lr +experiment=NAME"),
        (["help", "run.seed", "+experiment=mien"], "no experiment named 'mien'; did you mean experiment=mine?"),
        (["plan", "--config", "-m", "+experiment=mine", "run.seed=1,2"], "--config: is of one run; leave out -m"),
        (["plan", "--config", "+experiment=mine", "run.sed=1"], "run.sed: unknown key; did you mean run.seed?"),
        (["plan", "--config", "--save", "+experiment=mine"], "--config and --save: give one of them"),
    ],
)
def test_mistakes_are_told(words: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refused(capsys, *words)


@pytest.mark.parametrize("content", [b"a: [1", b"- 1\n", b"a: \xff\n", b"{{ a }}: 1\n"])
def test_an_own_file_that_is_no_yaml_is_named(content: bytes, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "slipway" / "model").mkdir()
    (folder / "slipway" / "model" / "odd.yaml").write_bytes(content)
    assert refused(capsys, "help", "optimizer.lr").startswith("error: slipway/model/odd.yaml: ")

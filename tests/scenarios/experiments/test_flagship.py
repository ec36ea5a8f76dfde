"""The flagship: its prompt and its reward belong together, and what it copies is what it reads."""

from pathlib import Path
from typing import Any

import pytest

from conf.schema.config import Config
from controller.checks.preflight import preflight
from controller.cli import main
from controller.inputs.assets import resolve_assets


def composed(name: str, *words: str) -> Config:
    config, findings = main.parse(["plan", f"+experiment={name}", "cloud.project=a-project", *words]).options.config()
    assert [str(finding) for finding in [*findings, *preflight(config)] if finding.severity == "error"] == []
    return config


@pytest.mark.parametrize(
    ("name", "reward", "prompt"),
    [
        (
            *("gemma2b_gsm8k", "boxed_strict"),
            "Question: How many? Put your answer number as the format: \\boxed{<Your Answer>}.\nAnswer: ",
        ),
        ("gemma2b_gsm8k_lenient", "answer_match", "Question: How many?\nAnswer:"),
    ],
)
def test_prompt_and_reward_go_together(name: str, reward: str, prompt: str) -> None:
    """The first is Simply's evaluation; the second that of `sft_gsm8k`, which it continues."""
    config = composed(name)
    loop: Any = config.loop
    data: Any = config.data
    assert ({key for key, weight in loop.rewards.items() if weight}, loop.accuracy_reward) == ({reward}, reward)
    assert data.prompt.question.format(question="How many?") == prompt
    if name == "gemma2b_gsm8k_lenient":
        tuned: Any = composed("sft_gsm8k", "model.weights=gs://b/w", "data.tokenizer=gs://b/t/tokenizer.json").data
        assert tuned.template.prompt == data.prompt.question


def test_weights_that_no_key_names_are_not_fetched(tmp_path: Path) -> None:
    place = f"run.state_dir={tmp_path}"
    assert resolve_assets(composed("gemma2b_gsm8k", place), tmp_path).keys() == {"datasets.gsm8k", "models.gemma-2-2b"}
    elsewhere = ("model.weights=gs://b/gemma-2-2b", "data.tokenizer=gs://b/gemma-2-2b/tokenizer.json")
    assert resolve_assets(composed("gemma2b_gsm8k", place, *elsewhere), tmp_path).keys() == {"datasets.gsm8k"}
    half = composed("gemma2b_gsm8k", place, elsewhere[0])
    assert resolve_assets(half, tmp_path).keys() == {"datasets.gsm8k", "models.gemma-2-2b"}

"""The flagship: its settings are those that were decided on, and what it copies is what it reads."""

from pathlib import Path
from typing import Any

import pytest

from conf.schema.config import Config
from controller.checks.preflight import preflight
from controller.cli import main
from controller.inputs.assets import resolve_assets

FLAGSHIPS = {"gemma2b_gsm8k": 1e-7, "gemma2b_gsm8k_fast": 1e-6, "gemma2b_gsm8k_lenient": 1e-7}


def composed(name: str, *words: str) -> Config:
    config, findings = main.parse(["plan", f"+experiment={name}", "cloud.project=a-project", *words]).options.config()
    assert [str(finding) for finding in [*findings, *preflight(config)] if finding.severity == "error"] == []
    return config


@pytest.mark.parametrize(("name", "lr"), FLAGSHIPS.items())
def test_settings(name: str, lr: float) -> None:
    config = composed(name)
    loop: Any = config.loop
    optimizer: Any = config.optimizer
    assert config.tpu.accelerator_type == "v5litepod-16"
    assert (loop.steps, loop.prompts_per_step, loop.group_size, loop.updates_per_rollout, loop.rows) == (
        2000,
        16,
        8,
        4,
        128,
    )
    assert (loop.max_prompt_length, loop.max_prompt_length + loop.max_new_tokens) == (512, 2048)
    assert (loop.loss_type, loop.temperature, loop.clip_ratio_low, loop.clip_ratio_high) == (
        "token_mean",
        1.0,
        0.2,
        0.2,
    )
    assert (loop.kl_coef, loop.kl_estimator, loop.reference_dtype) == (0.001, "k3", "bfloat16")
    assert (loop.eval_prompts, loop.test_samples_per_prompt, loop.test_prompts) == (256, 8, None)
    assert all(stop in "\n" * 3 for stop in loop.sampler.stop)
    assert loop.sampler.slots == 128
    assert (optimizer.lr, optimizer.b1, optimizer.b2, optimizer.max_grad_norm) == (lr, 0.9, 0.95, 1.0)
    assert (optimizer.update_clip, optimizer.weight_decay) == (1.0, 0.0)
    assert optimizer.schedule.model_dump() == {"kind": "constant", "warmup_steps": 1}
    assert config.checkpoint.save_interval == 20
    data: Any = config.data
    assert (data.chat_template, data.bos, data.eos, data.tokenizer) == (
        *("none", "<bos>", "<eos>"),
        "assets://gemma-2-2b/tokenizer.json",
    )


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

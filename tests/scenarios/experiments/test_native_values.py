"""Native experiments have the values that their guides give, as written here from the guides and the programs' flags.

Those of TRM are in tests/conf/test_trm_sweeps.py.
"""

from pathlib import Path
from typing import Any

import pytest

from conf.schema.config import Config
from conf.schema.training.loop_parts import Trm
from controller.checks.fit import estimate_num_params
from controller.checks.preflight import preflight
from controller.cli import main
from controller.config.compose import compose
from controller.inputs.resolved_assets import resolve_assets
from trainer.puzzles.__main__ import main as build_puzzles
from trainer.puzzles.dataset import PuzzleDataset

NANOCHAT = {
    "model.num_layers": 16, "model.dim": 1024, "model.num_heads": 8, "model.num_kv_heads": 8, "model.head_dim": 128,
    "model.mlp_dim": 4096, "model.vocab_size": 65536, "model.attention_pattern": "LLLG",
    "loop.steps": 50_000, "loop.total_batch_tokens": 524_288, "loop.micro_batch_size": 8, "loop.eval_interval": 250,
    "loop.eval_batches": 20, "loop.text_samples.interval": 2000, "checkpoint.save_interval": 500,
    "optimizer.kind": "muon", "optimizer.lr": 0.02, "optimizer.weight_decay": 0.2, "optimizer.adamw.b1": 0.8,
    "optimizer.adamw.b2": 0.95, "optimizer.schedule.warmup_steps": 0, "optimizer.schedule.final_fraction": 0.0,
    "optimizer.schedule.decay_steps": 20_000, "optimizer.max_grad_norm": None, "data.kind": "parquet",
}  # fmt: skip
"""Guide 2's flags (2.13 to 2.17) and the defaults of scripts/base_train.py; eval_tokens is 20 x 524,288."""
MACHINES = {
    "v5e": ((), {"tpu.accelerator_type": "v5litepod-8", "loop.seq_len": 1024, "model.sliding_window": 513}),
    "v6e": (
        ("tpu=v6e_4", "loop.seq_len=2048", "model.sliding_window=1025"),
        {"tpu.accelerator_type": "v6e-4", "loop.seq_len": 2048, "model.sliding_window": 1025},
    ),
}
"""Words after +experiment=nanochat_d16, as its header gives them, and what the guide says of that machine."""
LM_3B = {
    "tpu.accelerator_type": "v6e-8", "mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2, "loop.steps": 100_000,
    "loop.total_batch_tokens": 32 * 4096, "loop.seq_len": 4096, "model.max_seq_len": 4096, "model.vocab_size": 49_152,
    "checkpoint.save_interval": 500, "optimizer.lr": 3e-4, "optimizer.schedule.warmup_steps": 2000,
    "optimizer.weight_decay": 0.1, "optimizer.max_grad_norm": 1.0,
}  # fmt: skip
"""Guide 3's command (3.7, 3.14); the vocabulary is SmolLM's, rates are those of its program's 3B config."""

FLAGSHIP = {
    "tpu.accelerator_type": "v5litepod-16", "loop.steps": 2000, "loop.prompts_per_step": 16, "loop.group_size": 8,
    "loop.updates_per_rollout": 4, "loop.rows": 128, "loop.max_prompt_length": 512, "loop.max_new_tokens": 1536,
    "loop.loss_type": "token_mean", "loop.temperature": 1.0, "loop.clip_ratio_low": 0.2, "loop.clip_ratio_high": 0.2,
    "loop.kl_coef": 0.001, "loop.kl_estimator": "k3", "loop.reference_dtype": "bfloat16", "loop.eval_prompts": 256,
    "loop.test_samples_per_prompt": 8, "loop.test_prompts": None, "loop.sampler.slots": 128, "optimizer.b1": 0.9,
    "optimizer.b2": 0.95, "optimizer.max_grad_norm": 1.0, "optimizer.update_clip": 1.0, "optimizer.weight_decay": 0.0,
    "optimizer.schedule.kind": "constant", "optimizer.schedule.warmup_steps": 1, "checkpoint.save_interval": 20,
    "data.chat_template": "none", "data.bos": "<bos>", "data.eos": "<eos>",
    "data.tokenizer": "assets://gemma-2-2b/tokenizer.json",
}  # fmt: skip
"""Guide 0's command and Simply's config gemma2_2b_gsm8k_2k_rl_16."""


def composed(name: str, *words: str) -> Config:
    words = (f"+experiment={name}", "cloud.project=a-project", *words)
    config, findings = main.parse(["plan", *words]).options.config()
    assert [str(finding) for finding in [*findings, *preflight(config)] if finding.severity == "error"] == []
    return config


def values(config: Config, keys: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for key in keys:
        at: Any = config
        for part in key.split("."):
            at = getattr(at, part)
        found[key] = at
    return found


@pytest.mark.parametrize("machine", MACHINES)
def test_nanochat_has_the_values_of_its_guide(machine: str) -> None:
    words, own = MACHINES[machine]
    config = composed("nanochat_d16", *words)
    expected = NANOCHAT | own
    assert values(config, expected) == expected
    rates: Any = {group.match: group.lr for group in config.optimizer.param_groups}  # pyright: ignore
    assert rates["embedding"] == 0.3
    assert rates["unembedding"] == 0.004
    rows = config.loop.total_batch_tokens / config.loop.seq_len / config.topology.devices  # pyright: ignore
    assert rows / config.loop.micro_batch_size == 8, "accumulation steps (2.8)"  # pyright: ignore


@pytest.mark.parametrize(
    ("name", "lr"), [("gemma2b_gsm8k", 1e-7), ("gemma2b_gsm8k_fast", 1e-6), ("gemma2b_gsm8k_lenient", 1e-7)]
)
def test_the_flagship_has_the_values_that_were_decided_on(name: str, lr: float) -> None:
    config = composed(name)
    expected = FLAGSHIP | {"optimizer.lr": lr}
    assert values(config, expected) == expected
    assert all(stop in "\n" * 3 for stop in config.loop.sampler.stop)  # pyright: ignore


def test_the_causal_3b_model_has_the_values_of_its_guide() -> None:
    config = composed("lm_3b_v6e8", "budget.max_hours=9")
    assert values(config, LM_3B) == LM_3B
    assert config.model is not None
    assert estimate_num_params(config.model) == pytest.approx(3e9, rel=0.1)


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


@pytest.mark.parametrize("experiment", ["trm_sudoku_4x4", "trm_sudoku_9x9_easy"])
def test_the_generated_puzzles_have_the_sizes_of_the_model(experiment: str, tmp_path: Path) -> None:
    config, problems = compose([f"+experiment={experiment}", "loop.puzzles=6", "loop.steps=1"])
    assert config is not None, problems
    assert isinstance(config.model, Trm)
    slipway, module, *words = config.assets.datasets["sudoku"].build or ()
    assert (slipway, module) == ("slipway", "trainer.puzzles")
    small = {"{output}": str(tmp_path / "data"), "512": "4"}
    assert build_puzzles([small.get(word, word) for word in words]) == 0
    data = PuzzleDataset.open(str(tmp_path / "data"))
    assert (data.cells, data.vocabulary) == (config.model.seq_len, config.model.vocab_size)
    assert (data.splits["train"]["groups"], data.splits["test"]["groups"]) == (6, 4)

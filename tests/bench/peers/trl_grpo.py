"""GRPO by TRL on a CPU: what `tests.bench.peers.grpo` compares with. Needs torch, transformers, datasets and TRL, and
nothing of this project.

    python tests/bench/peers/trl_grpo.py [--steps 15]

4 prompts x 8 samples, 64 + 64 tokens, a Gemma-2 of 4 layers x 128 with 512 tokens, random weights, float32. Prints one
JSON object: seconds of each step after the first ones, and CPU seconds per step.
"""

import argparse
import itertools
import json
import string
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import Gemma2Config, Gemma2ForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

WARM_STEPS, PROMPTS, SAMPLES, LENGTH, VOCAB = 3, 4, 8, 64, 512


class Clock(TrainerCallback):
    """Wall and CPU time at the end of each step."""

    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs
        self.times.append((time.perf_counter(), time.process_time()))


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per character; most tokens are never in a prompt."""
    known = ["<pad>", "<eos>", "<bos>", "<unk>", *string.digits, "+", "=", *string.ascii_letters]
    names = [*known, *(f"<{i}>" for i in range(VOCAB - len(known)))]
    made = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, padding_side="left", **special)


def reward(completions: list[str], **columns: Any) -> list[float]:
    del columns
    return [float(completion.count("1")) for completion in completions]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    cfg = Gemma2Config(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, query_pre_attn_scalar=32, sliding_window=4096, pad_token_id=0,
        eos_token_id=1, bos_token_id=2,
    )  # fmt: skip
    clock, words = Clock(), tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder, per_device_train_batch_size=PROMPTS * SAMPLES, num_generations=SAMPLES, beta=0.04,
            max_completion_length=LENGTH, max_steps=options.steps + WARM_STEPS, learning_rate=1e-4, use_cpu=True,
            bf16=False, gradient_checkpointing=False, report_to="none", save_strategy="no", logging_steps=1000,
            disable_tqdm=True, model_init_kwargs={"dtype": "float32"},
        )  # fmt: skip
        # a folder, because TRL reads the reference model from where the policy came from
        Gemma2ForCausalLM(cfg).save_pretrained(folder)
        rows = [{"prompt": f"{i:0{LENGTH - 1}d}="} for i in range(PROMPTS * (options.steps + WARM_STEPS))]
        data = Dataset.from_list(rows)
        GRPOTrainer(folder, reward, settings, data, processing_class=words, callbacks=[clock]).train()
    timed = clock.times[WARM_STEPS - 1 :]
    seconds = [after[0] - before[0] for before, after in itertools.pairwise(timed)]
    print(json.dumps({"seconds": seconds, "cpu_seconds_per_step": (timed[-1][1] - timed[0][1]) / len(seconds)}))


if __name__ == "__main__":
    main()

"""GRPO by TRL on a CPU until it is right: what `tests.bench.peers.accuracy` compares with. Needs torch, transformers,
datasets and TRL, and nothing of this project.

    python tests/bench/peers/trl_accuracy.py TASK

TASK is the folder that the comparison makes. Prints a line of JSON for each evaluation.
"""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from arithmetic_task import Progress, Task, is_right
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Greedy:
    """Greedy responses to all test prompts at once."""

    def __init__(self, task: Task, words: Any) -> None:
        self._words, self._new = words, task.settings["max_new_tokens"]
        self.model: Any = None

    def __call__(self, rows: Sequence[dict[str, Any]]) -> list[str]:
        prompts = [row["prompt"] for row in rows]
        asked = self._words(prompts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
        if asked["input_ids"][0][asked["attention_mask"][0] == 1].tolist() != rows[0]["tokens"]:
            raise ValueError("the tokenizer gives other tokens than ours")
        was_training = self.model.training
        self.model.eval()
        with torch.inference_mode():
            drawn = self.model.generate(
                input_ids=asked["input_ids"], attention_mask=asked["attention_mask"], do_sample=False,
                max_new_tokens=self._new, pad_token_id=self._words.pad_token_id, eos_token_id=self._words.eos_token_id,
            )  # fmt: skip
        self.model.train(was_training)
        return self._words.batch_decode(drawn[:, asked["input_ids"].shape[1] :], skip_special_tokens=True)


class Watch(TrainerCallback):
    """Evaluates now and then, and ends the training when the level is reached."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        del args, kwargs
        if self._progress.is_due(state.global_step) and self._progress.evaluate(state.global_step):
            control.should_training_stop = True


def reward(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    del columns
    return [float(is_right(text, right)) for text, right in zip(completions, answer, strict=True)]


def config(task: Task, folder: str) -> GRPOConfig:
    given = task.settings
    rows = given["prompts_per_step"] * given["group_size"]
    return GRPOConfig(
        output_dir=folder, per_device_train_batch_size=given["micro_batch_size"],
        gradient_accumulation_steps=rows // given["micro_batch_size"], num_generations=given["group_size"],
        max_completion_length=given["max_new_tokens"], max_steps=given["steps"], temperature=given["temperature"],
        top_k=0, beta=given["kl_coef"], epsilon=given["clip"], loss_type="grpo", scale_rewards="group",
        learning_rate=given["lr"], max_grad_norm=given["max_grad_norm"], shuffle_dataset=False, seed=given["seed"],
        use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none", save_strategy="no",
        logging_steps=1000, disable_tqdm=True, model_init_kwargs={"dtype": "float32"},
    )  # fmt: skip


def main() -> None:
    task = Task(Path(sys.argv[1]))
    given, words = task.settings, AutoTokenizer.from_pretrained(task.policy)
    torch.set_num_threads(2)
    greedy = Greedy(task, words)
    greedy.model = AutoModelForCausalLM.from_pretrained(task.policy, dtype=torch.float32)
    progress = Progress(task, greedy)
    progress.evaluate(0)
    with tempfile.TemporaryDirectory() as folder:
        data = Dataset.from_list([{"prompt": row["prompt"], "answer": row["answer"]} for row in task.train])
        trainer = GRPOTrainer(str(task.policy), reward, config(task, folder), data, processing_class=words)
        greedy.model, betas = trainer.model, (0.9, given["b2"])
        adam = torch.optim.AdamW(trainer.model.parameters(), lr=given["lr"], betas=betas, eps=1e-8, weight_decay=0.0)
        falls = torch.optim.lr_scheduler.LambdaLR(adam, lambda update: task.learning_rate(update) / given["lr"])
        trainer.optimizer, trainer.lr_scheduler = adam, falls
        progress.restart()
        trainer.add_callback(Watch(progress))
        trainer.train()


if __name__ == "__main__":
    main()

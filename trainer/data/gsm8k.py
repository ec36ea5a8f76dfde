"""GSM8K (https://arxiv.org/abs/2110.14168): grade-school word problems, one JSON object {question, answer} a line.

The reference answer ends in `#### 18`; the calculator's `<<6*3=18>>` is left out of the worked response.
"""

from __future__ import annotations

import json
import random
import re

from etils import epath

from conf.data import Gsm8kData
from conf.runfile import RunFileError
from trainer.data.problem import Problem
from trainer.tokenizer import encode_prompt

CALCULATION = re.compile(r"<<.*?>>")


class Gsm8k:
    """Questions that fit into a prompt; see `data.problem.Problems`. `too_long` counts those that do not."""

    def __init__(self, cfg: Gsm8kData, seed: int, prompt_length: int) -> None:
        """Read both files. Raises RunFileError where one is missing, a row is none of GSM8K's, or no question fits."""
        self._seed = seed
        self._train, left_out = _fitting(read(cfg.path, "data.path"), prompt_length)
        self._held_out, left_out_too = _fitting(read(cfg.eval_path, "data.eval_path"), prompt_length)
        self.too_long = left_out + left_out_too
        if not self._train:
            raise RunFileError(f"loop.prompt_length: no question of data.path fits into {prompt_length} tokens")

    def train(self, step: int, count: int) -> list[Problem]:
        return random.Random(f"{self._seed} train {step}").choices(self._train, k=count)  # noqa: S311

    def held_out(self, count: int) -> list[Problem]:
        if count > len(self._held_out):
            raise RunFileError(f"loop.eval_prompts: data.eval_path has {len(self._held_out)} questions, not {count}")
        return random.Random("held out").sample(self._held_out, count)  # noqa: S311 - the same for every seed


def read(path: str, key: str) -> list[Problem]:
    """Every row of a file, local or gs://. Raises RunFileError naming the key, the file and the line."""
    file = epath.Path(path)
    if not file.exists():
        raise RunFileError(f"{key}: there is no {path}")
    problems = []
    for number, line in enumerate(file.read_bytes().splitlines(), 1):  # a text would also split at U+2028
        try:
            row = json.loads(line)
            problems.append(_problem(row["question"], row["answer"]))
        except (ValueError, KeyError, TypeError) as error:
            raise RunFileError(f"{key}: {path}, line {number} is no GSM8K row: {error!r}") from None
    return problems


def _problem(question: str, answer: str) -> Problem:
    worked, mark, gold = CALCULATION.sub("", answer).rpartition("#### ")
    gold = gold.strip()
    if not mark or not gold:
        raise ValueError("the answer does not end in #### and a result")
    return Problem("Question: " + question + "\nAnswer:", gold, f" {worked}#### {gold}")


def _fitting(problems: list[Problem], prompt_length: int) -> tuple[list[Problem], int]:
    fit = [p for p in problems if len(encode_prompt(p.prompt)) <= prompt_length]
    return fit, len(problems) - len(fit)

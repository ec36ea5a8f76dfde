"""How often the policy is right: on a few fixed questions while it learns, on the whole test set before and after."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import jax

from conf.loop import GrpoLoop
from trainer.data.questions import Asked
from trainer.evaluation import statistics
from trainer.evaluation.answering import Answering, Answers
from trainer.transcripts import Transcript
from trainer.rewards.pool import Pool
from trainer.sampler import Sampler
from trainer.weights import Params

KEY_OF_TESTS = 2_000_000_000
"""Folded into the run's key: no step has that number. Both tests draw with the same randomness."""


@dataclass(frozen=True)
class Result:
    """values: by the names of the metrics; accuracy: the share of right answers; transcripts: on process 0."""

    accuracy: float
    values: dict[str, float]
    transcripts: list[Transcript]


class Evaluation:
    """The fixed questions of a run, and what answers and checks them."""

    def __init__(self, loop: GrpoLoop, asked: Asked, sampler: Sampler, checks: Pool, key: jax.Array) -> None:
        """Raises RunFileError where there are not as many questions."""
        self._loop, self._sampler = loop, sampler
        self._answering = Answering(sampler, asked.prompting, checks)
        self.held_out = asked.held_out(loop.eval_prompts)
        self._test = [] if loop.test_samples is None else asked.held_out(loop.test_prompts)
        self._key = jax.random.fold_in(key, KEY_OF_TESTS)

    def greedy(self, params: Params, between: Callable[[], None] = lambda: None) -> Result:
        """The likeliest tokens as the answer to each of `loop.eval_prompts` questions."""
        began, copy = time.perf_counter(), self._sampler.load(params)
        found = self._answering.answers(copy, self.held_out, 1, self._key, 0.0, self._loop.transcripts, between)
        right = sum(answer for (answer,) in found.right)
        low, high = statistics.wilson(right, len(self.held_out))
        accuracy = right / len(self.held_out)
        values = {"eval_accuracy": accuracy, "eval_accuracy_low": low, "eval_accuracy_high": high}
        return Result(accuracy, values | {"eval_time": time.perf_counter() - began}, found.transcripts)

    def test(self, params: Params, between: Callable[[], None] = lambda: None) -> Result | None:
        """`loop.test_samples` drawn answers to each of `loop.test_prompts` questions; None where that is null."""
        loop = self._loop
        if loop.test_samples is None:
            return None
        began, copy = time.perf_counter(), self._sampler.load(params)
        found = self._answering.answers(
            copy, self._test, loop.test_samples, self._key, loop.temperature, loop.transcripts, between
        )
        values = tested(found, loop.test_samples)
        return Result(
            values["test_accuracy"], values | {"test_time": time.perf_counter() - began}, found.transcripts
        )


def tested(found: Answers, samples: int) -> dict[str, float]:
    """Metrics of a test: accuracy with its interval, pass@k, majority@samples."""
    counts = [sum(answers) for answers in found.right]
    means = [count / samples for count in counts]
    low, high = statistics.clustered(means)
    values = {"test_accuracy": sum(means) / len(means), "test_accuracy_low": low, "test_accuracy_high": high}
    for k in statistics.ks(samples):
        values[f"test_pass_at_{k}"] = sum(statistics.pass_at_k(samples, count, k) for count in counts) / len(counts)
    votes = zip(found.canonical, found.right, strict=True)
    values[f"test_majority_at_{samples}"] = sum(statistics.majority(*vote) for vote in votes) / len(counts)
    return values

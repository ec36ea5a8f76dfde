"""Accuracy evaluations: on a few fixed questions during training, on the whole test set before and after."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import jax

from conf.extension import Answered
from conf.schema.training.loop import GrpoLoop
from trainer.data.problem import Question
from trainer.data.questions import QuestionSet
from trainer.environments.episodes import Episodes
from trainer.evaluation import statistics
from trainer.evaluation.answering import AnswerEvaluator, GradedAnswers
from trainer.models.weights import Params
from trainer.rewards.pool import RewardPool
from trainer.sampler import Sampler
from trainer.telemetry.transcripts import Transcript

TEST_KEY_OFFSET = 2_000_000_000
"""Folded into the run's key; no rollout has this number. All tests draw with the same randomness."""


@dataclass(frozen=True)
class EvalResult:
    """Result of an evaluation.

    accuracy: fraction of correct answers; interval: its 95 % confidence interval; values: by metric name; transcripts:
    on process 0; answers: to the held-out questions, for `loop.evaluations`, whose
    results are plugin_values.
    """

    accuracy: float
    interval: tuple[float, float]
    values: dict[str, float]
    transcripts: list[Transcript]
    answers: Sequence[Answered] = ()
    plugin_values: Mapping[str, float] = field(default_factory=dict)


class Evaluator:
    """Evaluates the policy on a run's fixed questions."""

    def __init__(
        self,
        loop: GrpoLoop,
        asked: QuestionSet,
        sampler: Sampler,
        checks: RewardPool,
        seed: int,
        episodes: Episodes | None = None,
    ) -> None:
        """episodes: plays in the environment, if there is one. Raises RunFileError if there are too few questions."""
        self._loop, self._sampler = loop, sampler
        given = (sampler, asked.prompt_encoder, checks, loop.accuracy_reward, episodes)
        self._answer_evaluator = AnswerEvaluator(*given)
        self._validation = asked.validation(loop.eval_prompts)
        self._test = [] if loop.test_samples_per_prompt is None else asked.test(loop.test_prompts)
        self._key = jax.random.fold_in(jax.random.key(seed), TEST_KEY_OFFSET)

    def greedy(
        self, params: Params, count: int | None = None, between: Callable[[], None] = lambda: None
    ) -> EvalResult:
        """Answer the first `count` held-out questions, or all, by greedy decoding.

        between: called between chunks of decoding; an exception from it ends the evaluation.
        """
        began, asked = time.perf_counter(), self._validation[:count]
        found = self._answers(params, asked, 1, 0.0, between)
        right = sum(answer for (answer,) in found.correct)
        accuracy, interval = right / len(asked), statistics.wilson_interval(right, len(asked))
        values = {"eval_accuracy": accuracy, "eval_accuracy_low": interval[0], "eval_accuracy_high": interval[1]}
        values |= {f"eval_{name}": value for name, value in found.metrics.items()}
        values |= {"eval_time": time.perf_counter() - began}
        answers = [
            Answered(question.prompt, text, question.answer, correct)
            for question, (text,), (correct,) in zip(asked, found.texts, found.correct, strict=True)
        ]
        return EvalResult(accuracy, interval, values, found.transcripts, answers if self._loop.evaluations else ())

    def test(self, params: Params, between: Callable[[], None] = lambda: None) -> EvalResult | None:
        """Draw `loop.test_samples_per_prompt` answers to each of `loop.test_prompts` questions; None if null."""
        samples = self._loop.test_samples_per_prompt
        if samples is None:
            return None
        began = time.perf_counter()
        found = self._answers(params, self._test, samples, self._loop.temperature, between)
        means = [sum(answers) / samples for answers in found.correct]
        accuracy, interval = sum(means) / len(means), statistics.clustered_interval(means)
        values = {"test_accuracy": accuracy, "test_accuracy_low": interval[0], "test_accuracy_high": interval[1]}
        values |= multi_sample_metrics(found, samples) | {"test_time": time.perf_counter() - began}
        return EvalResult(accuracy, interval, values, found.transcripts)

    def _answers(
        self, params: Params, asked: Sequence[Question], samples: int, temperature: float, between: Callable[[], None]
    ) -> GradedAnswers:
        copy, kept = self._sampler.load_params(params), self._loop.transcripts
        return self._answer_evaluator.evaluate(
            copy, asked, samples, self._key, temperature, kept, between, keep_texts=bool(self._loop.evaluations)
        )


def multi_sample_metrics(found: GradedAnswers, samples: int) -> dict[str, float]:
    """Return pass@k for several k, and majority@samples: means over the questions."""
    counts = [sum(answers) for answers in found.correct]
    values = {
        f"test_pass_at_{k}": sum(statistics.pass_at_k(samples, count, k) for count in counts) / len(counts)
        for k in statistics.pass_k_values(samples)
    }
    votes = zip(found.canonical_answers, found.correct, strict=True)
    values[f"test_majority_at_{samples}"] = sum(statistics.majority_vote(*vote) for vote in votes) / len(counts)
    return values

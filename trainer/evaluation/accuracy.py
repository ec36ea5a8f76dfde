"""Accuracy evaluations: on a few fixed questions during training, on the whole test set before and after.

Each process checks its share of the answers.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import jax

from conf.extension import Answered
from conf.schema.training.loop import GrpoLoop
from trainer.data.prompting import Question
from trainer.data.questions import QuestionSet
from trainer.distributed import runtime
from trainer.environments.episodes import Episode, Episodes, episode_metrics
from trainer.evaluation import statistics
from trainer.models.weights import Params
from trainer.rewards.equal import canonicalize
from trainer.rewards.extract import extract_answer
from trainer.rewards.pool import RewardPool, Submission
from trainer.sampler import Sampler
from trainer.telemetry.metrics import Transcript

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


@dataclass(frozen=True)
class GradedAnswers:
    """Grades for each sample of every question.

    correct: whether the answer is; canonical_answers: the answer, normalized so that equal numbers and words match, or
    None; texts: the responses, empty unless `loop.evaluations` want them; transcripts: of the first questions' first
    samples, on process 0; metrics: of the environment's episodes.
    """

    correct: list[list[bool]]
    canonical_answers: list[list[str | None]]
    texts: list[list[str]]
    transcripts: list[Transcript]
    metrics: Mapping[str, float] = field(default_factory=dict)


class Evaluator:
    """Evaluates the policy on a run's fixed questions. All processes make the same calls, and get the same results."""

    def __init__(
        self,
        loop: GrpoLoop,
        questions: QuestionSet,
        sampler: Sampler,
        reward_pool: RewardPool,
        seed: int,
        episodes: Episodes | None = None,
    ) -> None:
        """episodes: plays in the environment, if there is one. Raises RunFileError if there are too few questions."""
        self._loop, self._sampler, self._reward_pool, self._episodes = loop, sampler, reward_pool, episodes
        self._prompt_encoder = questions.prompt_encoder
        self._validation = questions.validation(loop.eval_prompts)
        self._test = [] if loop.test_samples_per_prompt is None else questions.test(loop.test_prompts)
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
        """Answer questions and grade the answers.

        The sampler has no more rows in flight than in training; other rows wait for a slot.
        """
        copy, reward = self._sampler.load_params(params), self._loop.accuracy_reward
        if self._episodes is not None:
            played = self._episodes.play(self._sampler, copy, asked, samples, self._key, temperature, between)
            return _graded_episodes(played, samples, self._loop.transcripts)
        prompts = [question.prompt_tokens for question in asked]
        process, processes = jax.process_index(), jax.process_count()
        waiting, texts = {}, {}
        for drawn in self._sampler.generate(copy, prompts, samples, self._key, temperature, between):
            number, sample = divmod(drawn.row, samples)
            is_kept = process == 0 and sample == 0 and number < self._loop.transcripts
            if drawn.row % processes == process or is_kept:
                text = self._prompt_encoder.decode(drawn.tokens.tolist())
                if is_kept:
                    texts[number] = text
                if drawn.row % processes == process:
                    question = asked[number]
                    submission = Submission(text, question.answer, question.prompt, question.row)
                    check = self._reward_pool.submit([reward], submission)
                    waiting[drawn.row] = check, extract_answer(text), text if self._loop.evaluations else ""
        own = {
            str(row): [check.result().scores[reward], said and canonicalize(said), text]
            for row, (check, said, text) in waiting.items()
        }
        every = runtime.gather_tree(own)
        rows = [[every[str(q * samples + i)] for i in range(samples)] for q in range(len(asked))]
        return GradedAnswers(
            [[score == 1.0 for score, _, _ in row] for row in rows],
            [[said for _, said, _ in row] for row in rows],
            [[text for _, _, text in row] for row in rows],
            [
                Transcript(asked[q].prompt, asked[q].answer, text, extract_answer(text), rows[q][0][0])
                for q, text in sorted(texts.items())
            ],
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


def _graded_episodes(episodes: Sequence[Episode], samples: int, transcripts: int) -> GradedAnswers:
    """Grade episodes by their rewards. Their answers are those in the policy's last turns."""
    rows = [episodes[i : i + samples] for i in range(0, len(episodes), samples)]
    said = [[extract_answer(episode.responses[-1]) for episode in row] for row in rows]
    kept = rows[:transcripts] if jax.process_index() == 0 else []
    return GradedAnswers(
        [[episode.reward >= 1 for episode in row] for row in rows],
        [[text and canonicalize(text) for text in row] for row in said],
        [[episode.text for episode in row] for row in rows],
        [
            Transcript(e.question.prompt, e.question.answer, e.text, text, e.reward, turns=tuple(e.turns))
            for (e, *_), (text, *_) in zip(kept, said, strict=False)
        ],
        episode_metrics(episodes),
    )

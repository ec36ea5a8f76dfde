"""Answer questions with the policy and grade the answers; each process checks its share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import jax

from trainer.data.problem import Question
from trainer.data.prompting import PromptEncoder
from trainer.distributed import runtime
from trainer.environments.episodes import Episode, Episodes, episode_metrics
from trainer.models.weights import Params
from trainer.rewards.equal import canonicalize
from trainer.rewards.extract import extract_answer
from trainer.rewards.pool import RewardPool, Submission
from trainer.sampler import Sampler
from trainer.telemetry.transcripts import Transcript


@dataclass(frozen=True)
class GradedAnswers:
    """Grades for each sample of every question.

    right: whether the answer is correct; canonical: the answer, normalized so that equal numbers and words match, or
    None; texts: the responses, empty unless they were asked for; transcripts: of the first questions' first samples, on
    process 0; metrics: of the environment's episodes.
    """

    correct: list[list[bool]]
    canonical_answers: list[list[str | None]]
    texts: list[list[str]]
    transcripts: list[Transcript]
    metrics: Mapping[str, float] = field(default_factory=dict)


class AnswerEvaluator:
    """Answers and grades questions. All processes must make the same calls, and all get the same results."""

    def __init__(
        self,
        sampler: Sampler,
        prompting: PromptEncoder,
        checks: RewardPool,
        accuracy_reward: str,
        episodes: Episodes | None = None,
    ) -> None:
        """accuracy_reward: the reward whose score of 1 means that an answer is correct, without an environment."""
        self._episodes = episodes
        self._sampler, self._prompt_encoder, self._reward_pool = sampler, prompting, checks
        self._accuracy_reward = accuracy_reward

    def evaluate(
        self,
        copy: Params,
        questions: Sequence[Question],
        samples: int,
        key: jax.Array,
        temperature: float,
        transcripts: int,
        between: Callable[[], None] = lambda: None,
        *,
        keep_texts: bool = False,
    ) -> GradedAnswers:
        """Answer questions. copy: weights from `Sampler.load`; transcripts: how many questions to record; keep_texts:
        whether every process gets all responses.

        The sampler has no more rows in flight than in training; other rows wait for a slot. between: see
        `Sampler.draw`.
        """
        if self._episodes is not None:
            given = (self._sampler, copy, questions, samples, key, temperature, between)
            return _graded_episodes(self._episodes.play(*given), samples, transcripts)
        prompts = [question.prompt_tokens for question in questions]
        process, processes = jax.process_index(), jax.process_count()
        waiting, texts = {}, {}
        for drawn in self._sampler.generate(copy, prompts, samples, key, temperature, between):
            question, sample = divmod(drawn.row, samples)
            is_kept = process == 0 and sample == 0 and question < transcripts
            if drawn.row % processes == process or is_kept:
                text = self._prompt_encoder.decode(drawn.tokens.tolist())
                if is_kept:
                    texts[question] = text
                if drawn.row % processes == process:
                    asked = questions[question]
                    submission = Submission(text, asked.answer, asked.prompt, asked.row)
                    check = self._reward_pool.submit([self._accuracy_reward], submission)
                    waiting[drawn.row] = check, extract_answer(text), text if keep_texts else ""
        own = {
            str(row): [check.result().scores[self._accuracy_reward], said and canonicalize(said), text]
            for row, (check, said, text) in waiting.items()
        }
        every = runtime.gather_tree(own)
        rows = [[every[str(q * samples + i)] for i in range(samples)] for q in range(len(questions))]
        return GradedAnswers(
            [[score == 1.0 for score, _, _ in row] for row in rows],
            [[said for _, said, _ in row] for row in rows],
            [[text for _, _, text in row] for row in rows],
            [
                Transcript(questions[q].prompt, questions[q].answer, text, extract_answer(text), rows[q][0][0])
                for q, text in sorted(texts.items())
            ],
        )


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

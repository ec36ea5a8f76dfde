"""Rollouts: draw responses, score them and split them into batches for the updates.

Every process holds the whole rollout. Each checks its share of the responses while the next ones are decoded, then they
exchange the scores. The batches therefore do not depend on the number of devices or processes.
"""

import base64
import io
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh

from conf.schema.training.loop import OFFLINE_LOSSES, GrpoLoop
from trainer.data.prompting import Draw, Question
from trainer.data.questions import QuestionSet
from trainer.distributed.mesh import Batch, DeviceBatch
from trainer.distributed.runtime import gather_batch, gather_tree, shard_batch
from trainer.environments.episodes import Episode, Episodes, episode_metrics
from trainer.losses.policy import has_equal_rewards, load_loss, overlong_penalty, sample_weights
from trainer.models.weights import Params
from trainer.rewards.pool import RewardPool, RewardResult, Submission
from trainer.rl.programs import ROUTES, GrpoPrograms, pad_sequences, supervised_batch
from trainer.sampler import Completion, Sampler
from trainer.telemetry.throughput import Stopwatch

if TYPE_CHECKING:
    from trainer.rl.remote.journal import DrawnSample


@dataclass(frozen=True)
class Sample:
    """One response to a question. text: the response as text; episode: where there is an environment."""

    question: Question
    completion: Completion
    text: str
    episode: Episode | None = None

    @property
    def by_model(self) -> np.ndarray:
        """1 for each token that the policy wrote, 0 for those of the environment."""
        return np.array(self.episode.by_model if self.episode else np.ones(len(self.completion.tokens)), np.float32)


@dataclass(frozen=True)
class RewardSummary:
    """Metrics and advantages computed from the rewards.

    metrics: over all samples drawn; batch_fields: advantage and weight for each update; examples: (sample, reward) of
    two questions.
    """

    metrics: dict[str, float]
    batch_fields: list[Batch]
    examples: list[tuple[Sample, float]]


@dataclass(eq=False)
class Rollout:
    """Samples of one policy, split into batches for its updates.

    Attributes:
        batches: one per remaining update, on the host: tokens int32 [B, T], mask and sampler float32 [B, T - 1],
            version int32 [B, T - 1], the updates before the policy that drew each token; after `finish` also advantage
            and weight [B]; with `loop.replay_routes` also routes.
        placed: the same but routes on the devices, with log-probabilities `old`, under the policy that drew, and
            `reference`.
        metrics, examples: see `RewardSummary`.
        outcome: waits for the rewards; None once they are complete.
        mesh: that of `placed`.
        num_tokens: over all responses.
    """

    batches: list[Batch]
    placed: list[DeviceBatch]
    metrics: dict[str, float]
    outcome: Callable[[], RewardSummary] | None
    mesh: Mesh
    num_tokens: int = 0
    examples: list[tuple[Sample, float]] = field(default_factory=list)

    def finish(self) -> None:
        """Wait for the rewards unless they are complete; all processes must call it."""
        if self.outcome is None:
            return
        found, self.outcome = self.outcome(), None
        self.metrics, self.examples = found.metrics, found.examples
        for batch, placed, own in zip(self.batches, self.placed, found.batch_fields, strict=True):
            batch |= own
            placed |= shard_batch(own, self.mesh)

    def pop_batch(self) -> tuple[Batch, DeviceBatch]:
        """Remove and return the next update's batch, on the host and on the devices."""
        batch, placed = self.batches.pop(0), self.placed.pop(0)
        return batch, placed | _shard_routes(batch, self.mesh)

    def to_json(self) -> dict[str, Any]:
        """Return the rollout as JSON, exact to the last bit; all processes must call it."""
        self.finish()
        whole = [
            batch | {name: gather_batch(placed[name]) for name in ("old", "reference")}
            for batch, placed in zip(self.batches, self.placed, strict=True)
        ]
        return {"facts": self.metrics, "batches": [_encode_batch(batch) for batch in whole]}

    @classmethod
    def from_json(cls, saved: dict[str, Any], mesh: Mesh) -> "Rollout":
        """Restore a rollout from `saved`, on any mesh."""
        batches = [_decode_batch(text) for text in saved["batches"]]
        return cls(batches, [_shard_fields(batch, mesh) for batch in batches], saved["facts"], None, mesh)


class RolloutGenerator:
    """Draws rollout number n with a given policy, as a function of (seed, n, policy)."""

    def __init__(
        self,
        loop: GrpoLoop,
        mesh: Mesh,
        seed: int,
        questions: QuestionSet,
        sampler: Sampler,
        programs: GrpoPrograms,
        reward_pool: RewardPool,
        stopwatch: Stopwatch,
        episodes: Episodes | None = None,
    ) -> None:
        """episodes: plays in the environment, if there is one."""
        self._episodes = episodes
        self._loop, self._mesh, self._seed, self._questions = loop, mesh, seed, questions
        self._sampler, self._programs, self._reward_pool, self._stopwatch = sampler, programs, reward_pool, stopwatch
        self._key = jax.random.key(seed)
        self._rewards = reward_names(loop)

    def generate(
        self, params: Params, reference: Params, number: int, between: Callable[[], None], version: int = 0
    ) -> Rollout:
        """Draw a rollout and score it under the policy and the reference; rewards are computed in the background.

        Resamples up to `loop.max_resample_rounds` times until enough groups have unequal rewards; those come first.
        between: called between chunks of decoding; an exception from it ends the draw. version: updates of `params`.
        """
        loop, wanted = self._loop, self._loop.prompts_per_step * self._loop.updates_per_rollout
        if loop.loss_type in OFFLINE_LOSSES:
            batches = self._offline_batches(number)
            return Rollout(batches, self._place(batches, params, reference), {}, None, self._mesh)
        samples, checks, chosen = list[Sample](), dict[int, Future[RewardResult]](), np.arange(wanted)
        with self._stopwatch.measure("rollout_time"):
            copy = self._sampler.load_params(params)
        for attempt in range(1 + loop.max_resample_rounds):
            with self._stopwatch.measure("rollout_time"):
                self._generate_groups(copy, number, attempt, samples, checks, between)
            if loop.max_resample_rounds:
                equal = has_equal_rewards(self._gather_scores(samples, checks)[..., 0])
                chosen = np.argsort(equal, stable=True)[:wanted]
                if not equal[chosen].any():
                    break
        scores = partial(self._gather_scores, samples, checks)
        return self._assemble(number, samples, scores, chosen, params, reference, version)

    def assemble(self, number: int, drawn: "list[DrawnSample]", params: Params, reference: Params) -> Rollout:
        """Return rollout `number` from samples and scores that are there already, scored under policy and reference."""
        loop = self._loop
        asked = self._questions.train(Draw("rollout", number), len(drawn) // loop.group_size)
        decode = self._questions.prompt_encoder.decode
        samples = [
            Sample(
                asked[row // loop.group_size],
                Completion(row, one.tokens, one.logprobs, one.finished, one.versions, one.routes),
                decode(one.tokens.tolist()),
            )
            for row, one in enumerate(drawn)
        ]
        table = np.stack([one.scores for one in drawn]).reshape(-1, loop.group_size, 4)
        return self._assemble(number, samples, lambda: table, np.arange(len(asked)), params, reference, 0)

    def _assemble(
        self,
        number: int,
        samples: list[Sample],
        scores: Callable[[], np.ndarray],
        chosen: np.ndarray,
        params: Params,
        reference: Params,
        version: int,
    ) -> Rollout:
        """Deal the chosen groups to the updates. scores: as from `_gather_scores`."""
        loop = self._loop
        rows = (chosen[:, None] * loop.group_size + np.arange(loop.group_size)).reshape(-1)
        if not loop.keeps_groups_together:
            rows = np.random.default_rng((self._seed, number)).permutation(rows)
        dealt = np.split(rows, loop.updates_per_rollout)
        batches = [build_batch([samples[row] for row in part], loop, version) for part in dealt]
        placed = self._place(batches, params, reference)
        outcome = partial(self._summarize_rewards, samples, scores, chosen, dealt)
        tokens = sum(int(s.by_model.sum()) for s in samples)
        return Rollout(batches, placed, {}, outcome, self._mesh, tokens)

    def _place(self, batches: list[Batch], params: Params, reference: Params) -> list[DeviceBatch]:
        """Return the batches on the devices, scored under the policy and the reference."""
        with self._stopwatch.measure("score_time"):
            placed = [_shard_fields(batch, self._mesh) for batch in batches]
            for batch, own in zip(batches, placed, strict=True):
                given = own | _shard_routes(batch, self._mesh)
                own["old"], own["reference"] = self._programs.score(params, reference, given)
            return jax.block_until_ready(placed)

    def _offline_batches(self, number: int) -> list[Batch]:
        """Return batches of the data's own responses: one per question, or a preferred and a rejected one."""
        loop = self._loop
        rows = 2 if loop.loss_type == "dpo" else 1
        asked = self._questions.train(Draw("rollout", number), loop.rows * loop.updates_per_rollout // rows)
        if rows == 2:
            asked = [each for pair in zip(asked, self._questions.rejected(asked), strict=True) for each in pair]
        ones = np.ones(loop.rows, np.float32)
        parts = [supervised_batch(asked[i : i + loop.rows], loop) for i in range(0, len(asked), loop.rows)]
        return [part | {"sampler": np.zeros_like(part["mask"]), "advantage": ones, "weight": ones} for part in parts]

    def _generate_groups(
        self,
        copy: Params,
        number: int,
        attempt: int,
        samples: list[Sample],
        checks: dict[int, Future[RewardResult]],
        between: Callable[[], None],
    ) -> None:
        """Draw a group for each question of a rollout, and append them to `samples`."""
        loop, first = self._loop, len(samples)
        wanted = loop.prompts_per_step * loop.updates_per_rollout
        questions = self._questions.train(Draw("rollout", number, attempt), wanted)
        prompts = [question.prompt_tokens for question in questions]
        key = jax.random.fold_in(jax.random.fold_in(self._key, attempt), number)
        if self._episodes is not None:
            played = self._episodes.play(
                self._sampler, copy, questions, loop.group_size, key, loop.temperature, between
            )
            for row, episode in enumerate(played, first):
                samples.append(Sample(episode.question, episode.completion(row), episode.text, episode))
            return
        found: dict[int, Sample] = {}
        for drawn in self._sampler.generate(copy, prompts, loop.group_size, key, loop.temperature, between):
            question, row = questions[drawn.row // loop.group_size], first + drawn.row
            text = self._questions.prompt_encoder.decode(drawn.tokens.tolist())
            found[row] = Sample(question, drawn, text)
            if row % jax.process_count() == jax.process_index():
                submission = Submission(text, question.answer, question.prompt, question.row)
                checks[row] = self._reward_pool.submit(self._rewards, submission)
        samples += [found[row] for row in range(first, first + len(found))]

    def _gather_scores(self, samples: list[Sample], checks: dict[int, Future[RewardResult]]) -> np.ndarray:
        """Return all processes' scores, as of `score_sample`: float64 [groups, samples, 4].

        Those of episodes are the environment's.
        """
        if played := [sample.episode for sample in samples if sample.episode]:
            table = [
                (e.reward, e.reward >= 1, e.failure == "timeout", e.failure not in ("", "timeout")) for e in played
            ]
            return np.array(table, np.float64).reshape(-1, self._loop.group_size, 4)
        with self._stopwatch.measure("reward_time"):
            found = {row: check.result() for row, check in checks.items()}
            own = {str(row): score_sample(check, self._loop) for row, check in found.items()}
            everyone = gather_tree(own)
        table = np.array([everyone[str(row)] for row in range(len(samples))], np.float64)
        return table.reshape(-1, self._loop.group_size, 4)

    def _summarize_rewards(
        self,
        samples: list[Sample],
        gather: Callable[[], np.ndarray],
        chosen: np.ndarray,
        dealt: list[np.ndarray],
    ) -> RewardSummary:
        """Summarize the rewards. chosen: groups that the updates learn from; dealt: each update's sample indices."""
        loop, scores = self._loop, gather()
        lengths = np.array([len(s.completion.tokens) for s in samples]).reshape(scores.shape[:2])
        truncated = np.array([not s.completion.finished for s in samples], np.float32).reshape(lengths.shape)
        equal = np.repeat(has_equal_rewards(scores[..., 0])[:, None], loop.group_size, axis=1).astype(np.float32)
        rewards = scores[..., 0] + overlong_penalty(lengths, loop)
        counted = sample_weights(equal, truncated, loop)
        used = np.zeros(lengths.shape, np.float32)
        used[chosen] = 1
        facts = {
            "reward_mean": rewards.mean(),
            "reward_std": rewards.std(axis=1).mean(),
            "accuracy": scores[..., 1].mean(),
            "pass_at_k": scores[..., 1].max(axis=1).mean(),
            "response_length": lengths.mean(),
            "response_length_max": lengths.max(),
            "truncated": truncated.mean(),
            "zero_variance_groups": has_equal_rewards(rewards).mean(),
            "filtered_equal": counted["filtered_equal"].mean(),
            "filtered_overlong": counted["filtered_overlong"].mean(),
            "unused": ((1 - used) * counted["weight"]).mean(),
            "samples_drawn": len(samples),
            "checks_timed_out": scores[..., 2].mean(),
            "checks_failed": scores[..., 3].mean(),
        } | episode_metrics([sample.episode for sample in samples if sample.episode])
        advantages = load_loss(loop).advantages(rewards).reshape(-1)
        weights = counted["weight"].reshape(-1)
        return RewardSummary(
            {name: float(value) for name, value in facts.items()},
            [{"advantage": advantages[part], "weight": weights[part]} for part in dealt],
            [(samples[row], float(rewards.flat[row])) for row in (0, len(samples) - 1)],
        )


def reward_names(loop: GrpoLoop) -> list[str]:
    """Return the rewards that a response is scored by."""
    return list(dict.fromkeys([*loop.rewards, loop.accuracy_reward]))


def score_sample(check: RewardResult, loop: GrpoLoop) -> list[float]:
    """Return reward, whether the answer is correct, checks that timed out, and checks that failed."""
    reward = sum(weight * check.scores[name] for name, weight in loop.rewards.items())
    return [reward, float(check.scores[loop.accuracy_reward] == 1.0), check.timed_out, check.failed]


def build_batch(samples: list[Sample], loop: GrpoLoop, version: int = 0) -> Batch:
    """Return tokens, mask, and the sampler's log-probabilities and versions, padded to the smallest bucket that fits.

    version: that of all tokens of completions that do not know theirs.
    """
    longest = max(len(s.question.prompt_tokens) + len(s.completion.tokens) for s in samples)
    width = next(width for width in loop.row_widths if width >= longest)
    tokens, mask = pad_sequences(
        [s.question.prompt_tokens for s in samples], [s.completion.tokens.tolist() for s in samples], width
    )
    logprobs = np.zeros(mask.shape, np.float32)
    logprobs[mask == 1] = np.concatenate([s.completion.logprobs for s in samples])
    versions = np.full(mask.shape, version, np.int32)
    for row, sample in enumerate(samples):
        if sample.completion.versions is not None:
            versions[row, mask[row] == 1] = sample.completion.versions
    mask[mask == 1] = np.concatenate([s.by_model for s in samples])
    batch = {"tokens": tokens, "mask": mask, "sampler": logprobs, "version": versions}
    known = [s.completion.routes for s in samples if s.completion.routes is not None]
    return batch | ({ROUTES: _pad_routes(known, width)} if known else {})


def _pad_routes(known: list[np.ndarray], width: int) -> np.ndarray:
    """Return the routes of rows [n, layers, per_token], padded on the right, as [B, width, layers * per_token]."""
    found = np.zeros((len(known), width, known[0][0].size), known[0].dtype)
    for row, routes in enumerate(known):
        found[row, : len(routes)] = routes.reshape(len(routes), -1)
    return found


def staleness(batch: Batch, step: int) -> dict[str, float]:
    """Return how many updates before update `step` (from 0) the policies were that drew the batch's tokens.

    Empty for batches of the data's own responses, and for those of checkpoints that do not know.
    """
    if "version" not in batch:
        return {}
    behind = step - batch["version"][batch["mask"] == 1]
    return {"staleness_mean": float(behind.mean()), "staleness_max": float(behind.max())}


def _shard_fields(batch: Batch, mesh: Mesh) -> DeviceBatch:
    """Place what the programs read on the devices, but routes, which are large."""
    return shard_batch({name: values for name, values in batch.items() if name not in ("version", ROUTES)}, mesh)


def _shard_routes(batch: Batch, mesh: Mesh) -> DeviceBatch:
    """Place the routes, if there are some, for the one program that reads them next."""
    return shard_batch({name: batch[name] for name in (ROUTES,) if name in batch}, mesh)


def _encode_batch(batch: Batch) -> str:
    content = io.BytesIO()
    np.savez_compressed(content, **batch)  # pyright: ignore[reportArgumentType]
    return base64.b64encode(content.getvalue()).decode()


def _decode_batch(text: str) -> Batch:
    with np.load(io.BytesIO(base64.b64decode(text))) as found:
        return dict(found)

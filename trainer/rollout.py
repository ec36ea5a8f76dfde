"""Questions in, scored responses out: what the host does around the sampler.

Every process has all responses, and scores those whose rows its own devices train on. Scores have a value for every
row of the batch, right only where the row is this process's own: `place_batch` takes no others. A group never spans
devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh

from conf.decoder import Model
from conf.loop import GrpoLoop
from trainer import advantage
from trainer import mesh as meshes
from trainer.data.problem import Question
from trainer.data.prompting import Prompting
from trainer.rewards.pool import Pool
from trainer.sampler import Sampler, Settings, Stops
from trainer.weights import Params

PAD = 0
"""Stands behind the end of a row, where nothing looks."""


@dataclass(frozen=True)
class Drawn:
    """Responses on the host: tokens int32 [B, R], their log-probabilities by the sampler float32 [B, R], lengths int32
    [B], whether something but its length ended each, bool [B]; `rows` are those that this process scores; `decode`
    gives the text of tokens."""

    tokens: np.ndarray
    logprobs: np.ndarray
    lengths: np.ndarray
    ended: np.ndarray
    rows: list[int]
    decode: Callable[[Sequence[int]], str]

    def text(self, row: int) -> str:
        return self.decode(self.tokens[row, : self.lengths[row]].tolist())


def rows_per_rollout(loop: GrpoLoop) -> int:
    """Samples drawn with one policy."""
    return loop.prompts * loop.updates_per_rollout * loop.samples


def build_sampler(cfg: Model, loop: GrpoLoop, mesh: Mesh, prompting: Prompting) -> Sampler:
    """Of rollouts, and of evaluations with the same programs."""
    return Sampler(cfg, settings(loop), mesh, Stops(prompting.ends, loop.sampler.stop, prompting.decode))


def settings(loop: GrpoLoop) -> Settings:
    """Those of the loop's sampler."""
    return Settings.of(loop.sampler, loop.prompt_length, loop.response_length, rows_per_rollout(loop))


def draw(
    sampler: Sampler,
    copy: Params,
    problems: Sequence[Question],
    samples: int,
    loop: GrpoLoop,
    mesh: Mesh,
    key: jax.Array,
    heat: float,
    prompting: Prompting,
) -> Drawn:
    """`samples` responses to each of the problems, those of a problem in a row."""
    count = len(problems) * samples
    tokens = np.full((count, loop.response_length), PAD, np.int32)
    logprobs = np.zeros(tokens.shape, np.float32)
    lengths, ended = np.zeros(count, np.int32), np.zeros(count, bool)
    for found in sampler.draw(copy, [p.tokens for p in problems], samples, key, heat):
        lengths[found.row], ended[found.row] = len(found.tokens), found.ended
        tokens[found.row, : len(found.tokens)] = found.tokens
        logprobs[found.row, : len(found.tokens)] = found.logprobs
    return Drawn(tokens, logprobs, lengths, ended, own_rows(mesh, count), prompting.decode)


def own_rows(mesh: Mesh, count: int) -> list[int]:
    """Of so many rows, filled up to what the devices share evenly, those that devices of this process hold."""
    shards = meshes.shards(mesh, "batch")
    filled = -(-count // shards) * shards
    held = meshes.named(mesh, "batch").addressable_devices_indices_map((filled,))
    rows = {row for index in held.values() if index for row in range(*index[0].indices(filled))}
    return sorted(row for row in rows if row < count)


def scored(drawn: Drawn, problems: Sequence[Question], loop: GrpoLoop, checks: Pool) -> dict[str, np.ndarray]:
    """A batch for `grpo.loss`, without log-probabilities but the sampler's. problems: of each row, the samples of a
    group in a row. Whether a group is left out for equal rewards is seen before the penalty of long responses."""
    rewards, correct, timed_out, failed = np.zeros((4, len(problems)), np.float32)
    names = list(dict.fromkeys([*loop.rewards, "answer_match"]))
    waiting = {row: checks.submit(names, drawn.text(row), problems[row].answer) for row in drawn.rows}
    for row, check in waiting.items():
        found = check.result()
        rewards[row] = sum(weight * found.scores[name] for name, weight in loop.rewards.items())
        correct[row], timed_out[row], failed[row] = found.scores["answer_match"], found.timed_out, found.failed
    solved = correct.reshape(-1, loop.samples).max(axis=1)
    equal = _equal(rewards, loop)
    rewards = rewards + advantage.overlong_penalty(drawn.lengths, loop)
    groups = rewards.reshape(-1, loop.samples)
    truncated = (~drawn.ended).astype(np.float32)
    tokens, mask = sequences(
        [p.tokens for p in problems],
        [drawn.tokens[row, : drawn.lengths[row]].tolist() for row in range(len(problems))],
        loop,
    )
    sampler = np.zeros(mask.shape, np.float32)
    sampler[mask == 1] = drawn.logprobs[np.arange(loop.response_length) < drawn.lengths[:, None]]
    return advantage.weights(equal, truncated, loop) | {
        "tokens": tokens,
        "mask": mask,
        "sampler": sampler,
        "advantage": advantage.advantages(groups, loop.advantage_std, loop.loss == "rloo").reshape(-1),
        "reward_mean": rewards,
        "reward_std": np.repeat(groups.std(axis=1), loop.samples),
        "accuracy": correct,
        "pass_at_k": np.repeat(solved, loop.samples),
        "response_length": drawn.lengths.astype(np.float32),
        "truncated": truncated,
        "zero_variance_groups": _equal(rewards, loop),
        "checks_timed_out": timed_out,
        "checks_failed": failed,
    }


def _equal(rewards: np.ndarray, loop: GrpoLoop) -> np.ndarray:
    """1 for the samples of a group whose rewards are all equal: float32 [B]."""
    groups = rewards.reshape(-1, loop.samples)
    return np.repeat((groups.max(axis=1) == groups.min(axis=1)).astype(np.float32), loop.samples)


def correct(drawn: Drawn, problems: Sequence[Question], checks: Pool) -> np.ndarray:
    """1 where a row of this process answers its problem rightly: float32 [B]."""
    found = np.zeros(len(problems), np.float32)
    waiting = {row: checks.submit(["answer_match"], drawn.text(row), problems[row].answer) for row in drawn.rows}
    for row, check in waiting.items():
        found[row] = check.result().scores["answer_match"]
    return found


def supervised(problems: Sequence[Question], loop: GrpoLoop) -> dict[str, np.ndarray]:
    """A batch for `grpo.supervised_loss`: the worked responses, cut off where a drawn one would be."""
    responses = [p.worked[: loop.response_length] for p in problems]
    tokens, mask = sequences([p.tokens for p in problems], responses, loop)
    return {"tokens": tokens, "mask": mask}


def sequences(prompts: list[list[int]], responses: list[list[int]], loop: GrpoLoop) -> tuple[np.ndarray, np.ndarray]:
    """Prompt and response end to end, padded to the right: int32 [B, T], and mask float32 [B, T - 1].

    The mask is 1 at a position whose next token is of the response.
    """
    width = loop.prompt_length + loop.response_length
    tokens = np.full((len(prompts), width), PAD, np.int32)
    mask = np.zeros((len(prompts), width - 1), np.float32)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        end = len(prompt) + len(response)
        tokens[row, :end] = prompt + response
        mask[row, len(prompt) - 1 : end - 1] = 1
    return tokens, mask


def split(
    batch: dict[str, np.ndarray], parts: int, shards: int, random: np.random.Generator
) -> list[dict[str, np.ndarray]]:
    """The rows of a rollout, shuffled and dealt out to `parts` updates; a row stays with the device that drew it."""
    if parts == 1:
        return [batch]
    count = len(batch["mask"])
    order = np.stack([random.permutation(count // shards) for _ in range(shards)])
    order += np.arange(shards)[:, None] * (count // shards)
    return [{k: v[chosen.reshape(-1)] for k, v in batch.items()} for chosen in np.split(order, parts, axis=1)]

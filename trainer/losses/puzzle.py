"""One step of deep supervision (https://arxiv.org/abs/2510.04871, section 4), for training and for evaluation.

Every row carries its puzzle, its states and its number of steps from one update to the next. A row that has halted
takes the puzzle of the incoming batch in the next one.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from conf.schema.training.loop_parts import PuzzleLoop, Trm
from trainer.distributed.mesh import DeviceBatch
from trainer.models import trm
from trainer.models.weights import Params
from trainer.step.metric_sums import Mean, MetricSums
from trainer.step.train_step import CarryLossFn

IGNORED = 0
"""Label of a cell that does not count."""


class Carry(NamedTuple):
    """What each row hands to the next update. All rows have halted at first."""

    latents: Any  # trm.Latents, [B, length, dim]
    steps: Any  # int32 [B]: supervision steps of the puzzle
    halted: Any  # bool [B]
    puzzle: Any  # inputs and labels, int32 [B, cells], and ids, int32 [B]


class Answer(NamedTuple):
    """A step's result: logits [B, cells, vocab] and halt [B], what a row has right, and its mean nats per cell [B]."""

    logits: jax.Array
    halt: jax.Array
    cells: jax.Array  # share of the cells
    exact: jax.Array  # bool: all cells
    nats: jax.Array


def initial_carry(cfg: Trm, rows: int) -> Carry:
    """Return the carry before the first update."""
    latent = jnp.zeros((rows, cfg.length, cfg.dim), cfg.activation_dtype)
    cells, ids = jnp.zeros((rows, cfg.seq_len), jnp.int32), jnp.zeros(rows, jnp.int32)
    puzzle = {"inputs": cells, "labels": cells, "ids": ids}
    return Carry(trm.Latents(latent, latent), ids, jnp.ones(rows, bool), puzzle)


def advance(params: Params, cfg: Trm, carry: Carry, batch: DeviceBatch) -> tuple[Carry, Answer, jax.Array]:
    """Return the carry after one step, its answer, and the mean squared change of z_H [B]; halted is not updated."""
    fresh = carry.halted
    puzzle = {name: jnp.where(_like(fresh, x), batch[name], x) for name, x in carry.puzzle.items()}
    start = trm.initial_latents(params, cfg)
    before = jax.tree.map(lambda first, x: jnp.where(_like(fresh, x), first, x), start, carry.latents)
    x = trm.embed(params, cfg, puzzle["inputs"], puzzle["ids"])
    after = trm.recurse(params, cfg, before, x)
    logits, halt = trm.heads(params, cfg, after.h)
    change = jnp.square((after.h - lax.stop_gradient(before.h)).astype(jnp.float32)).mean(axis=(1, 2))
    steps = jnp.where(fresh, 0, carry.steps) + 1
    new = Carry(lax.stop_gradient(after), steps, fresh, puzzle)
    return new, _judge(logits, halt, puzzle["labels"]), change


def loss(cfg: Trm, loop: PuzzleLoop) -> CarryLossFn:
    """Return the loss of an update. A batch has a puzzle for each row, and `min_steps` before which it goes on."""

    def sums(params: Params, batch: DeviceBatch, carry: Carry) -> tuple[MetricSums, Carry]:
        new, answer, change = advance(params, cfg, carry, batch)
        halted = new.steps >= loop.supervision_steps
        halted |= (answer.halt > 0) & (new.steps >= batch["min_steps"])
        q_nats = jax.nn.softplus(answer.halt) - answer.exact * answer.halt  # cross-entropy of the halting logit
        rows, counted = jnp.float32(len(halted)), halted & (new.puzzle["labels"] != IGNORED).any(axis=1)
        total = answer.nats.sum() + loop.q_loss_weight * q_nats.sum()
        named = {"lm_loss": Mean(answer.nats.sum(), rows), "q_loss": Mean(q_nats.sum(), rows)}
        if loop.consistency_weight:
            changes = jnp.where(new.steps > 1, change, 0).sum()  # the initial state is no answer
            total += loop.consistency_weight * changes
            named["consistency"] = Mean(changes, rows)
        of_halted = {"cell_accuracy": answer.cells, "exact_accuracy": answer.exact, "steps": new.steps}
        of_halted["q_accuracy"] = (answer.halt >= 0) == answer.exact
        named |= {name: Mean(jnp.where(counted, x, 0).sum(), counted.sum()) for name, x in of_halted.items()}
        named["halted"] = Mean(halted.sum(), rows)
        return {"loss": Mean(total, rows), **named}, new._replace(halted=halted)

    return sums


def build_eval(cfg: Trm, loop: PuzzleLoop, boards: int) -> Callable[[Params, DeviceBatch], dict[str, jax.Array]]:
    """Return a function that solves a batch in exactly `supervision_steps` steps.

    It returns, per row, `exact` and `halt` [B, steps], the last step's `cells` and `nats` [B], and the answers to the
    first puzzles, [steps, boards, cells].
    """

    def solve(params: Params, batch: DeviceBatch) -> dict[str, jax.Array]:
        def step(carry: Carry, none: None) -> tuple[Carry, Any]:
            del none
            new, answer, _ = advance(params, cfg, carry, batch)
            shown = answer.logits[:boards].argmax(axis=-1)
            return new._replace(halted=jnp.zeros_like(new.halted)), (answer._replace(logits=shown))

        first = initial_carry(cfg, len(batch["inputs"]))
        _, each = lax.scan(step, first, length=loop.supervision_steps)
        last = {"cells": each.cells[-1], "nats": each.nats[-1]}
        return {"exact": each.exact.T, "halt": each.halt.T, "boards": each.logits, **last}

    return solve


def log_stablemax(logits: jax.Array) -> jax.Array:
    """Return log(s(x) / sum s(x)) over the last axis, where s(x) is x + 1 above 0 and 1 / (1 - x) below.

    In this form every branch of the gradient is finite, also those that are not taken.
    """
    log_s = jnp.where(logits < 0, -jnp.log1p(-jnp.minimum(logits, 0)), jnp.log1p(jnp.maximum(logits, 0)))
    return log_s - jax.nn.logsumexp(log_s, axis=-1, keepdims=True)


def _judge(logits: jax.Array, halt: jax.Array, labels: jax.Array) -> Answer:
    counts = labels != IGNORED
    total = jnp.maximum(counts.sum(axis=1), 1)
    right = counts & (logits.argmax(axis=-1) == labels)
    logprobs = jnp.take_along_axis(log_stablemax(logits), labels[..., None], axis=-1)[..., 0]
    nats = -jnp.where(counts, logprobs, 0).sum(axis=1) / total
    return Answer(logits, halt, right.sum(axis=1) / total, (right == counts).all(axis=1), nats)


def _like(rows: jax.Array, x: jax.Array) -> jax.Array:
    return rows.reshape(-1, *(1,) * (x.ndim - 1))

"""Before GRPO: supervised updates on worked answers, until the policy is right often enough to see a difference."""

from __future__ import annotations

import time

import jax
from jax.sharding import Mesh

from conf.loop import GrpoLoop
from conf.optimizer import Optimizer
from conf.runfile import RunFile
from trainer import grpo, rollout, update
from trainer.data.questions import Asked
from trainer.distributed import place_batch
from trainer.loops.grpo_journal import Journal, Position
from trainer.loops.grpo_programs import updater


def optimizer(opt: Optimizer, loop: GrpoLoop) -> Optimizer:
    """The optimizer of the warm start."""
    return opt.constant(loop.warm_start_lr)


def warm_start(
    experiment: RunFile,
    loop: GrpoLoop,
    mesh: Mesh,
    problems: Asked,
    journal: Journal,
    state: update.State,
    position: Position,
) -> update.State:
    """From where the position is to the end of the phase; the position goes along."""
    train = updater(grpo.supervised_loss(experiment.model), experiment, optimizer(experiment.optimizer, loop), mesh)
    rows = rollout.rows_per_rollout(loop) // loop.updates_per_rollout
    last = loop.warm_start_steps
    if position.warm_steps == 0:
        position.accuracy_start = journal.evaluate(state, position, "warm_start", "accuracy at the start")
        position.accuracy_before = position.accuracy_start
    while position.accuracy_before < loop.warm_start_until and position.warm_steps < last:
        done = position.warm_steps
        logged = (done + 1) % experiment.logging.every == 0
        if logged:
            jax.block_until_ready(state)  # so that the time of this step is its own
        began = time.perf_counter()
        drawn = rollout.supervised(problems.train(done, rows), loop)
        batch = place_batch(drawn, mesh)
        state, metrics = journal.timed(train, state, batch) if done == 0 else train(state, batch)
        position.warm_steps += 1
        journal.note(position.total, metrics, drawn)
        if logged:
            metrics = jax.device_get(metrics)
            journal.line("warm_start", position, metrics, time.perf_counter() - began, float(batch["mask"].size))
        if position.warm_steps % loop.warm_start_eval_every == 0 or position.warm_steps == last:
            words = "accuracy in the warm start"
            position.accuracy_before = journal.evaluate(state, position, "warm_start", words)
        if position.total % experiment.checkpoint.every == 0:
            journal.save(state, position)
    position.phase = "grpo"
    if jax.process_index() == 0:
        words = f"{position.accuracy_before:.3f} on {loop.eval_prompts} held-out prompts"
        print(f"accuracy before GRPO: {words}", flush=True)
    return state

"""GRPO after a supervised warm start: the loop, read from top to bottom.

A step draws a group of responses to each of its questions, scores them, and moves the policy towards those that did
better than their group. Batches, samples and shuffles are functions of (seed, step): a resume, in either phase, goes on
to the same parameters, bit for bit.
"""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from conf.loop import GrpoLoop, UnevenError
from conf.optimizer import Optimizer
from conf.runfile import RunFile, RunFileError
from trainer import grpo, rollout, update, weights
from trainer import mesh as meshes
from trainer.checkpoint import Checkpoints
from trainer.data import questions
from trainer.data.prompting import Prompting
from trainer.distributed import place_batch
from trainer.evaluation import Evaluation
from trainer.loops import grpo_warm_start
from trainer.loops.grpo_journal import Journal, Position
from trainer.loops.grpo_programs import abstract_params, logprobs, programs, updater
from trainer.metrics import Metrics
from trainer.rewards import resolve
from trainer.rewards.pool import Pool

__all__ = ["programs", "run"]


def run(experiment: RunFile, mesh: Mesh, log: Metrics) -> None:
    """Train from the newest checkpoint, or from the seed, to the last step. Raises RunFileError before any work."""
    loop = _checked(experiment, mesh)
    with Pool(loop.reward_workers, loop.reward_seconds) as checks:
        run = Run(experiment, loop, mesh, log, checks)
        with run.checkpoints:
            run.run()


class Run:
    """One run of the loop: its programs, its data, and the phases in their order."""

    def __init__(self, experiment: RunFile, loop: GrpoLoop, mesh: Mesh, log: Metrics, checks: Pool) -> None:
        self.experiment, self.loop, self.mesh, self.log, self.checks = experiment, loop, mesh, log, checks
        self.cfg = experiment.model
        self.problems = questions.of(experiment, loop)
        self.prompting = self.problems.prompting
        _check_vocab(experiment, self.prompting)
        self.key = jax.random.key(experiment.seed)
        self.checkpoints = Checkpoints(experiment.dir, experiment.checkpoint, metrics=("eval_accuracy",))
        self.sampler = rollout.build_sampler(self.cfg, loop, mesh, self.prompting)
        held_out = self.problems.held_out(loop.eval_prompts)
        evaluation = Evaluation(held_out, self.prompting, loop, mesh, self.sampler, checks)
        self.journal = Journal(experiment, loop, log, self.checkpoints, evaluation)

    def run(self) -> None:
        state, position = self._start()
        self.log.resume(position.total)
        if (left_out := self.problems.too_long) and jax.process_index() == 0:
            print(f"{left_out} questions are longer than loop.prompt_length and never asked", flush=True)
        if position.phase == "warm_start":
            state = grpo_warm_start.warm_start(
                self.experiment, self.loop, self.mesh, self.problems, self.journal, state, position
            )
            self.checkpoints.save_reference(state.params)
            state = self._fresh(state, self.experiment.optimizer)
            reference = jax.tree.map(jnp.copy, state.params)  # the policy's buffers are given up at each update
        else:
            reference = self.checkpoints.restore_reference(abstract_params(self.cfg, self.mesh))
        state = self._grpo(state, reference, position)
        self.journal.save(state, position)
        after = self.journal.evaluate(state, position, "eval", "accuracy after GRPO")
        self.log.summarize(
            accuracy_before=position.accuracy_before,
            accuracy_after=after,
            eval_prompts=self.loop.eval_prompts,
            warm_start_steps=position.warm_steps,
            steps=position.steps,
            questions_left_out=self.problems.too_long,
        )

    def _start(self) -> tuple[update.State, Position]:
        """State and position of the newest checkpoint, else of a new run."""
        opt = self.experiment.optimizer
        resumed = self.checkpoints.resume(update.abstract_state(self.cfg, opt, self.mesh))
        if resumed is None:
            return update.init_state(
                self.cfg, grpo_warm_start.optimizer(opt, self.loop), self.mesh, self.key
            ), Position()
        return resumed.state, Position(**resumed.position)

    def _fresh(self, state: update.State, opt: Optimizer) -> update.State:
        """The same weights, with an optimizer that has seen nothing."""
        shardings = update.state_shardings(self.cfg, opt, self.mesh)
        make = jax.jit(lambda p: update.fresh(p, self.cfg, opt), out_shardings=shardings, donate_argnums=0)
        return make(state.params)

    def _grpo(self, state: update.State, reference: weights.Params, position: Position) -> update.State:
        loop = self.loop
        train = updater(grpo.loss(self.cfg, loop), self.experiment, self.experiment.optimizer, self.mesh)
        score = logprobs(self.experiment, loop, self.mesh)
        first = position.steps
        while position.steps < loop.steps:
            if position.steps and position.steps % loop.eval_every == 0:
                self.journal.evaluate(state, position, "eval", "accuracy")
            self.checkpoints.verify(position.total, state)
            began = time.perf_counter()
            compiled_before = self.journal.compile_seconds
            batches = self._rollout(state.params, position)
            told: list[dict[str, jax.Array]] = []
            placed = [place_batch(b, self.mesh) for b in batches]
            for batch in placed:  # all under the policy that drew them, before the first update
                batch["old"], batch["reference"] = score(state.params, reference, batch)
            for rows, batch in zip(batches, placed, strict=True):
                if position.steps == first and not told:
                    state, metrics = self.journal.timed(train, state, batch)
                else:
                    state, metrics = train(state, batch)
                told.append(metrics)
                self.journal.note(position.total + 1, metrics, rows)
            position.steps += 1
            if position.steps % self.experiment.logging.every == 0 or position.steps == loop.steps:
                values = grpo.of_all_updates(jax.device_get(told))  # waits for the step, so that its time is its own
                seconds = time.perf_counter() - began - (self.journal.compile_seconds - compiled_before)
                drawn = float(values["response_length"]) * rollout.rows_per_rollout(loop)
                self.journal.line("grpo", position, values, seconds, drawn)
            if self.checkpoints.due(position.total, evaluates=position.steps % loop.eval_every == 0):
                self.journal.save(state, position)
        return state

    def _rollout(self, params: weights.Params, position: Position) -> list[dict[str, np.ndarray]]:
        """Draw and score the step's samples, dealt out to its updates."""
        loop, step = self.loop, position.steps
        questions = self.problems.train(1_000_000_000 + step, loop.prompts * loop.updates_per_rollout)
        repeated = [q for q in questions for _ in range(loop.samples)]
        key = jax.random.fold_in(self.key, step)
        copy = self.sampler.load(params)
        drawn = rollout.draw(
            self.sampler, copy, questions, loop.samples, loop, self.mesh, key, loop.temperature, self.prompting
        )
        random = np.random.default_rng((self.experiment.seed, step))
        parts = loop.updates_per_rollout
        scored = rollout.scored(drawn, repeated, loop, self.checks)
        return rollout.split(scored, parts, meshes.shards(self.mesh, "batch"), random)


def _checked(experiment: RunFile, mesh: Mesh) -> GrpoLoop:
    loop = experiment.loop
    if not isinstance(loop, GrpoLoop):
        raise TypeError(f"a grpo loop is wanted, not {loop.kind}")
    if (longest := loop.prompt_length + loop.response_length) > experiment.model.context:
        raise RunFileError(
            f"loop.prompt_length and loop.response_length: together {longest} tokens, more than model.context, "
            f"{experiment.model.context}"
        )
    try:
        loop.accumulation(meshes.shards(mesh, "batch"))
    except UnevenError as error:
        raise RunFileError(str(error)) from None
    for name in loop.rewards:
        resolve(name)
    return loop


def _check_vocab(experiment: RunFile, prompting: Prompting) -> None:
    known, wanted = experiment.model.vocab, prompting.vocab
    if known < wanted:
        raise RunFileError(
            f"model.vocab: {known} ids are too few for data.tokenizer, which has {wanted}; take at least {wanted}, or "
            "the tokenizer that belongs to the weights"
        )

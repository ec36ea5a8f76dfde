"""GRPO after a supervised warm start: the loop, read from top to bottom.

A step draws a group of responses to each of its questions, scores them, and moves the policy towards those that did
better than their group. Batches, samples and shuffles are functions of (seed, step): a resume, in either phase, goes on
to the same parameters, bit for bit.
Left out so far: length buckets, slot refill, tokenizers other than bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from conf.data import ArithmeticData, Gsm8kData
from conf.loop import GrpoLoop, UnevenError
from conf.optimizer import Optimizer
from conf.runfile import RunFile, RunFileError
from trainer import grpo, rollout, sampler, tokenizer, update, weights
from trainer import mesh as meshes
from trainer.checkpoint import Checkpoints
from trainer.data.arithmetic import Arithmetic
from trainer.data.gsm8k import Gsm8k
from trainer.data.problem import Problems
from trainer.distributed import place_batch
from trainer.diverged import check_finite
from trainer.metrics import Metrics
from trainer.program import Program, abstract_rows
from trainer.rewards import resolve
from trainer.rewards.pool import Pool

Logprobs = Callable[[weights.Params, weights.Params, dict[str, jax.Array]], tuple[jax.Array, jax.Array]]
"""(policy, reference, batch) to the log-probabilities of the batch's tokens under each, [B, T - 1]."""


def run(experiment: RunFile, mesh: Mesh, log: Metrics) -> None:
    """Train from the newest checkpoint, or from the seed, to the last step. Raises RunFileError before any work."""
    loop = _checked(experiment, mesh)
    with Pool(loop.reward_workers, loop.reward_seconds) as checks:
        run = Run(experiment, loop, mesh, log, checks)
        with run.checkpoints:
            run.run()


@dataclass
class Position:
    """Where the run is, apart from the arrays: what a checkpoint keeps as JSON."""

    phase: str = "warm_start"
    warm_steps: int = 0  # supervised updates done
    steps: int = 0  # GRPO steps done
    accuracy_start: float = 0.0
    accuracy_before: float = 0.0  # of the newest evaluation before GRPO

    @property
    def total(self) -> int:
        """Both phases on one axis: the step of metrics and checkpoints."""
        return self.warm_steps + self.steps


class Run:
    """One run of the loop: its programs, its data, and the phases in their order."""

    def __init__(self, experiment: RunFile, loop: GrpoLoop, mesh: Mesh, log: Metrics, checks: Pool) -> None:
        self.experiment, self.loop, self.mesh, self.log, self.checks = experiment, loop, mesh, log, checks
        self.cfg = experiment.model
        self.problems = _problems(experiment, loop)
        self.key = jax.random.key(experiment.seed)
        self.held_out = self.problems.held_out(loop.eval_prompts)
        self.checkpoints = Checkpoints(experiment.dir, experiment.checkpoint, metrics=("eval_accuracy",))
        self.sample = sampler.build(self.cfg, loop.response_length, mesh)
        self.total_of = jax.jit(jnp.sum)
        self.unseen: tuple[int, Any, Any] | None = None
        self.compile_seconds = 0.0

    def run(self) -> None:
        state, position = self._start()
        self.log.resume(position.total)
        if position.phase == "warm_start":
            state, position = self._warm_start(state, position)
            self.checkpoints.save_reference(state.params)
            state = self._fresh(state, self.experiment.optimizer)
            reference = jax.tree.map(jnp.copy, state.params)  # the policy's buffers are given up at each update
        else:
            reference = self.checkpoints.restore_reference(_abstract_params(self.cfg, self.mesh))
        state = self._grpo(state, reference, position)
        self._save(state, position)
        after = self._evaluate(state, position, "eval", "accuracy after GRPO")
        self.log.summarize(
            accuracy_before=position.accuracy_before,
            accuracy_after=after,
            eval_prompts=len(self.held_out),
            warm_start_steps=position.warm_steps,
            steps=position.steps,
        )

    def _start(self) -> tuple[update.State, Position]:
        """State and position of the newest checkpoint, else of a new run."""
        opt = self.experiment.optimizer
        resumed = self.checkpoints.resume(update.abstract_state(self.cfg, opt, self.mesh))
        if resumed is None:
            return update.init_state(self.cfg, _warm(opt, self.loop), self.mesh, self.key), Position()
        return resumed.state, Position(**resumed.position)

    def _fresh(self, state: update.State, opt: Optimizer) -> update.State:
        """The same weights, with an optimizer that has seen nothing."""
        shardings = update.state_shardings(self.cfg, opt, self.mesh)
        make = jax.jit(lambda p: update.fresh(p, self.cfg, opt), out_shardings=shardings, donate_argnums=0)
        return make(state.params)

    def _warm_start(self, state: update.State, position: Position) -> tuple[update.State, Position]:
        """Supervised updates on worked answers, until the policy is right often enough for GRPO to see a difference."""
        opt = _warm(self.experiment.optimizer, self.loop)
        train = updater(grpo.supervised_loss(self.cfg), self.experiment, opt, self.mesh)
        rows = rollout.rows_per_rollout(self.loop) // self.loop.updates_per_rollout
        last = self.loop.warm_start_steps
        if position.warm_steps == 0:
            position.accuracy_start = self._evaluate(state, position, "warm_start", "accuracy at the start")
            position.accuracy_before = position.accuracy_start
        while position.accuracy_before < self.loop.warm_start_until and position.warm_steps < last:
            done = position.warm_steps
            logged = (done + 1) % self.experiment.logging.every == 0
            if logged:
                jax.block_until_ready(state)  # so that the time of this step is its own
            began = time.perf_counter()
            drawn = rollout.supervised(self.problems.train(done, rows), self.loop)
            batch = place_batch(drawn, self.mesh)
            state, metrics = self._timed(train, state, batch) if done == 0 else train(state, batch)
            position.warm_steps += 1
            self._note(position.total, metrics, drawn)
            if logged:
                metrics = jax.device_get(metrics)
                self._log("warm_start", position, metrics, time.perf_counter() - began, float(batch["mask"].size))
            if position.warm_steps % self.loop.warm_start_eval_every == 0 or position.warm_steps == last:
                words = "accuracy in the warm start"
                position.accuracy_before = self._evaluate(state, position, "warm_start", words)
            if position.total % self.experiment.checkpoint.every == 0:
                self._save(state, position)
        position.phase = "grpo"
        if jax.process_index() == 0:
            words = f"{position.accuracy_before:.3f} on {len(self.held_out)} held-out prompts"
            print(f"accuracy before GRPO: {words}", flush=True)
        return state, position

    def _grpo(self, state: update.State, reference: weights.Params, position: Position) -> update.State:
        loop = self.loop
        train = updater(grpo.loss(self.cfg, loop), self.experiment, self.experiment.optimizer, self.mesh)
        score = _logprobs(self.experiment, loop, self.mesh)
        first = position.steps
        while position.steps < loop.steps:
            if position.steps and position.steps % loop.eval_every == 0:
                self._evaluate(state, position, "eval", "accuracy")
            self.checkpoints.verify(position.total, state)
            began = time.perf_counter()
            compiled_before = self.compile_seconds
            batches = self._rollout(state.params, position)
            told: list[dict[str, jax.Array]] = []
            placed = [place_batch(b, self.mesh) for b in batches]
            for batch in placed:  # all under the policy that drew them, before the first update
                batch["old"], batch["reference"] = score(state.params, reference, batch)
            for rows, batch in zip(batches, placed, strict=True):
                if position.steps == first and not told:
                    state, metrics = self._timed(train, state, batch)
                else:
                    state, metrics = train(state, batch)
                told.append(metrics)
                self._note(position.total + 1, metrics, rows)
            position.steps += 1
            if position.steps % self.experiment.logging.every == 0 or position.steps == loop.steps:
                values = grpo.of_all_updates(jax.device_get(told))  # waits for the step, so that its time is its own
                seconds = time.perf_counter() - began - (self.compile_seconds - compiled_before)
                drawn = float(values["response_length"]) * rollout.rows_per_rollout(loop)
                self._log("grpo", position, values, seconds, drawn)
            if self.checkpoints.due(position.total, evaluates=position.steps % loop.eval_every == 0):
                self._save(state, position)
        return state

    def _rollout(self, params: weights.Params, position: Position) -> list[dict[str, np.ndarray]]:
        """Draw and score the step's samples, dealt out to its updates."""
        loop, step = self.loop, position.steps
        questions = self.problems.train(1_000_000_000 + step, loop.prompts * loop.updates_per_rollout)
        repeated = [q for q in questions for _ in range(loop.samples)]
        key = jax.random.fold_in(self.key, step)
        drawn = rollout.draw(self.sample, params, repeated, loop, self.mesh, key, loop.temperature)
        random = np.random.default_rng((self.experiment.seed, step))
        parts = loop.updates_per_rollout
        scored = rollout.scored(drawn, repeated, loop, self.checks)
        return rollout.split(scored, parts, meshes.shards(self.mesh, "batch"), random)

    def _evaluate(self, state: update.State, position: Position, phase: str, words: str) -> float:
        """Share of the held-out questions that the policy answers rightly when it takes the likeliest tokens."""
        began, rows, right = time.perf_counter(), rollout.rows_per_rollout(self.loop), 0.0
        params = update.for_evaluation(state)
        for start in range(0, len(self.held_out), rows):
            asked = self.held_out[start : start + rows]
            filled = [asked[i % len(asked)] for i in range(rows)]
            drawn = rollout.draw(self.sample, params, filled, self.loop, self.mesh, self.key, 0.0)
            correct = rollout.correct(drawn, filled, self.checks) * (np.arange(rows) < len(asked))
            right += float(self.total_of(place_batch(correct, self.mesh)))
        accuracy = right / len(self.held_out)
        self.log.log(position.total, phase, eval_accuracy=accuracy, eval_time=time.perf_counter() - began)
        if phase == "eval":
            self.checkpoints.score(position.total, eval_accuracy=accuracy)
        if jax.process_index() == 0 and phase == "eval":
            print(
                f"{words}: {accuracy:.3f} on {len(self.held_out)} held-out prompts (step {position.total})", flush=True
            )
        return accuracy

    def _log(self, phase: str, position: Position, metrics: Any, seconds: float, tokens: float) -> None:
        self._look()
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        left = self.loop.warm_start_steps - position.warm_steps if phase == "warm_start" else 0
        speed = {"step_time": seconds, "tokens_per_second": tokens / seconds}
        if self.compile_seconds:
            speed["compile_time"], self.compile_seconds = self.compile_seconds, 0.0
        self.log.log(
            position.total,
            phase,
            **values,
            **speed,
            steps_total=position.total + left + self.loop.steps - position.steps,
        )

    def _note(self, step: int, metrics: Any, drawn: dict[str, np.ndarray]) -> None:
        """An update, to be looked at when the next one is under way; until then the devices need not be waited for."""
        self._look()
        self.unseen = (step, metrics, drawn)

    def _look(self) -> None:
        """See that the last update noted went well. Raises DivergedError where the run is to stop."""
        if self.unseen:
            check_finite(*self.unseen, self.experiment)
        self.unseen = None

    def _timed(self, train: Any, state: update.State, batch: Any) -> tuple[update.State, dict[str, jax.Array]]:
        """A first update, whose compilation is counted apart."""
        began = time.perf_counter()
        train.lower(state, batch).compile()
        self.compile_seconds += time.perf_counter() - began
        return train(state, batch)

    def _save(self, state: update.State, position: Position) -> None:
        """Metrics first: a resume at this step reads them."""
        self._look()
        self.log.upload()
        self.checkpoints.save(position.total, state, vars(position).copy())


def updater(loss: update.Loss, experiment: RunFile, opt: Optimizer, mesh: Mesh) -> jax.stages.Wrapped:
    """`update.build`, on whole batches [B, ...]: where `loop.device_batch` is set, each device takes so many of its
    rows at a time."""
    assert isinstance(experiment.loop, GrpoLoop)
    parts = experiment.loop.accumulation(meshes.shards(mesh, "batch"))
    step = update.build(loss, experiment.model, opt, mesh, parts)
    if parts == 1:
        return step

    def dealt(x: jax.Array) -> jax.Array:
        """Every part has some rows of each device: none moves."""
        x = x.reshape(x.shape[0] // parts, parts, *x.shape[1:]).swapaxes(0, 1)
        return meshes.constrain(x, None, "batch", *(None,) * (x.ndim - 2))

    return jax.jit(lambda state, batch: step(state, jax.tree.map(dealt, batch)), donate_argnums=0)


def programs(experiment: RunFile, mesh: Mesh) -> Iterator[Program]:
    """What a run compiles, with its arguments as shapes."""
    cfg, loop, opt = experiment.model, experiment.loop, experiment.optimizer
    assert isinstance(loop, GrpoLoop)
    state, reference = update.abstract_state(cfg, opt, mesh), _abstract_params(cfg, mesh)
    drawn = rollout.rows_per_rollout(loop)
    rows, width = drawn // loop.updates_per_rollout, loop.prompt_length + loop.response_length
    score = {"tokens": abstract_rows(mesh, (rows, width), "int32")}
    score["mask"] = abstract_rows(mesh, (rows, width - 1), "float32")
    scored = score | {name: abstract_rows(mesh, (rows,), "float32") for name in grpo.ROW_FIELDS}
    scored["sampler"] = score["mask"]
    batch = scored | dict.fromkeys(grpo.TOKEN_FIELDS, score["mask"])
    yield Program("update", updater(grpo.loss(cfg, loop), experiment, opt, mesh), (state, batch), beside=reference)
    if loop.warm_start_steps:
        yield Program("warm_start", updater(grpo.supervised_loss(cfg), experiment, opt, mesh), (state, score))
    yield Program(
        "logprob",
        _logprobs(experiment, loop, mesh),
        (state.params, reference, scored),
        beside=state.optimizer,
    )
    prompts = sampler.Prompts(
        abstract_rows(mesh, (drawn, loop.prompt_length), "int32"),
        abstract_rows(mesh, (drawn,), "int32"),
        abstract_rows(mesh, (drawn,), "int32"),
    )
    key, temperature = jax.eval_shape(lambda: jax.random.key(0)), jax.ShapeDtypeStruct((), "float32")
    sample = sampler.build(cfg, loop.response_length, mesh)
    for name in ("decode", "eval"):  # one program: evaluations draw at temperature 0
        arguments = (state.params, prompts, key, temperature)
        yield Program(name, sample, arguments, beside=(state.optimizer, reference), turns=loop.response_length)
    yield Program("resident", None, beside=(state, reference))


def _checked(experiment: RunFile, mesh: Mesh) -> GrpoLoop:
    loop = experiment.loop
    if not isinstance(loop, GrpoLoop):
        raise TypeError(f"a grpo loop is wanted, not {loop.kind}")
    if experiment.model.vocab < tokenizer.VOCAB:
        raise RunFileError(f"model.vocab: {experiment.model.vocab} is too small for bytes; at least {tokenizer.VOCAB}")
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


def _problems(experiment: RunFile, loop: GrpoLoop) -> Problems:
    data = experiment.data
    if isinstance(data, ArithmeticData):
        return Arithmetic(experiment.seed)
    if isinstance(data, Gsm8kData):
        found = Gsm8k(data, experiment.seed, loop.prompt_length)
        if found.too_long and jax.process_index() == 0:
            print(f"{found.too_long} questions are longer than loop.prompt_length and left out", flush=True)
        return found
    raise RunFileError(f"data.kind: the grpo loop asks questions; {data.kind} has none: choose arithmetic or gsm8k")


def _warm(opt: Optimizer, loop: GrpoLoop) -> Optimizer:
    """The optimizer of the warm start."""
    return opt.constant(loop.warm_start_lr)


def _logprobs(experiment: RunFile, loop: GrpoLoop, mesh: Mesh) -> Logprobs:
    """The jitted program that scores a batch under the policy that drew it and under the reference."""
    cfg = experiment.model

    def score(params: weights.Params, reference: weights.Params, batch: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
        return tuple(grpo.logprobs(p, cfg, batch, loop.temperature)[0] for p in (params, reference))  # pyright: ignore[reportReturnType]

    if meshes.is_data_parallel(mesh):
        whole, rows = jax.sharding.PartitionSpec(), meshes.spec("batch")
        score = jax.shard_map(score, mesh=mesh, in_specs=(whole, whole, rows), out_specs=rows, check_vma=False)
    return jax.jit(score, out_shardings=meshes.named(mesh, "batch"))


def _abstract_params(cfg: Any, mesh: Mesh) -> weights.Params:
    placed = weights.shardings(cfg, mesh)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), weights.abstract(cfg), placed)

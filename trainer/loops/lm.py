"""Next-token prediction: the loop, read from top to bottom.

The host runs one update ahead of the devices: while they compute, it reads and places the next batch, then logs the
previous update. Everything is compiled before the first update.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from conf.schema.training.loop import LmLoop
from conf.schema.training.run_yaml import RunFile, RunFileError
from trainer.checkpoint.manager import CheckpointManager
from trainer.data import batches
from trainer.distributed import batch_sharding
from trainer.distributed.batch import Batch, DeviceBatch
from trainer.distributed.preemption import PreemptedError, PreemptionNotice
from trainer.distributed.runtime import gather_tree
from trainer.losses import lm
from trainer.models import weights
from trainer.step import train_step
from trainer.step.nan_check import check_finite
from trainer.step.program import Program
from trainer.telemetry import throughput
from trainer.telemetry.metrics import MetricsLogger
from trainer.telemetry.text_samples import TextSampler


def run(experiment: RunFile, mesh: Mesh, log: MetricsLogger) -> None:
    """Train from the newest checkpoint, or from the seed, to the last step. Raises RunFileError before any work."""
    data = batches.Dataset(experiment.data)
    loop = _validated_loop(experiment, data)
    split = batch_sharding.shard_rows(loop, mesh)
    stream = data.train_batches(loop, experiment.seed, split.rows)
    metrics = ("eval_loss", "eval_bits_per_byte")
    with (
        PreemptionNotice() as notice,
        closing(stream),
        CheckpointManager(experiment.dir, experiment.checkpoint, metrics) as checkpoints,
    ):
        first, state = _restore_or_init(experiment, mesh, checkpoints, stream)
        log.resume(first)
        compiled = _compile(experiment, loop, data, split, state)
        with jax.transfer_guard("disallow"):  # only explicit device_put and device_get may move data
            LmTrainer(experiment, loop, split, stream, checkpoints, log, notice, compiled).run(state, first)


def programs(experiment: RunFile, mesh: Mesh) -> Iterator[Program]:
    """Yield the programs that a run compiles, with abstract arguments."""
    cfg, loop, opt = experiment.decoder, experiment.loop, experiment.optimizer
    assert isinstance(loop, LmLoop)
    split = batch_sharding.shard_rows(loop, mesh)
    state, batch = train_step.abstract_state(cfg, opt, mesh), _abstract_batch(experiment, loop, split)
    yield Program(
        "update", train_step.build_update(lm.loss(cfg, loop), cfg, opt, mesh, split.accumulation), (state, batch)
    )
    token_bytes = jax.ShapeDtypeStruct((cfg.vocab_size,), "int32", sharding=batch_sharding.replicated_sharding(mesh))
    evaluate = jax.jit(lm.build_eval(cfg, split.accumulation))
    evaluated = train_step.eval_params(state)
    beside = (state.optimizer, () if evaluated is state.params else state.params)
    yield Program("eval", evaluate, (evaluated, token_bytes, batch), resident=beside)
    yield Program("resident", None, resident=state)


@dataclass
class CompiledPrograms:
    update: Callable[[train_step.State, DeviceBatch], tuple[train_step.State, dict[str, jax.Array]]]
    evaluate: Callable[[weights.Params, Callable[[], None]], dict[str, float]]
    text_sampler: TextSampler | None
    compile_seconds: float


class LmTrainer:
    """One process's part of a run: its programs, data and outputs."""

    def __init__(
        self,
        experiment: RunFile,
        loop: LmLoop,
        split: batch_sharding.BatchSharding,
        stream: batches.BatchStream,
        checkpoints: CheckpointManager,
        log: MetricsLogger,
        notice: PreemptionNotice,
        compiled: CompiledPrograms,
    ) -> None:
        self.experiment, self.loop, self.sharding, self.stream = experiment, loop, split, stream
        self.checkpoints, self.log, self.preemption, self.compiled = checkpoints, log, notice, compiled
        self.stopwatch, self.costs = (
            throughput.Stopwatch("data_time", "transfer_time"),
            {"compile_time": compiled.compile_seconds},
        )
        self.flops = throughput.model_flops(experiment.decoder, loop.total_batch_tokens, loop.seq_len)
        self.first_step = self.last_logged_step = 0
        self.pending: tuple[int, dict[str, jax.Array], Batch] | None = None

    def run(self, state: train_step.State, first: int) -> None:
        """Run all updates after the `first` ones, then finish the run."""
        loop, profiler = self.loop, self.log.profiler(self.experiment.logging.profile)
        self.first_step = self.last_logged_step = first
        for step in range(first, loop.steps):
            self._save_if_preempted(step, state)
            with self.stopwatch.excluded():
                self._after_checkpoint(step, state)
            profiler.before_update(state)
            with self.stopwatch.measure("data_time"):
                batch = next(self.stream)
            with self.stopwatch.measure("transfer_time"):
                placed = jax.block_until_ready(self.sharding.to_devices(batch))
            state, metrics = self.compiled.update(state, placed)
            self._flush()
            self.pending = (step + 1, metrics, batch)
            if self._needs_flush(step + 1):
                self._flush()
                with self.stopwatch.excluded():
                    self._save(step + 1, state)
        profiler.close()
        results = self._evaluate(loop.steps, state)
        if bad := sum(gather_tree(self.stream.num_bad_lines()).values()):
            results["bad_lines"] = bad
        self.log.summarize(**results, steps=loop.steps)

    def _needs_flush(self, done: int) -> bool:
        """Return whether an evaluation, sample, checkpoint or the end follows, which needs the last update's result."""
        evaluates = done % self.loop.eval_interval == 0
        return (
            evaluates
            or self._should_sample(done)
            or done == self.loop.steps
            or self.checkpoints.should_save(done, evaluates)
        )

    def _should_sample(self, done: int) -> bool:
        every = self.loop.text_samples.interval
        return every is not None and done % every == 0

    def _after_checkpoint(self, step: int, state: train_step.State) -> None:
        """Run the evaluation, samples and replica check due after a checkpoint, also on resuming there."""
        if step and step % self.loop.eval_interval == 0:
            self._evaluate(step, state)
        if self.compiled.text_sampler and step and self._should_sample(step):
            texts = self.compiled.text_sampler.generate(train_step.eval_params(state))
            self.log.log_text(step, "samples", "\n\n---\n\n".join(texts))
        self.checkpoints.verify_replicas(step, state)

    def _save_if_preempted(self, step: int, state: train_step.State) -> None:
        """Save and end on all processes if the VM is about to be preempted. Raises PreemptedError."""
        if self.preemption.should_stop(step):
            self._flush()
            if step > self.first_step:
                self.log.upload()
                self.checkpoints.save(step, state, {"data": self.stream.position()})
            raise PreemptedError

    def _flush(self) -> None:
        """Wait for the last update, check that it is finite, and log it."""
        if self.pending is None:
            return
        (step, metrics, batch), self.pending = self.pending, None
        check_finite(step, metrics, batch, self.experiment)
        if step % self.experiment.logging.log_interval and step != self.loop.steps:
            return
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        times = self.stopwatch.lap(step - self.last_logged_step)
        self.last_logged_step = step
        seconds = times["step_time"]
        rates = {"tokens_per_second": self.loop.total_batch_tokens / seconds}
        rates |= (
            throughput.model_flops_utilization(self.flops, seconds, self.experiment.pod) | throughput.device_memory()
        )
        self.log.log(step, "train", **values, **times, **rates, **self.costs, steps_total=self.loop.steps)
        self.costs = {}

    def _save(self, step: int, state: train_step.State) -> None:
        """Save a checkpoint. Call it before evaluating, so that a failed evaluation loses nothing."""
        if step == self.loop.steps or self.checkpoints.should_save(step, evaluates=step % self.loop.eval_interval == 0):
            self.log.upload()
            self.checkpoints.save(step, state, {"data": self.stream.position()})

    def _evaluate(self, step: int, state: train_step.State) -> dict[str, float]:
        began = time.perf_counter()
        results = self.compiled.evaluate(train_step.eval_params(state), lambda: self._save_if_preempted(step, state))
        self.log.log(step, "eval", **results, eval_time=time.perf_counter() - began)
        self.checkpoints.record_score(step, **results)
        return results


def _validated_loop(experiment: RunFile, data: batches.Dataset) -> LmLoop:
    loop = experiment.loop
    if not isinstance(loop, LmLoop):
        raise TypeError(f"expected an lm loop, not {loop.kind}")
    data.check_vocab_size(experiment.decoder.vocab_size)
    if loop.seq_len > experiment.decoder.max_seq_len:
        raise RunFileError(f"loop.seq_len: {loop.seq_len} exceeds model.max_seq_len, {experiment.decoder.max_seq_len}")
    return loop


def _restore_or_init(
    experiment: RunFile, mesh: Mesh, checkpoints: CheckpointManager, stream: batches.BatchStream
) -> tuple[int, train_step.State]:
    """Return the number of updates and the state after them, with the data stream at the same position."""
    abstract = train_step.abstract_state(experiment.decoder, experiment.optimizer, mesh)
    if resumed := checkpoints.restore_latest(abstract):
        stream.restore(resumed.position["data"])
        return resumed.step, resumed.state
    return 0, train_step.init_state(experiment.decoder, experiment.optimizer, mesh, jax.random.key(experiment.seed))


def _compile(
    experiment: RunFile,
    loop: LmLoop,
    data: batches.Dataset,
    split: batch_sharding.BatchSharding,
    state: train_step.State,
) -> CompiledPrograms:
    """Compile everything that runs between the first and the last update. Nothing is compiled later."""
    began = time.perf_counter()
    ready = {p.name: p.function.lower(*p.arguments).compile() for p in programs(experiment, split.mesh) if p.function}
    samples = None
    if loop.text_samples.interval is not None:
        samples = TextSampler(loop.text_samples, data, experiment.decoder, split.mesh, experiment.seed)
        samples.compile(state.params)
    known = data.token_bytes()
    token_bytes = np.zeros(experiment.decoder.vocab_size, np.int32)
    token_bytes[: len(known)] = known
    on_devices = jax.device_put(token_bytes, batch_sharding.replicated_sharding(split.mesh))
    held_out = data.validation_batches(loop, split.rows)

    def evaluate(params: weights.Params, between: Callable[[], None]) -> dict[str, float]:
        parts: list[Any] = []
        for batch in held_out:
            parts.append(jax.device_get(ready["eval"](params, on_devices, split.to_devices(batch))))
            between()
        totals = jax.tree.map(lambda *values: float(math.fsum(values)), *parts)
        return {f"eval_{name}": total / count if count else math.nan for name, (total, count) in totals.items()}

    return CompiledPrograms(ready["update"], evaluate, samples, time.perf_counter() - began)


def _abstract_batch(
    experiment: RunFile, loop: LmLoop, split: batch_sharding.BatchSharding
) -> dict[str, jax.ShapeDtypeStruct]:
    shape, sharding = split.shape(loop.seq_len), split.sharding
    types = batches.Dataset(experiment.data).batch_dtypes
    return {name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for name, dtype in types.items()}

"""The loop of optimizer updates of `lm` and `puzzle`, whose modules say what an update is.

The host runs one update ahead of the devices: while they compute, it reads and places the next batch, then logs the
previous update. Everything is compiled before the first update.
"""

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

import jax
from jax.sharding import Mesh

from conf.schema.training.loop import LmLoop
from conf.schema.training.loop_parts import PuzzleLoop
from conf.schema.training.run_yaml import RunFile
from trainer.checkpoint.manager import CheckpointManager
from trainer.data.batches import Stream
from trainer.distributed.mesh import Batch, DeviceBatch
from trainer.distributed.preemption import PreemptedError, PreemptionNotice
from trainer.distributed.runtime import gather_tree
from trainer.evaluation.plugins import EvaluationPlugins
from trainer.step import nan_diagnosis, train_step
from trainer.step.batch_check import BatchCheck
from trainer.step.nan_diagnosis import check_finite, judge
from trainer.telemetry import throughput
from trainer.telemetry.metrics import MetricsLogger
from trainer.telemetry.throughput import StragglerWatch

LoopConfig = TypeVar("LoopConfig", LmLoop, PuzzleLoop)


class UpdateLoop(ABC, Generic[LoopConfig]):
    """The updates of one process. A subclass says what an update and an evaluation are.

    Attributes:
        costs: seconds to log once, with the first line.
        plugins: the evaluations of `loop.evaluations`.
        recompute: computes a non-finite update again, to find out who is to blame.
        sample_interval: updates between two calls of `sample`, if there are any.
    """

    plugins: EvaluationPlugins
    recompute: nan_diagnosis.Recompute
    sample_interval: int | None = None

    def __init__(
        self,
        experiment: RunFile,
        loop: LoopConfig,
        mesh: Mesh,
        stream: Stream,
        checkpoints: CheckpointManager,
        log: MetricsLogger,
        notice: PreemptionNotice,
        batches: BatchCheck,
    ) -> None:
        self.experiment, self.loop, self.mesh, self.stream, self.batches = experiment, loop, mesh, stream, batches
        self.checkpoints, self.log, self.preemption = checkpoints, log, notice
        self.stopwatch = throughput.Stopwatch("data_time", "transfer_time", "wait_time")
        self.stragglers = StragglerWatch(mesh)
        self.costs: dict[str, float] = {}
        self.first_step = self.last_logged_step = 0
        self.pending: tuple[int, dict[str, jax.Array], Batch] | None = None

    @abstractmethod
    def place(self, batch: Batch) -> DeviceBatch:
        """Put this process's rows on its devices."""

    @abstractmethod
    def update(self, state: train_step.State, batch: DeviceBatch) -> tuple[train_step.State, dict[str, jax.Array]]:
        """Run an update, as from `train_step.build_update`."""

    @abstractmethod
    def evaluate(self, state: train_step.State, step: int, between: Callable[[], None]) -> dict[str, float]:
        """Return metrics of the weights after `step` updates. between: called between batches."""

    @abstractmethod
    def rates(self, seconds: float) -> dict[str, float]:
        """Return metrics of speed. seconds: of an update."""

    def sample(self, state: train_step.State, step: int) -> None:
        """Log samples of the state after `step` updates."""

    def run(self, state: train_step.State, first: int) -> None:
        """Run all updates after the `first` ones, then finish the run."""
        loop, profiler = self.loop, self.log.profiler(self.experiment.logging.profile)
        self.first_step = self.last_logged_step = first
        self.batches.restart(first)
        for step in range(first, loop.steps):
            self._save_if_preempted(step, state)
            if self.checkpoints.should_compare(step):
                with self.stopwatch.measure("wait_time"):  # for the update, which is no part of the check
                    jax.block_until_ready(state.step)
            with self.stopwatch.excluded():
                self.checkpoints.catch_up()
                self._after_checkpoint(step, state)
            profiler.before_update(state)
            with self.stopwatch.measure("data_time"):
                batch = next(self.stream)
            with self.stopwatch.measure("transfer_time"):
                placed = jax.block_until_ready(self.place(batch))
            state, metrics = self.update(state, placed)
            self.batches.count(batch)
            self._flush(state)
            done = step + 1
            self.pending = (done, metrics, batch)
            # an evaluation, sample, checkpoint or the end follows, which needs this update's result
            if done % loop.eval_interval == 0 or self._should_sample(done) or self._should_save(done):
                self._flush(state)
            if self._should_save(done):  # before evaluating, so that a failed evaluation loses nothing
                with self.stopwatch.excluded(), self.log.phases.measure("checkpoints"):
                    self._save(done, state)
        profiler.close()
        results = self._evaluate(loop.steps, state)
        results |= sum(map(Counter, gather_tree(self.stream.left_out()).values()), Counter())  # without those of 0
        self.log.summarize(**{n: x for n, x in results.items() if "/" not in n}, steps=loop.steps)
        self._save(loop.steps, state)  # once more if it could not be written meanwhile

    def _should_save(self, done: int) -> bool:
        evaluates = done % self.loop.eval_interval == 0
        return done == self.loop.steps or self.checkpoints.should_save(done, evaluates)

    def _should_sample(self, done: int) -> bool:
        return self.sample_interval is not None and done % self.sample_interval == 0

    def _after_checkpoint(self, step: int, state: train_step.State) -> None:
        """Run the evaluation, samples and checks due after a checkpoint, also on resuming there.

        The state is at rest meanwhile: it is compared before and after, which finds changes of shards without a copy.
        """
        self.batches.compare_if_due(step)
        evaluates = step and step % self.loop.eval_interval == 0
        samples = step and self._should_sample(step)
        if evaluates or samples:
            self.checkpoints.compare_at_rest(step, state)
        if evaluates:
            self._evaluate(step, state)
        if samples:
            self.sample(state, step)
        if evaluates or samples:
            self.checkpoints.compare_at_rest(step, state)
        else:
            self.checkpoints.compare_if_due(step, state)

    def _save_if_preempted(self, step: int, state: train_step.State) -> None:
        """Save and end on all processes if the VM is about to be preempted. Raises PreemptedError."""
        if self.preemption.should_stop(step):
            self._flush(state)
            if step > self.first_step:
                self._save(step, state)
            raise PreemptedError

    def _flush(self, state: train_step.State) -> None:
        """Wait for the last update, check that it is finite, and log it. state: after the newest update."""
        if self.pending is None:
            return
        (step, metrics, batch), self.pending = self.pending, None
        with self.stopwatch.measure("wait_time"):
            jax.block_until_ready(metrics)
        check_finite(step, metrics, batch, self.experiment, partial(self._diagnose, step, state, batch))
        if step % self.experiment.logging.log_interval and step != self.loop.steps:
            return
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        times = self.stopwatch.lap(step - self.last_logged_step)
        self.last_logged_step = step
        seconds = times["step_time"]
        rates = self.rates(seconds) | throughput.device_memory()
        with self.stopwatch.measure("wait_time"):  # of the next line: it waits for the other workers
            rates |= self.stragglers.compare(seconds, times["wait_time"])
        self.log.log(step, "train", **values, **times, **rates, **self.costs, steps_total=self.loop.steps)
        self.costs = {}

    def _save(self, step: int, state: train_step.State) -> None:
        self.batches.compare(step)
        self.checkpoints.save(step, state, {"data": self.stream.position()})

    def _diagnose(self, step: int, state: train_step.State, batch: Batch, repeated: bool) -> None:
        """Raise CorruptionError if hardware made update `step` non-finite, which has changed nothing."""
        self.checkpoints.compare_replicas(step, state)
        self.batches.compare(step)
        judge(self.recompute(state, self.place(batch)), step, repeated)

    def _evaluate(self, step: int, state: train_step.State) -> dict[str, float]:
        began = time.perf_counter()

        def between() -> None:
            self._save_if_preempted(step, state)

        with self.log.phases.measure("evaluations"):
            results = self.evaluate(state, step, between)
            self.log.log(step, "eval", **results, eval_time=time.perf_counter() - began)
            self.checkpoints.record_score(step, **results)
            return results | self.plugins.run(step, step, train_step.eval_params(state), between)

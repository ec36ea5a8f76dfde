"""The state of a GRPO run: saved to checkpoints, restored from them, and evaluated."""

from collections import deque
from dataclasses import asdict, dataclass, replace

import jax
from jax.sharding import Mesh

from conf.schema.training.loop import GrpoLoop
from conf.schema.training.run_yaml import RunFile
from trainer.checkpoint.manager import CheckpointManager
from trainer.distributed.preemption import PreemptedError, PreemptionNotice
from trainer.evaluation.accuracy import EvalResult, Evaluator
from trainer.evaluation.plugins import EvaluationPlugins
from trainer.rl.rollouts import Rollout
from trainer.rl.telemetry import Progress, Telemetry
from trainer.step import train_step
from trainer.step.batch_check import BatchCheck
from trainer.telemetry.metrics import MetricsLogger
from trainer.telemetry.startup_report import log_on_main


@dataclass
class TrainState:
    """Everything that a checkpoint stores. rollouts: drawn but not yet trained on, oldest first."""

    state: train_step.State
    progress: Progress
    rollouts: deque[Rollout]

    def reset_optimizer(self, experiment: RunFile, mesh: Mesh) -> None:
        """Give the weights a new optimizer, with the learning rate of the updates after the warm start."""
        cfg, opt = experiment.decoder, experiment.optimizer
        shardings = train_step.state_shardings(cfg, opt, mesh)
        make = jax.jit(lambda p: train_step.new_state(p, cfg, opt), out_shardings=shardings, donate_argnums=0)
        self.state = make(self.state.params)


class StateSaver:
    """Saves and restores the state of a run. All processes call every method, in the same order."""

    def __init__(
        self, checkpoints: CheckpointManager, preemption: PreemptionNotice, telemetry: Telemetry, batches: BatchCheck
    ) -> None:
        self._checkpoints, self._preemption, self._telemetry = checkpoints, preemption, telemetry
        self._batches = batches
        self._first_step = 0

    def restore_or_init(self, experiment: RunFile, loop: GrpoLoop, mesh: Mesh) -> TrainState:
        """Return the state of the newest checkpoint, and restore the telemetry; or the state of a new run."""
        cfg, opt = experiment.decoder, experiment.optimizer
        resumed = self._checkpoints.restore_latest(train_step.abstract_state(cfg, opt, mesh))
        if resumed is None:
            warm, key = opt.with_constant_lr(loop.warm_start_lr), jax.random.key(experiment.seed)
            return TrainState(train_step.init_state(cfg, warm, mesh, key), Progress(), deque())
        body = resumed.position
        self._telemetry.restore(body)
        progress = Progress(**body["position"])
        self._first_step = progress.total_steps
        self._batches.restart(progress.total_steps)
        rollouts = deque(Rollout.from_json(rollout, mesh) for rollout in body["rollouts"])
        return TrainState(resumed.state, progress, rollouts)

    def save(self, train_state: TrainState) -> None:
        self._telemetry.flush()
        with self._telemetry.stopwatch.excluded(), self._telemetry.phases.measure("checkpoints"):
            self._batches.compare(train_state.progress.total_steps)
            rollouts = [rollout.to_json() for rollout in train_state.rollouts]
            body = {"position": asdict(train_state.progress), **self._telemetry.to_json(), "rollouts": rollouts}
            written = body if jax.process_index() == 0 else {}
            self._checkpoints.save(train_state.progress.total_steps, train_state.state, written)

    def save_if_preempted(self, train_state: TrainState) -> None:
        """Save and end the run on all processes if the VM is about to be preempted. Raises PreemptedError."""
        step = train_state.progress.total_steps
        if self._preemption.should_stop(step):
            if step > self._first_step:
                self.save(train_state)
            raise PreemptedError

    def compare_if_due(self, train_state: TrainState) -> None:
        """Compare the copies of the state, and the data, if it is time to. Raises CorruptionError on all processes."""
        step = train_state.progress.total_steps
        with self._telemetry.stopwatch.excluded():
            self._checkpoints.catch_up()
            self._batches.compare_if_due(step)
            self._checkpoints.compare_if_due(step, train_state.state)

    def compare_at_rest(self, train_state: TrainState) -> None:
        """Compare the copies of the state, before and after a phase that does not change it. Raises CorruptionError."""
        with self._telemetry.stopwatch.excluded():
            self._checkpoints.compare_at_rest(train_state.progress.total_steps, train_state.state)

    def diagnose(self, train_state: TrainState) -> None:
        """Look for a fault of hardware behind an update that was not finite. Raises CorruptionError."""
        step = train_state.progress.total_steps
        self._checkpoints.compare_replicas(step, train_state.state)
        self._batches.compare(step)


NUM_BASELINE_QUESTIONS = 64


@dataclass(eq=False)
class Evaluations:
    """Evaluates the policy and logs the results. All processes call every method, in the same order."""

    loop: GrpoLoop
    evaluation: Evaluator
    plugins: EvaluationPlugins
    log: MetricsLogger
    checkpoints: CheckpointManager
    telemetry: Telemetry
    saver: StateSaver

    def log_baseline(self, train_state: TrainState) -> None:
        """Print the policy's accuracy on a few questions before training."""
        with self.telemetry.stopwatch.excluded(), self.telemetry.phases.measure("evaluations"):
            count = min(NUM_BASELINE_QUESTIONS, self.loop.eval_prompts)
            result = self.evaluation.greedy(train_step.eval_params(train_state.state), count)
        log_on_main(f"baseline: {_format_accuracy(result)} of {count} held-out questions answered correctly")

    def evaluate(self, train_state: TrainState, phase: str, name: str = "accuracy") -> EvalResult:
        """Log the accuracy on the held-out questions, and return the result.

        phase: eval or warm_start. name: of the accuracy that phase eval prints.
        """
        self.telemetry.flush()
        with self.telemetry.stopwatch.excluded(), self.telemetry.phases.measure("evaluations"):
            step = train_state.progress.total_steps
            between = (lambda: self.saver.save_if_preempted(train_state)) if phase == "eval" else lambda: None
            params, done = train_step.eval_params(train_state.state), train_state.progress.steps
            result = self.evaluation.greedy(params, between=between)
            self.log.log(step, phase, **result.values)
            own = self.plugins.run(step, done, params, between, result.answers, phase)
            result = replace(result, plugin_values=own)
        if phase == "eval":
            self.log.log_transcripts(step, phase, result.transcripts)
            self.checkpoints.record_score(step, eval_accuracy=result.accuracy)
            accuracy = _format_accuracy(result)
            log_on_main(f"{name}: {accuracy} on {self.loop.eval_prompts} held-out prompts (step {step})")
        return result

    def test(self, train_state: TrainState, when: str) -> dict[str, float]:
        """Log the metrics of the test and return them; empty if `loop.test_samples_per_prompt` is null.

        when: before or after.
        """
        self.telemetry.flush()
        with self.telemetry.stopwatch.excluded(), self.telemetry.phases.measure("evaluations"):
            params = train_step.eval_params(train_state.state)
            result = self.evaluation.test(params, lambda: self.saver.save_if_preempted(train_state))
            if result is None:
                return {}
            step = train_state.progress.total_steps
            self.log.log(step, "test", **result.values)
            self.log.log_transcripts(step, "test", result.transcripts)
        more = [f"{name.removeprefix('test_')} {v:.3f}" for name, v in result.values.items() if "_at_" in name]
        log_on_main(f"test {when} GRPO: {_format_accuracy(result)}, {', '.join(more)}")
        return {name: value for name, value in result.values.items() if name != "test_time"}

    def summarize(self, train_state: TrainState, **facts: float) -> None:
        """Run the final evaluation and write the results of the run."""
        progress = train_state.progress
        after = self.evaluate(train_state, "eval", "accuracy after GRPO")
        low, high = after.interval
        tests = {"before": progress.test_before, "after": self.test(train_state, "after")}
        self.log.summarize(
            accuracy_before=progress.accuracy_before,
            accuracy_after=after.accuracy,
            accuracy_low_after=low,
            accuracy_high_after=high,
            eval_prompts=self.loop.eval_prompts,
            warm_start_steps=progress.warm_steps,
            steps=progress.steps,
            **facts,
            **{name: value for name, value in after.plugin_values.items() if "/" not in name},
            **{f"{name}_{when}": value for when, values in tests.items() for name, value in values.items()},
        )


def _format_accuracy(result: EvalResult) -> str:
    low, high = result.interval
    return f"{result.accuracy:.3f} ({low:.3f} to {high:.3f})"

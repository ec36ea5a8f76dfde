"""Evaluations of a GRPO run: at the start, during training, and before and after GRPO."""

from conf.schema.training.loop import GrpoLoop
from trainer.checkpoint.manager import CheckpointManager
from trainer.evaluation.accuracy import EvalResult, Evaluator
from trainer.rl.state import StateSaver, TrainState
from trainer.rl.telemetry import Telemetry
from trainer.step import train_step
from trainer.telemetry.metrics import MetricsLogger

NUM_BASELINE_QUESTIONS = 64


class Evaluations:
    """Evaluates the policy and logs the results. All processes call every method, in the same order."""

    def __init__(
        self,
        loop: GrpoLoop,
        evaluation: Evaluator,
        log: MetricsLogger,
        checkpoints: CheckpointManager,
        telemetry: Telemetry,
        saver: StateSaver,
    ) -> None:
        self._loop, self._evaluation, self._log = loop, evaluation, log
        self._checkpoints, self._telemetry, self._saver = checkpoints, telemetry, saver

    def log_baseline(self, train_state: TrainState) -> None:
        """Print the policy's accuracy on a few questions before training."""
        with self._telemetry.stopwatch.apart():
            count = min(NUM_BASELINE_QUESTIONS, self._loop.eval_prompts)
            result = self._evaluation.greedy(train_step.eval_params(train_state.state), count)
        message = f"baseline: {_format_accuracy(result)} of {count} held-out questions answered rightly"
        self._telemetry.log_lines([message])

    def evaluate(self, train_state: TrainState, phase: str, message: str) -> float:
        """Log the accuracy on the held-out questions, and return it.

        phase: eval or warm_start. message: prefix of the printed line in phase eval.
        """
        self._telemetry.flush()
        with self._telemetry.stopwatch.apart():
            step = train_state.progress.total_steps
            between = (lambda: self._saver.save_if_preempted(train_state)) if phase == "eval" else lambda: None
            result = self._evaluation.greedy(train_step.eval_params(train_state.state), between=between)
            self._log.log(step, phase, **result.values)
        if phase == "eval":
            self._log.transcripts(step, phase, result.transcripts)
            self._checkpoints.score(step, eval_accuracy=result.accuracy)
            accuracy = _format_accuracy(result)
            line = f"{message}: {accuracy} on {self._loop.eval_prompts} held-out prompts (step {step})"
            self._telemetry.log_lines([line])
        return result.accuracy

    def test(self, train_state: TrainState, when: str) -> dict[str, float]:
        """Log the metrics of the test and return them; empty if `loop.test_samples_per_prompt` is null.

        when: before or after.
        """
        self._telemetry.flush()
        with self._telemetry.stopwatch.apart():
            params = train_step.eval_params(train_state.state)
            result = self._evaluation.test(params, lambda: self._saver.save_if_preempted(train_state))
            if result is None:
                return {}
            step = train_state.progress.total_steps
            self._log.log(step, "test", **result.values)
            self._log.transcripts(step, "test", result.transcripts)
        more = [f"{name.removeprefix('test_')} {v:.3f}" for name, v in result.values.items() if "_at_" in name]
        self._telemetry.log_lines([f"test {when} GRPO: {_format_accuracy(result)}, {', '.join(more)}"])
        return {name: value for name, value in result.values.items() if name != "test_time"}

    def summarize(self, train_state: TrainState, **facts: float) -> None:
        """Run the final evaluation and write the results of the run."""
        progress = train_state.progress
        after = self.evaluate(train_state, "eval", "accuracy after GRPO")
        tests = {"before": progress.test_before, "after": self.test(train_state, "after")}
        self._log.summarize(
            accuracy_before=progress.accuracy_before,
            accuracy_after=after,
            eval_prompts=self._loop.eval_prompts,
            warm_start_steps=progress.warm_steps,
            steps=progress.steps,
            **facts,
            **{f"{name}_{when}": value for when, values in tests.items() for name, value in values.items()},
        )


def _format_accuracy(result: EvalResult) -> str:
    low, high = result.interval
    return f"{result.accuracy:.3f} ({low:.3f} to {high:.3f})"

"""The evaluations of `loop.evaluations`: when each runs, and what becomes of its results.

An evaluation runs on process 0, which the others help to compute. It never ends the run: what goes wrong is an alert.
"""

import math
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from conf.extension import Answered, wants_model
from conf.formats import RunFileError
from conf.schema.training.loop import GrpoLoop, LmLoop
from conf.schema.training.loop_parts import PuzzleLoop
from conf.schema.training.settings import EvaluationSettings
from trainer.distributed.preemption import PreemptedError
from trainer.evaluation import statistics
from trainer.evaluation.model import Calls, EvaluationTimeoutError, LoadedModel
from trainer.extension import load_extension
from trainer.models.weights import Params
from trainer.telemetry.metrics import MetricsLogger


class EvaluationPlugins:
    """The evaluations of a loop. All processes call `run` in the same order, and all get the same results."""

    def __init__(
        self, loop: LmLoop | GrpoLoop | PuzzleLoop, log: MetricsLogger, model: Callable[[], LoadedModel]
    ) -> None:
        """Import the functions. model: called if there is any. Raises RunFileError."""
        self._steps, self._log, self._failed = loop.steps, log, set[str]()
        self._plugins = {name: (wanted, _load(name, wanted, loop)) for name, wanted in loop.evaluations.items()}
        self._model = model() if self._plugins else None

    def run(
        self,
        step: int,
        done: int,
        params: Params,
        between: Callable[[], None] = lambda: None,
        answers: Sequence[Answered] | None = None,
        phase: str = "eval",
    ) -> dict[str, float]:
        """Log the metrics of the evaluations that are due after `done` of the loop's updates, and return them.

        Args:
            step: updates of the run so far.
            done: updates of the loop so far.
            params: the weights.
            between: called between batches; a PreemptedError from it is passed on.
            answers: what the GRPO loop's own evaluation has got.
            phase: in the warm start, only evaluations of answers run, those without an interval.
        """
        found: dict[str, float] = {}
        for name, (wanted, function) in self._plugins.items():
            of_model = wants_model(function)
            if wanted.is_due(done, self._steps) if phase == "eval" else not (of_model or wanted.interval):
                assert self._model is not None
                calls = self._model.load(step, params, between)
                given = self._model if of_model else answers
                with jax.transfer_guard("allow"):
                    if jax.process_index() == 0:
                        result = self._run_once(name, wanted, lambda f=function, g=given: f(g), calls, step)
                        self._record(name, phase, step, calls.finish(result))
                    else:
                        result = calls.follow()
                self._model.unload()
                found |= result["values"]
        return found

    def _run_once(
        self, name: str, wanted: EvaluationSettings, function: Callable[[], Any], calls: Calls, step: int
    ) -> dict[str, Any]:
        """Return values, problems, and whether the values were known: an interrupted run has logged them already."""
        if (known := self._log.recorded(step, name)) is not None:
            return {"values": known, "problems": [], "known": True}
        try:
            try:
                with calls.time_limit(name, wanted.timeout_seconds):
                    returned = function()
            finally:
                calls.check()  # the function may have caught what it raised, or raised something else
            values, problems = metric_values(name, returned)
            if self._model is not None and self._model.num_truncated:
                values[f"eval_{name}_texts_truncated"] = float(self._model.num_truncated)
        except EvaluationTimeoutError:
            text = f"it took more than timeout_seconds, {wanted.timeout_seconds:g} s"
            return {"values": {}, "problems": [text], "known": False}
        except PreemptedError:
            raise
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            return {"values": {}, "problems": [f"{type(error).__name__}: {error}"], "known": False}
        return {"values": values, "problems": problems, "known": False}

    def _record(self, name: str, phase: str, step: int, result: dict[str, Any]) -> None:
        """Log an evaluation's values, and raise or end its alert."""
        if result["known"]:
            return
        if result["values"]:
            self._log.log_evaluation(step, phase, name, result["values"])
            self._log.upload()  # an interrupted run does not evaluate these weights again
        alert = f"evaluation {name}"
        if result["problems"]:
            message = f"loop.evaluations.{name} failed after update {step}: {'; '.join(result['problems'])}"
            print(f"ALERT: {message}", file=sys.stderr, flush=True)
            self._log.log_alert(step, alert, message)
            self._failed.add(name)
        elif name in self._failed:
            self._log.log_alert(step, alert, "")
            self._failed.remove(name)


def metric_values(name: str, returned: Any) -> tuple[dict[str, float], list[str]]:
    """Return the metrics of what an evaluation returned, by their names in the log, and what is wrong with it.

    A list of numbers, one per example, becomes its mean, `_stderr` and the bounds of the 95 % interval, `_low` and
    `_high`. A key that starts with `/` is shown only as a curve.
    """
    if not isinstance(returned, Mapping):
        return {}, [f"must return numbers by name, not {returned!r:.100}"]
    values: dict[str, float] = {}
    problems = [] if returned else ["returned no numbers"]
    for key, value in returned.items():
        full = f"eval_{name}{'' if str(key).startswith('/') else '_'}{key}"
        try:
            numbers = np.asarray(value, np.float64)
        except (TypeError, ValueError):
            numbers = np.zeros((0, 0))
        if numbers.ndim > 1 or not numbers.size:
            problems.append(f"{key} is neither a number nor a list of numbers: {value!r:.100}")
        elif not np.isfinite(numbers).all():
            problems.append(f"{key} is not finite")
        elif numbers.ndim:
            values |= _mean(full, [float(x) for x in numbers])
        else:
            values[full] = float(numbers)
    return values, problems


def _mean(full: str, numbers: list[float]) -> dict[str, float]:
    mean, count = math.fsum(numbers) / len(numbers), len(numbers)
    error = math.sqrt(math.fsum((x - mean) ** 2 for x in numbers) / max(1, count - 1) / count)
    low, high = mean - statistics.Z_95 * error, mean + statistics.Z_95 * error
    if {*numbers} <= {0.0, 1.0} or (len({*numbers}) == 1 and 0 <= mean <= 1):  # examples that agree are no certainty
        low, high = statistics.wilson_interval(math.fsum(numbers), count)
    return {full: mean, f"{full}_stderr": error, f"{full}_low": low, f"{full}_high": high}


def _load(name: str, wanted: EvaluationSettings, loop: Any) -> Callable[[Any], Any]:
    key = f"loop.evaluations.{name}"
    function = load_extension("evaluation", wanted.reference, key, wanted.options)
    if not isinstance(loop, GrpoLoop) and not wants_model(function):
        raise RunFileError(f"{key}: {wanted.run}: only the grpo loop has answers; call the first parameter `model`")
    return function

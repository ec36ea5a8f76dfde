"""Episodes in worker processes: submit responses, decode the next ones, collect what the environment says.

An episode whose environment raises, hangs, uses up memory, writes too much, returns NaN or kills its process fails by
itself: it is counted by its cause, and the first of each cause is printed.
"""

import sys
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from conf.environment import Messages
from conf.schema.training.loop_parts import Environment
from trainer.distributed.runtime import gather_tree
from trainer.environments.worker import check_class
from trainer.rewards.process import OutputLimitError, ProcessDiedError, TimeLimitError, WorkerProcess

CAUSES = ("error", "timeout", "memory", "processes", "output", "not_finite", "history", "died")
"""What may fail an episode, by name."""


@dataclass(frozen=True)
class Step:
    """What the environment says to a response.

    messages: turns that `text` is made of, if the environment says turns; reward: None while the episode goes on;
    failure: one of CAUSES, or empty; reason: of the failure, for people.
    """

    text: str = ""
    messages: Messages | None = None
    done: bool = False
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    failure: str = ""
    reason: str = ""


class EnvironmentPool:
    """Worker processes with environments. Close it, or use it in a `with`."""

    def __init__(self, settings: Environment) -> None:
        """Processes start when first needed. Raises RunFileError if the class is missing or does not fit."""
        check_class(settings)
        self.settings, text = settings, settings.model_dump_json()
        self._processes = [WorkerProcess("trainer.environments.worker", text) for _ in range(settings.workers)]
        # a thread per process, so that an episode stays in the process that has its objects
        self._threads = [ThreadPoolExecutor(1, thread_name_prefix="environment") for _ in self._processes]
        self._reported: set[str] = set()
        self._draws = 0

    def new_draw(self) -> str:
        """Return a prefix for the ids of the episodes of one draw."""
        self._draws += 1
        return f"{self._draws}."

    def submit(
        self, draw: str, number: int, row: Mapping[str, Any], responses: list[str], *, final: bool
    ) -> Future[Step]:
        """Take the last response of an episode in the background. final: end it, and compute its reward."""
        request = {"id": f"{draw}{number}", "row": row, "responses": list(responses), "final": final}
        return self._threads[number % len(self._threads)].submit(self._ask, number % len(self._threads), request)

    def gather(self, waiting: Mapping[int, Future[Step]]) -> dict[int, Step]:
        """Return the steps of all processes by episode. Each process waits for its own; all must call it."""
        every = gather_tree({str(number): list(asdict(step.result()).values()) for number, step in waiting.items()})
        return {int(number): Step(*values) for number, values in every.items()}

    def close(self) -> None:
        """Stop the processes after their current requests."""
        for thread, process in zip(self._threads, self._processes, strict=True):
            thread.shutdown(cancel_futures=True)
            process.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, number: int, request: Mapping[str, Any]) -> Step:
        process = self._processes[number]
        try:
            step = Step(**process.ask(request))
        except TimeLimitError:
            limits = f"{self.settings.timeout_seconds:g} s of CPU time or {self.settings.wall_seconds:g} s in all"
            step = Step(failure="timeout", reason=f"a call took more than {limits}")
        except OutputLimitError:
            step = Step(failure="output", reason=f"a call wrote more than {self.settings.max_output_mib:g} MiB")
        except ProcessDiedError as error:
            step = Step(failure="died", reason=str(error))
        if step.failure and step.failure not in self._reported:
            self._reported.add(step.failure)
            told = f"environment {self.settings.name}: an episode failed ({step.failure}): {step.reason}"
            print(f"{told}; others are counted as environment_{step.failure}", file=sys.stderr, flush=True)
        return step

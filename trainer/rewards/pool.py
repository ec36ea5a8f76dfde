"""Reward checks in worker processes: submit responses, decode the next ones, collect the scores.

A check that exceeds its CPU time limit, raises, or kills its process scores 0, and is counted. A worker process is
`python -m trainer.rewards.pool SECONDS`; it reads and writes JSON lines.
"""

import json
import math
import os
import queue
import signal
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from trainer.rewards.functions import arguments, resolve, wants_row
from trainer.rewards.process import (
    ProcessDiedError,
    TimeLimitError,
    WorkerProcess,
    cpu_time_limit,
    install_limits,
    uncounted_cpu_time,
)


class Submission(NamedTuple):
    """What rewards see: a response, the correct answer, the prompt as text, and the columns of the question's row."""

    response: str
    answer: str
    prompt: str = ""
    row: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class RewardResult:
    """Scores of one response by reward name, and how many rewards timed out or failed."""

    scores: dict[str, float]
    timed_out: int
    failed: int


class RewardPool:
    """Worker processes that check responses, one check each at a time. Close it, or use it in a `with`."""

    def __init__(self, workers: int, seconds: float) -> None:
        """Create a pool. seconds: CPU time of one check. Processes start when first needed."""
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="reward")
        self._idle: queue.SimpleQueue[WorkerProcess] = queue.SimpleQueue()
        for _ in range(workers):
            self._idle.put(WorkerProcess("trainer.rewards.pool", str(seconds)))
        self._workers = workers
        self._reported: set[str] = set()

    def submit(self, names: Sequence[str], submission: Submission) -> Future[RewardResult]:
        """Score a response by these rewards in the background; `result()` waits for it."""
        return self._threads.submit(self._check, list(names), submission)

    def close(self) -> None:
        """Stop the workers after their current checks."""
        self._threads.shutdown(cancel_futures=True)
        for _ in range(self._workers):
            self._idle.get().stop()
        self._workers = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self, names: list[str], submission: Submission) -> RewardResult:
        scores, timed_out, failed = dict.fromkeys(names, 0.0), 0, 0
        worker = self._idle.get()
        try:
            for name in names:
                try:
                    scores[name] = _check_once(worker, name, submission)
                except TimeLimitError:
                    timed_out += 1
                except (_CheckFailedError, ProcessDiedError) as error:
                    failed += 1
                    self._report_once(name, error)
        finally:
            self._idle.put(worker)
        return RewardResult(scores, timed_out, failed)

    def _report_once(self, name: str, error: Exception) -> None:
        """Print the first failure of each reward, which may be a bug in the function."""
        if name not in self._reported:
            self._reported.add(name)
            print(f"reward {name} failed on a response, which scores 0: {error}", file=sys.stderr, flush=True)


class _CheckFailedError(Exception):
    """A check raised."""


def _check_once(worker: WorkerProcess, name: str, submission: Submission) -> float:
    """Return a score. Raises _CheckFailedError, or why the process died."""
    response, answer, prompt, row = submission
    seen = (prompt, row or {}) if wants_row(name) else ("", {})
    found = worker.ask([name, response, answer, *seen])
    if isinstance(found, str):
        raise _CheckFailedError(found)
    return found


def main() -> None:
    """Answer requests in a worker process until the pipe closes. Output of rewards goes to stderr."""
    seconds = float(sys.argv[1])
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # to all of the run: a notice, which the trainer answers
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    install_limits()
    for line in sys.stdin:
        name, response, answer, prompt, row = json.loads(line)
        found = _score(name, response, answer, prompt, row, seconds)
        print(json.dumps(found), file=answers, flush=True)


def _score(name: str, response: str, answer: str, prompt: str, row: dict[str, Any], seconds: float) -> float | str:
    try:
        with uncounted_cpu_time():
            reward, more = resolve(name), arguments(name, prompt, row)
        with cpu_time_limit(seconds):
            score = float(reward(response, answer, **more))
    except (Exception, SystemExit) as error:
        return repr(error)[:500]
    return score if math.isfinite(score) else f"a score of {score}"


if __name__ == "__main__":
    main()

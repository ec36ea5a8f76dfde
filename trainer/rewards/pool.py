"""Reward checks in worker processes: submit responses, decode the next ones, collect the scores.

A check that exceeds its CPU time limit, raises, or kills its process scores 0, and is counted.
"""

import json
import os
import queue
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, Self

from trainer.rewards import limits
from trainer.rewards.functions import wants_row


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
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for _ in range(workers):
            self._idle.put(_Worker(seconds))
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
                    try:
                        scores[name] = worker.check(name, submission)
                    except _WorkerDiedError:  # perhaps not this check's fault
                        scores[name] = worker.check(name, submission)
                except _CheckTimeoutError:
                    timed_out += 1
                except _CheckFailedError as error:
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


class _CheckTimeoutError(Exception):
    """A check took too long."""


class _CheckFailedError(Exception):
    """A check raised."""


class _WorkerDiedError(_CheckFailedError):
    """A process died during a check."""


class _Worker:
    """One process, started when needed, and restarted after it dies."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._process: subprocess.Popen[str] | None = None

    def check(self, name: str, submission: Submission) -> float:
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            response, answer, prompt, row = submission
            seen = (prompt, row or {}) if wants_row(name) else ("", {})
            process.stdin.write(json.dumps([name, response, answer, *seen], default=str) + "\n")
            process.stdin.flush()
            reply = process.stdout.readline()
        except BrokenPipeError:
            reply = ""
        if not reply:
            self._raise_exit_error(process)
        found = json.loads(reply)
        if isinstance(found, str):
            raise _CheckFailedError(found)
        return found

    def stop(self) -> None:
        if self._process is None:
            return
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._process = None

    def _start(self) -> subprocess.Popen[str]:
        # the order of SymPy's sets must not differ between processes
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)  # noqa: PTH109
        env = os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": "0"}
        command = [sys.executable, "-m", "trainer.rewards.worker", str(self._seconds)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True, encoding="utf-8"
        )
        return self._process

    def _raise_exit_error(self, process: subprocess.Popen[str]) -> NoReturn:
        assert process.stdout is not None
        code = process.wait()
        process.stdout.close()
        try:
            assert process.stdin is not None
            process.stdin.close()
        except BrokenPipeError:
            pass  # what it was not there to read
        self._process = None
        if limits.is_timeout(code):
            raise _CheckTimeoutError
        raise _WorkerDiedError(f"its process ended with code {code}")

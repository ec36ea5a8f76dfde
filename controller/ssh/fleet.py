"""All the workers of a pod over SSH, one thread each. What fails on one is a value beside the answers of the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from tenacity import RetryCallState, Retrying, retry_if_exception, wait_exponential

from controller.agent.protocol import OBSERVE, A, Command, Observation, ObserveQuestion, Q
from controller.core.errors import SlipwayError
from controller.ssh.agent_bundle import bundle
from controller.ssh.connect import Access, Kind, WorkerError
from controller.ssh.connection import Link

if TYPE_CHECKING:
    from controller.ssh.worker_connection import Dialer, WorkerConnection

__all__ = ["Access", "Fleet", "WorkerError", "WorkersFailed", "failures"]

ATTEMPTS = 3
PASSING: frozenset[Kind] = frozenset({"refused", "dropped"})
"""What may be over in a second. Every agent command can be repeated."""
PASSING_WHILE_FRESH: frozenset[Kind] = frozenset({"refused", "dropped", "timeout", "auth"})
"""What a VM does that has just been created, and learns of its users only after a while."""
LOOKS = frozenset({"observe", "state", "guard_state"})
"""The agent commands that change nothing."""
FENCED = frozenset(
    {"install_code", "install_venv", "write_config", "tidy", "run_setup", "fetch_asset", "start", "stop"}
)
"""Those that only the controller which has the lease may send; they carry its token."""
SURVEY_SECONDS = 10.0


class WorkersFailed(SlipwayError):
    """Some workers could not do what they had to."""

    def __init__(self, words: str, errors: Sequence[WorkerError] = ()) -> None:
        super().__init__(words)
        self.errors = tuple(errors)


def failures(answers: Sequence[object]) -> list[WorkerError]:
    return [answer for answer in answers if isinstance(answer, WorkerError)]


@dataclass
class _Survey:
    """What all workers observed at one time, and who has had the answers."""

    payload: ObserveQuestion
    answers: list[Observation | WorkerError]
    time: float
    given: set[str] = field(default_factory=set)


class Fleet:
    """Connections to the workers of one incarnation of a pod. Threads may share it."""

    def __init__(self, access: Access, sleep: Callable[[float], None] = time.sleep) -> None:
        """Nothing is connected before the first call.

        Args:
            sleep: how to wait between attempts.
        """
        self._access, self._sleep = access, sleep
        self._survey: _Survey | None = None
        self.guard: Callable[[], tuple[str, int]] = lambda: ("", 0)
        """Gives our lease, its place and its token, 0 for none; raises where another controller acts."""
        self._dialer: Dialer | None = None
        self._lock = threading.Lock()
        agent = bundle()
        self._links = [Link(access, worker, self._connect, agent) for worker in range(len(access.addresses))]

    def __len__(self) -> int:
        return len(self._links)

    def call(self, worker: int, command: Command[Q, A], payload: Q) -> A:
        """Run an agent command on one worker; tries again what may pass.

        Raises:
            WorkerError: it could not be reached, or the command failed there.
        """
        if command not in LOOKS:
            self._survey = None
        leased: dict[str, Any] = {}
        if command in FENCED and (lease := self.guard())[1]:
            leased = {"lease": {"place": lease[0], "token": lease[1]}}
        call: Callable[..., Any] = self._links[worker].call
        return self._retrying(worker, _attempts, PASSING)(call, command, {**payload, **leased})

    def call_all(
        self, command: Command[Q, A], payload: Q | Sequence[Q], workers: Sequence[int] | None = None
    ) -> list[A | WorkerError]:
        """Run an agent command on several workers at the same time.

        Args:
            payload: one for all, or one for each.
            workers: which ones, by default all.

        Returns:
            For each of them, in their order, its answer or why there is none.
        """
        who = range(len(self)) if workers is None else workers
        payloads: Sequence[Any] = payload if isinstance(payload, Sequence) else [payload] * len(who)
        return self._at_once([partial(self.call, w, command, p) for w, p in zip(who, payloads, strict=True)])

    def survey(self, payload: ObserveQuestion) -> list[Observation | WorkerError]:
        """Have all workers observe everything that several are going to `look` at; see there."""
        answers = self.call_all(OBSERVE, payload)
        self._survey = None if failures(answers) else _Survey(payload, answers, time.monotonic())
        return answers

    def look(self, who: str, payload: ObserveQuestion) -> list[Observation | WorkerError]:
        """What all workers observe now.

        Each one who asks is answered once from the last survey if that is seconds old and nothing was changed since:
        to start a Python on each worker for everyone who looks is what takes most of the time on 64 workers.
        """
        past = self._survey
        fresh = past is not None and time.monotonic() - past.time < SURVEY_SECONDS
        if past is not None and fresh and who not in past.given and payload.items() <= past.payload.items():
            past.given.add(who)
            return past.answers
        return self.call_all(OBSERVE, payload)

    def warm_up(self, in_vain: Callable[[], bool] = lambda: False) -> list[Observation | WorkerError]:
        """Wait until every worker, which may just have been created, lets us in; what each then observes.

        Args:
            in_vain: asked between attempts: is there nothing left to wait for?
        """

        def late(state: RetryCallState) -> bool:
            waited = max(state.idle_for, state.seconds_since_start or 0.0)
            return waited >= self._access.warm_up_seconds or in_vain()

        return self._at_once(
            [
                partial(self._retrying(worker, late, PASSING_WHILE_FRESH), link.call, OBSERVE, {})
                for worker, link in enumerate(self._links)
            ]
        )

    def stream(self, worker: int, command: Command[Q, A], payload: Q) -> Iterator[A]:
        """Run an agent command that answers line by line.

        Raises:
            WorkerError: also in mid-stream; where to resume is in the lines.
        """
        lines: Iterator[Any] = self._links[worker].stream(command, payload)
        return lines

    def link(self, worker: int) -> Link:
        """The connection to one worker, for what is no command of the agent."""
        return self._links[worker]

    def close(self) -> None:
        """For good: calls and streams under way end with a WorkerError."""
        for link in self._links:
            link.close()
        if self._dialer is not None:
            self._dialer.close()

    def _connect(self, worker: int) -> WorkerConnection:
        from controller.ssh.worker_connection import Dialer  # fabric takes 0.2 s

        with self._lock:
            if self._dialer is None:
                self._dialer = Dialer(self._access)
        return self._dialer.connection(worker)

    def _at_once(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        if not calls:
            return []
        pool = ThreadPoolExecutor(max_workers=len(calls))
        try:
            return list(pool.map(_as_value, calls))
        except BaseException:  # an interrupt does not wait for the workers
            self.close()
            raise
        finally:
            pool.shutdown()

    def _retrying(self, worker: int, stop: Callable[[RetryCallState], bool], kinds: frozenset[Kind]) -> Retrying:
        def passing(error: BaseException) -> bool:
            return isinstance(error, WorkerError) and error.kind in kinds and not self._links[worker].closed

        return Retrying(
            retry=retry_if_exception(passing),
            stop=stop,
            wait=wait_exponential(multiplier=0.2, max=5),
            sleep=self._sleep,
            reraise=True,
        )


def _attempts(state: RetryCallState) -> bool:
    return state.attempt_number >= ATTEMPTS


def _as_value(call: Callable[[], A]) -> A | WorkerError:
    try:
        return call()
    except WorkerError as error:
        return error

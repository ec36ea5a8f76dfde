"""Run agent commands on all workers of a pod, one thread each. A worker's failure is returned as a value."""

from __future__ import annotations

import hmac
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from controller.agent.protocol import OBSERVE, A, Command, Observation, ObserveRequest, Q
from controller.core.errors import ConfigError, SlipwayError
from controller.core.this_process import LOOK_SECONDS
from controller.ssh.agent_link import AgentLink, ConnectionFailure, ConnectionParams, WorkerError, build_bundle
from controller.ssh.connection import Connection
from controller.ssh.login import WorkerVms

if TYPE_CHECKING:
    from tenacity import RetryCallState, Retrying

    from controller.ssh.worker_connection import Connector, WorkerConnection

__all__ = ["ConnectionParams", "Fleet", "WorkerError", "WorkersFailedError", "failures"]
ATTEMPTS = 3
TRANSIENT: frozenset[ConnectionFailure] = frozenset({"refused", "dropped"})
"""Failures that may pass within seconds. Every agent command is safe to repeat."""
TRANSIENT_WHILE_BOOTING: frozenset[ConnectionFailure] = frozenset({"refused", "dropped", "timeout", "auth"})
"""Failures of a VM that has just been created and does not know its users yet."""
READ_ONLY_COMMANDS = frozenset({"observe", "state", "watchdog_state"})
"""Agent commands that change nothing."""
FENCED_COMMANDS = frozenset({
    "install_code", "install_venv", "write_config", "tidy", "run_setup", "fetch_asset", "check_health", "start", "stop",
})  # fmt: skip
"""Agent commands reserved for the holder of the lease; they carry its token."""
OBSERVATION_CACHE_SECONDS = 10.0


class WorkersFailedError(SlipwayError):
    """A step failed on some workers."""

    def __init__(self, message: str, errors: Sequence[WorkerError] = ()) -> None:
        super().__init__(message)
        self.errors = tuple(errors)


class DiskFullError(WorkersFailedError):
    """The disks of some workers are full; `errors` names them."""


def failures(answers: Sequence[object]) -> list[WorkerError]:
    return [answer for answer in answers if isinstance(answer, WorkerError)]


@dataclass
class _ObservationCache:
    """Answers of all workers to one survey, and the callers who have received them."""

    payload: ObserveRequest
    answers: list[Observation | WorkerError]
    time: float
    readers: set[str] = field(default_factory=set)


class Fleet:
    """Connections to the workers of one incarnation of a pod. Thread-safe."""

    def __init__(
        self,
        access: ConnectionParams,
        sleep: Callable[[float], None] = time.sleep,
        links: Sequence[AgentLink] | None = None,
    ) -> None:
        """Create the connections; they open on first use.

        Args:
            access: parameters of the SSH connections.
            sleep: waits between attempts.
            links: connections to use in place of those over SSH.
        """
        self._params, self._sleep = access, sleep
        self._cache: _ObservationCache | None = None
        self.before_pod_write: Callable[[], tuple[str, int]] = lambda: ("", 0)
        """Returns place and token of our lease (0: none); raises if another controller holds it."""
        self.note: Callable[[str], object] = lambda message: None
        """Shows the user a message."""
        self.raise_if_interrupted: Callable[[], object] = lambda: None
        """Called while workers are waited for; raises if this controller is to end."""
        self._may_change_host_key: set[int] = set()
        self._connector: Connector | None = None
        self._lock = threading.Lock()
        if links is None:
            agent = build_bundle()
            links = [Connection(access, worker, self._connect, agent) for worker in range(len(access.addresses))]
        self._connections = links

    def derive_secret(self, purpose: str) -> str:
        """Return a secret for a purpose: the same whenever this key asks, and nobody without the key can compute it."""
        return hmac.digest(self._params.key.read_bytes(), purpose.encode(), "sha256").hex()

    def __len__(self) -> int:
        return len(self._connections)

    def call(self, worker: int, command: Command[Q, A], payload: Q) -> A:
        """Run an agent command on one worker, with retries for transient failures.

        Raises WorkerError if the worker is unreachable, or the command failed there.
        """
        if command not in READ_ONLY_COMMANDS:
            self._cache = None
        leased: dict[str, Any] = {}
        if command in FENCED_COMMANDS and (lease := self.before_pod_write())[1]:
            leased = {"lease": {"place": lease[0], "token": lease[1]}}
        call: Callable[..., Any] = self._connections[worker].call
        retrying = self._retrying(worker, lambda state: state.attempt_number >= ATTEMPTS, TRANSIENT)
        return retrying(call, command, {**payload, **leased})

    def call_all(
        self, command: Command[Q, A], payload: Q | Sequence[Q], workers: Sequence[int] | None = None
    ) -> list[A | WorkerError]:
        """Run an agent command on several workers in parallel.

        Args:
            payload: one for all workers, or one for each.
            workers: indices of the workers, by default all.

        Returns:
            The answer or the error of each worker, in their order.
        """
        who = range(len(self)) if workers is None else workers
        payloads: Sequence[Any] = payload if isinstance(payload, Sequence) else [payload] * len(who)
        return self._run_parallel([partial(self.call, w, command, p) for w, p in zip(who, payloads, strict=True)])

    def prefetch(self, payload: ObserveRequest) -> list[Observation | WorkerError]:
        """Observe all workers once on behalf of several callers of `observe`."""
        answers = self.call_all(OBSERVE, payload)
        self._cache = None if failures(answers) else _ObservationCache(payload, answers, time.monotonic())
        return answers

    def observe(self, who: str, payload: ObserveRequest) -> list[Observation | WorkerError]:
        """Return what all workers observe now.

        Each caller `who` is answered once from the last survey if it is seconds old and nothing has changed since.
        Otherwise each caller would start a Python on each worker, which takes most of the time on 64 workers.
        """
        past = self._cache
        fresh = past is not None and time.monotonic() - past.time < OBSERVATION_CACHE_SECONDS
        if past is not None and fresh and who not in past.readers and payload.items() <= past.payload.items():
            past.readers.add(who)
            return past.answers
        return self.call_all(OBSERVE, payload)

    def warm_up(self, in_vain: Callable[[], bool] = lambda: False) -> list[Observation | WorkerError]:
        """Wait until every worker, possibly just created, accepts connections; return what each observes.

        Args:
            in_vain: called between attempts; returns True if waiting is pointless.
        """

        def late(state: RetryCallState) -> bool:
            waited = max(state.idle_for, state.seconds_since_start or 0.0)
            return waited >= self._params.warm_up_seconds or in_vain()

        return self._run_parallel(
            [
                partial(self._retrying(worker, late, TRANSIENT_WHILE_BOOTING), link.call, OBSERVE, {})
                for worker, link in enumerate(self._connections)
            ]
        )

    def stream(self, worker: int, command: Command[Q, A], payload: Q) -> Iterator[A]:
        """Run an agent command that answers line by line.

        Raises WorkerError, possibly in mid-stream; the lines tell where to resume.
        """
        lines: Iterator[Any] = self._connections[worker].stream(command, payload)
        return lines

    def expect_new_host_keys(self) -> None:
        """Accept, once per worker, a changed host key that Google publishes at that moment."""
        self._may_change_host_key |= set(range(len(self)))

    def _accept_new_host_key(self, worker: int, message: str) -> bool:
        """Return whether a worker may have a new host key, and note that it has one."""
        if worker not in self._may_change_host_key and not self._params.follow_host_keys:
            return False
        self._may_change_host_key.discard(worker)
        self.note(message)
        return True

    def connection(self, worker: int) -> AgentLink:
        """Return the connection to one worker, for uses other than agent commands."""
        return self._connections[worker]

    def ssh_connection(self, worker: int) -> Connection:
        """Return the SSH connection to one worker. Raises ConfigError if the worker is this machine."""
        link = self._connections[worker]
        if not isinstance(link, Connection):
            raise ConfigError("cloud=here: you are on the machine, so there is no SSH; `slipway exec` runs a command")
        return link

    def close(self) -> None:
        """Close permanently. Pending calls and streams raise WorkerError."""
        for link in self._connections:
            link.close()
        if self._connector is not None:
            self._connector.close()

    def _connect(self, worker: int) -> WorkerConnection:
        from controller.ssh.worker_connection import Connector  # fabric takes 0.2 s

        with self._lock:
            if self._connector is None:
                self._connector = Connector(self._params, self._accept_new_host_key)
        return self._connector.connection(worker)

    def _run_parallel(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        if not calls:
            return []
        pool = ThreadPoolExecutor(max_workers=len(calls))
        answers = [pool.submit(_catch_worker_error, call) for call in calls]
        try:
            while (now := wait(answers, LOOK_SECONDS, FIRST_EXCEPTION)).not_done:
                self.raise_if_interrupted()
                for answer in now.done:
                    answer.result()
            return [answer.result() for answer in answers]
        except BaseException:  # do not wait for the workers after an interrupt
            self.close()
            raise
        finally:
            pool.shutdown()

    def _retrying(
        self, worker: int, stop: Callable[[RetryCallState], bool], kinds: frozenset[ConnectionFailure]
    ) -> Retrying:
        from tenacity import Retrying, retry_if_exception, wait_exponential  # slow to import; `plan` needs none of it

        def passing(error: BaseException) -> bool:
            return isinstance(error, WorkerError) and error.kind in kinds and not self._connections[worker].closed

        return Retrying(
            retry=retry_if_exception(passing),
            stop=stop,
            wait=wait_exponential(multiplier=0.2, max=5),
            sleep=self._sleep,
            reraise=True,
        )


def _catch_worker_error(call: Callable[[], A]) -> A | WorkerError:
    try:
        return call()
    except WorkerError as error:
        return error


@dataclass(frozen=True)
class SshTarget:
    """The facts about a pod that SSH needs.

    Attributes:
        name: name of the pod.
        vms: its VMs.
        uid: identifies this incarnation.
        zone: zone of the node.
        network: name or URL of its network.
        tags: network tags of its VMs, which firewall rules may aim at.
        addresses: internal and external address of each worker.
    """

    name: str
    vms: WorkerVms
    uid: str
    zone: str
    network: str
    tags: tuple[str, ...]
    addresses: tuple[tuple[str, str | None], ...]


class Fleets:
    """Holds one fleet at a time; a new incarnation closes the connections to the previous one."""

    def __init__(
        self,
        connect: Callable[[SshTarget], Fleet],
        lease: Callable[[], tuple[str, int]],
        note: Callable[[str], object] = lambda message: None,
        raise_if_interrupted: Callable[[], object] = lambda: None,
    ) -> None:
        """Store the parameters.

        Args:
            connect: opens the connections to a pod.
            lease: returns place and token of our lease; it is called before commands that change a worker.
            note: shows the user a message.
            raise_if_interrupted: called while workers are waited for; raises if this controller is to end.
        """
        self._connect, self._lease, self._note = connect, lease, note
        self._raise_if_interrupted = raise_if_interrupted
        self._repaired: set[str] = set()
        self._fleets: dict[str, Fleet] = {}
        self._lock = threading.Lock()

    def of(self, pod: SshTarget) -> Fleet:
        with self._lock:
            if pod.uid not in self._fleets:
                self._close()
                self._fleets[pod.uid] = self._connect(pod)
                self._fleets[pod.uid].before_pod_write = self._lease
                self._fleets[pod.uid].note = self._note
                self._fleets[pod.uid].raise_if_interrupted = self._raise_if_interrupted
                if pod.uid in self._repaired:
                    self._fleets[pod.uid].expect_new_host_keys()
            return self._fleets[pod.uid]

    def expect_new_host_keys(self, uid: str) -> None:
        """Accept a new host key that Google publishes once per worker: Google is repairing this incarnation's VMs."""
        with self._lock:
            self._repaired.add(uid)
            if fleet := self._fleets.get(uid):
                fleet.expect_new_host_keys()

    def close(self) -> None:
        with self._lock:
            self._close()

    def _close(self) -> None:
        for uid in list(self._fleets):
            self._fleets.pop(uid).close()

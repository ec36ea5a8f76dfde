"""Follow a run that is under way: stream every worker's log and metrics, and notice how it ends.

One thread per worker reads its agent's stream into a queue; this thread reads the queue and, now and then, asks for
the node's state. A stream that breaks is taken up again where it stopped.
"""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from controller.clock import Interrupted
from controller.resources.node import Node
from controller.ssh import Fleet, WorkerError
from controller.world import World

STRAGGLER_SECONDS = 15.0
"""After one worker has failed, the others are given this long to end by themselves; JAX may hang for minutes."""
LOST_SECONDS = 120.0
"""A worker that cannot be reached for this long, on a node that is READY, is lost."""
TAIL_BYTES = 2000
"""Of each log, what is shown of a run that was running before."""


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended. `ends` holds the last state of each worker that ended, in the order they ended."""

    kind: Literal["finished", "failed", "preempted", "over_budget"]
    words: str = ""
    ends: tuple[tuple[int, dict[str, Any]], ...] = ()

    @property
    def first_failure(self) -> tuple[int, dict[str, Any]] | None:
        """The worker that failed first, by its own clock: its log is the one to read."""
        failed = [(w, e) for w, e in self.ends if e["code"] != 0]
        return min(failed, key=lambda item: item[1].get("ended") or float("inf"), default=None)


@dataclass
class _Stream:
    """How far one worker's stream has been read; negative offsets count from the end."""

    log_offset: int = 0
    metrics_offset: int = 0
    lost_since: float | None = None
    end: dict[str, Any] | None = None


@dataclass
class Follower:
    """Follows one attempt of a run on one incarnation of the pod; one that has `begun` is joined near its end."""

    world: World
    node: Node
    fleet: Fleet
    run_id: str
    attempt: int
    poll_seconds: float
    begun: bool = False
    over: Callable[[], str] = lambda: ""
    """Why the run must end now, empty while it need not."""
    _queue: queue.Queue[tuple[int, dict[str, Any]]] = field(default_factory=queue.Queue)
    _stopping: threading.Event = field(default_factory=threading.Event)

    def follow(self) -> Outcome | None:
        """Block until the attempt has ended, however it ends; None: Ctrl-C was pressed, and the run goes on."""
        offsets = (-TAIL_BYTES, -1) if self.begun else (0, 0)
        streams = [_Stream(*offsets) for _ in self.node.endpoints]
        threads = [
            threading.Thread(target=self._read, args=(worker, stream), daemon=True, name=f"follow-{worker}")
            for worker, stream in enumerate(streams)
        ]
        for thread in threads:
            thread.start()
        try:
            with _ctrl_c_sets(self._stopping):
                return self._wait(streams)
        finally:
            self._stopping.set()

    def _wait(self, streams: list[_Stream]) -> Outcome | None:
        poll_again = self.world.clock.deadline(self.poll_seconds)
        given_up: Callable[[], bool] | None = None
        ends: list[tuple[int, dict[str, Any]]] = []
        while not self._stopping.is_set():
            try:
                worker, line = self._queue.get(timeout=min(self.poll_seconds, 0.5))
            except queue.Empty:
                worker, line = -1, {}
            if "end" in line:
                ends.append((worker, line["end"]))
                if line["end"]["code"] != 0 and given_up is None:
                    given_up = self.world.clock.deadline(STRAGGLER_SECONDS)
                    poll_again = self.world.clock.deadline(0)
            elif line:
                self._tell(worker, line)
            if len(ends) == len(streams):
                return self._verdict(ends)
            if given_up is not None and given_up():
                self.fleet.call_all("stop", {"run_id": self.run_id, "attempt": self.attempt, "grace_seconds": 5.0})
                given_up = self.world.clock.deadline(STRAGGLER_SECONDS)
            if poll_again() or "lost" in line:
                poll_again = self.world.clock.deadline(self.poll_seconds)
                if gone := self.node.lost(self.world):
                    return Outcome("preempted", gone, tuple(ends))
                if over := self.over():
                    return Outcome("over_budget", over, tuple(ends))
                if lost := self._lost(streams):
                    return Outcome("failed", lost, tuple(ends))
        return None

    def _verdict(self, ends: list[tuple[int, dict[str, Any]]]) -> Outcome:
        if all(end["code"] == 0 for _, end in ends):
            return Outcome("finished", ends=tuple(ends))
        if gone := self.node.lost(self.world):  # a VM that is taken away kills its program first
            return Outcome("preempted", gone, tuple(ends))
        return Outcome("failed", ends=tuple(ends))

    def _lost(self, streams: list[_Stream]) -> str:
        now = self.world.clock.now()
        lost = [i for i, s in enumerate(streams) if s.lost_since and not s.end and now - s.lost_since > LOST_SECONDS]
        return f"no SSH to worker {', '.join(map(str, lost))} for {LOST_SECONDS:.0f} s" if lost else ""

    def _tell(self, worker: int, line: dict[str, Any]) -> None:
        if "metrics" in line and worker == 0:
            self.world.events.emit("metrics", self.run_id, metrics=line["metrics"])
        elif "log" in line:
            self.world.events.emit("log", self.run_id, line["log"], worker=worker)
        elif "warning" in line or "lost" in line:
            self.world.events.emit("note", self.run_id, f"worker {worker}: {line.get('warning') or line['lost']}")

    def _read(self, worker: int, stream: _Stream) -> None:
        """Read one worker's stream until it ends, taking it up again after every break."""
        while not self._stopping.is_set() and stream.end is None:
            payload = {
                "run_id": self.run_id,
                "attempt": self.attempt,
                "log_offset": stream.log_offset,
                "metrics_offset": stream.metrics_offset,
            }
            try:
                for line in self.fleet.stream(worker, "watch", payload):
                    stream.lost_since = None
                    if "log" in line:
                        stream.log_offset = line["offset"]
                    elif "metrics" in line:
                        stream.metrics_offset = line["offset"]
                    elif "end" in line:
                        stream.end = line["end"]
                    self._queue.put((worker, line))
                    if self._stopping.is_set():
                        return
            except WorkerError as error:
                if stream.lost_since is None:
                    stream.lost_since = self.world.clock.now()
                    self._queue.put((worker, {"lost": str(error)}))
            try:
                if stream.end is None:
                    self.world.clock.sleep(self.world.pace)
            except Interrupted:
                return


@contextmanager
def _ctrl_c_sets(event: threading.Event) -> Iterator[None]:
    """While this lasts, Ctrl-C sets an event instead of raising wherever the program happens to be.

    An exception out of nowhere may be swallowed by whatever library it hits. Left alone where Ctrl-C is ignored anyway
    (under nohup), and outside the main thread, which alone may handle signals.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: event.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)

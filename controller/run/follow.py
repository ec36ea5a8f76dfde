"""Follow a running attempt: stream every worker's log and metrics, observe, and request a verdict.

One thread per worker reads its agent's stream into a queue; another polls Google for the state of the pod.
`diagnosis.py` interprets the observations; this module only applies the immediate consequence: when one worker ends,
the others are stopped.
"""

import queue
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from conf.schema.run_sections import Recovery
from controller.agent.protocol import STOP, WATCH, State, StopRequest, WatchLine, WatchRequest
from controller.context import Context
from controller.core.this_process import FreedMemory, InterruptedSleepError
from controller.gcp.google_errors import GoogleError
from controller.recovery.diagnosis import diagnose
from controller.recovery.responses import AttemptOutcome, Observation, Verdict, VerdictKind, WorkerStatus
from controller.recovery.watches import PodWatch, TracebackWatch
from controller.resources.pod.node import Node
from controller.ssh.fleet import Fleet, WorkerError

STRAGGLER_SECONDS = 3.0
"""Time for the other workers to end by themselves after one has failed; JAX may hang for minutes."""
ROOT_CAUSE_SECONDS = 15.0
"""The longer time if that worker only lost its peers: the one that failed first may still have log lines to send."""
STOP_SECONDS = 20.0
"""Maximum wait for workers that were asked to stop; after it their last log lines are given up."""
CONFIRM_SECONDS = 5.0
"""Time for Google to report a preemption before a verdict about the workers counts."""
MAX_STEP = 1e15
QUEUED_LINES = 64
"""Lines of all workers that wait to be processed; a worker that sends faster waits."""
LINES_AT_ONCE = 1000
"""Lines that are processed before the next look at the pod, the lease and the budget."""
TAIL_BYTES = 2000
"""Bytes shown of each log when joining a run that was already running."""
IMMEDIATE_KINDS = frozenset({VerdictKind.PREEMPTED, VerdictKind.OVER_BUDGET, VerdictKind.CANCELLED})
"""Verdicts that need no evidence from other workers."""


class _Line(WatchLine, total=False):
    """Line from a worker, or the reason why its stream broke off."""

    lost: str


@dataclass
class _Stream:
    """Stream of one worker: its read position (a negative offset counts from the end) and its latest status."""

    log_offset: int
    metrics_offset: int
    last_heard: float
    opened: float
    ssh_error: str = ""
    stopped_since: float | None = None
    exited: State | None = None
    drained: bool = False
    stop_requested: bool = False
    notice: str = ""
    ended_at: float = 0.0
    """By this machine's clock: each worker's may be wrong in its own way."""

    def status(self, now: float, since: float, thread_exception: str) -> WorkerStatus:
        """Return the status for the diagnosis. Silence counts from when the network was last known to work."""
        end = self.exited or {}
        return WorkerStatus(
            silent_seconds=max(0.0, now - max(self.last_heard, since)),
            ssh_error=self.ssh_error,
            unreachable=bool(self.ssh_error),
            ended=self.exited is not None,
            stop_requested=self.stop_requested,
            code=end.get("code"),
            signal=end.get("signal") or "",
            error=end.get("error") or "",
            ended_at=self.ended_at,
            log_tail=end.get("log_tail", ""),
            oom_kills=end.get("oom_kills") or 0,
            free_gb=end.get("free_gb"),
            thread_exception=thread_exception,
            stopped_seconds=0.0 if self.stopped_since is None else now - self.stopped_since,
            notice=self.notice,
        )


@dataclass
class StepTracker:
    """Tracker of the steps that worker 0 reports, their longest intervals, and the time of the last sign of life."""

    last_activity: float
    last_step: int | None = None
    step_at: float = 0.0
    intervals: list[float] = field(default_factory=list)

    def record(self, line: _Line, worker: int, now: float) -> None:
        if "log" in line or "metrics" in line:  # an evaluation may be long and print output
            self.last_activity = now
        step = line.get("metrics", {}).get("step")
        if worker == 0 and isinstance(step, int | float) and abs(step) < MAX_STEP:  # JSON allows NaN and infinity
            if self.last_step is not None and step > self.last_step:
                self.intervals = sorted([*self.intervals, now - self.step_at])[-3:]  # keep the longest
            self.last_step, self.step_at = int(step), now


def hang_limit(setting: float | None, intervals: Sequence[float]) -> float | None:
    """Return the seconds of silence that mean a hang: the setting, or ten times the longest interval between steps.

    None while fewer than three intervals are known: compilation and the first data may take any time. At least 15
    minutes, since the first evaluation may be long and silent.
    """
    if setting is not None:
        return setting
    return max(900.0, 10 * max(intervals)) if len(intervals) >= 3 else None


@dataclass
class Follower:
    """Follows one attempt of a run on one incarnation of the pod; if `already_running`, near the end of its logs."""

    context: Context
    node: Node
    fleet: Fleet
    run_id: str
    attempt: int
    recovery: Recovery
    poll_seconds: float
    exit_codes: Mapping[int, VerdictKind] = field(default_factory=dict)
    """Exit codes by which the program tells what is wrong."""
    already_running: bool = False
    budget_exceeded: Callable[[], str] = lambda: ""
    """Returns why the run must end now, empty while it need not."""
    is_cancelled: Callable[[], bool] = lambda: False
    """Returns whether the run was cancelled on purpose."""
    is_leader: bool = True
    """Whether this controller may stop workers; a viewer takes the first sign of an end as the end."""
    on_tick: Callable[[], object] = lambda: None
    """Called many times a second; raises when there is nothing left to follow."""
    on_idle: Callable[[float], object] = lambda seconds: None
    """Called as often with the seconds since any worker printed or logged something, while Google's API answers."""
    _queue: queue.Queue[tuple[int, _Line]] = field(default_factory=lambda: queue.Queue(QUEUED_LINES))
    _stopping: threading.Event = field(default_factory=threading.Event)
    _ends: list[tuple[int, State]] = field(default_factory=list)
    _last_verdict: Verdict = field(default_factory=lambda: Verdict(VerdictKind.RUNNING))
    _waiting_since: float | None = None
    _maintained_until: float = 0.0
    _tracebacks: TracebackWatch = field(default_factory=TracebackWatch)

    def follow(self) -> AttemptOutcome | None:
        """Block until the attempt has ended in any way; None: Ctrl-C was pressed, and the run continues."""
        offsets, now = (-TAIL_BYTES, -1) if self.already_running else (0, 0), self.context.clock.monotonic()
        streams = [_Stream(*offsets, last_heard=now, opened=now) for _ in self.node.status.endpoints]
        for worker, stream in enumerate(streams):
            reading = threading.Thread(
                target=self._read_stream, args=(worker, stream), daemon=True, name=f"follow-{worker}"
            )
            reading.start()
        since = self.context.clock.now()
        pod = PodWatch(lambda: self.node.pod_seen(self.context, since=since), self.context.clock, self.poll_seconds)
        try:
            with _ctrl_c_sets(self._stopping):
                return self._wait(streams, pod, StepTracker(now))
        finally:
            self._stopping.set()
            pod.close()

    def _wait(self, streams: list[_Stream], pod: PodWatch, steps: StepTracker) -> AttemptOutcome | None:
        freed = FreedMemory(self.context.clock)
        while not self._stopping.is_set():
            freed.return_if_due()
            self.on_tick()
            self._drain_queue(streams, steps)
            # workers that have printed a traceback and nothing since may wait for the others at exit
            for worker, found in self._tracebacks.newly_silent(self.context.clock.monotonic()):
                if streams[worker].exited is None:
                    message = f"worker {worker} has been silent since {found.message}; its program has not ended"
                    self.context.events.note(self.run_id, message)
            self.on_idle(self._idle_seconds(streams, pod, steps))
            verdict = self._diagnose(streams, pod, steps)
            if verdict.kind is VerdictKind.RUNNING or self._should_wait(verdict):
                self._report_change(verdict)
                continue
            if verdict.kind is VerdictKind.FINISHED and not self._streams_drained(streams, pod):
                continue  # logs are still being uploaded
            if self.is_leader and verdict.kind not in (VerdictKind.FINISHED, VerdictKind.OVER_BUDGET):
                verdict = self._confirm(verdict, streams, pod, steps)
            if verdict is not None and not self._stopping.is_set():
                return AttemptOutcome(verdict, tuple(self._ends), steps.last_step)
        return None

    def _streams_drained(self, streams: list[_Stream], pod: PodWatch) -> bool:
        """Return whether programs that ended successfully have no more output to send; a lost pod sends none."""
        silent = [i for i, stream in enumerate(streams) if not stream.drained]
        status = pod.latest()
        if not silent or status is None or status.is_usable:
            return not silent
        self._ends += [(i, exited) for i in silent if (exited := streams[i].exited) is not None]
        return True

    def _confirm(self, verdict: Verdict, streams: list[_Stream], pod: PodWatch, steps: StepTracker) -> Verdict | None:
        """Confirm a verdict with fresh data from Google and, where it matters, after all other workers have ended.

        A preempted VM kills its program first, so the state of the pod must be newer than that. Returns None on a false
        alarm.
        """
        clock = self.context.clock
        began, late = clock.monotonic(), clock.deadline(CONFIRM_SECONDS)
        while not pod.is_newer_than(began) and not late() and verdict.kind is not VerdictKind.NETWORK_LOST:
            self._drain_queue(streams, steps)
        verdict = self._diagnose(streams, pod, steps)
        if (
            verdict.kind in (VerdictKind.RUNNING, VerdictKind.FINISHED)
            or self._should_wait(verdict)
            or self._stopping.is_set()
        ):
            return None
        at_once = verdict.kind in IMMEDIATE_KINDS and not verdict.from_notice
        if not at_once and verdict.kind is not VerdictKind.HUNG and not verdict.whole_pod:
            verdict = self._stop_others(verdict, streams, pod, steps)
            if self._should_wait(verdict):
                return None
        if self._was_cancelled():
            return diagnose(Observation(None, (), cancelled=True))
        return verdict

    def _was_cancelled(self) -> bool:
        try:
            return self.is_cancelled()
        except GoogleError:  # unknown; the next step asks Google for more than that
            return False

    def _stop_others(self, verdict: Verdict, streams: list[_Stream], pod: PodWatch, steps: StepTracker) -> Verdict:
        """Stop the other workers after one has ended; their last output may refine the verdict."""

        def left() -> list[int]:
            return [i for i, s in enumerate(streams) if not s.drained and i not in verdict.unreachable]

        def able() -> list[int]:
            """Return the workers that may still end by themselves, without those that a signal has stopped."""
            return [i for i in left() if streams[i].stopped_since is None]

        def wait(seconds: float, whom: Callable[[], list[int]]) -> None:
            late = self.context.clock.deadline(seconds)
            while whom() and not late() and not self._stopping.is_set():
                self._drain_queue(streams, steps)

        if left():
            self.context.events.note(self.run_id, f"{verdict.evidence[0]}; stopping the others")
        wait(STRAGGLER_SECONDS if verdict.certain else ROOT_CAUSE_SECONDS, able)
        running = [i for i in left() if streams[i].exited is None]
        if running and not self._stopping.is_set():
            for worker in running:
                streams[worker].stop_requested = True
            payload: StopRequest = {"run_id": self.run_id, "attempt": self.attempt, "grace_seconds": 5.0}
            self.fleet.call_all(STOP, payload, workers=running)
        wait(STOP_SECONDS, left)
        final = self._diagnose(streams, pod, steps)
        return verdict if final.kind in (VerdictKind.RUNNING, VerdictKind.FINISHED, VerdictKind.NETWORK_LOST) else final

    def _diagnose(self, streams: list[_Stream], pod: PodWatch, steps: StepTracker) -> Verdict:
        if pod.error is not None:
            raise pod.error
        now, recovery = self.context.clock.monotonic(), self.recovery
        return diagnose(
            Observation(
                pod=pod.latest(),
                workers=tuple(
                    stream.status(now, self._audible_since(pod), self._tracebacks.thread_exception(worker))
                    for worker, stream in enumerate(streams)
                ),
                idle_seconds=self._idle_seconds(streams, pod, steps),
                step=steps.last_step,
                hang_seconds=hang_limit(recovery.hang_timeout_seconds, steps.intervals),
                lost_seconds=recovery.heartbeat_timeout_seconds,
                exit_codes=self.exit_codes,
                over_budget=self.budget_exceeded(),
            )
        )

    def _idle_seconds(self, streams: list[_Stream], pod: PodWatch, steps: StepTracker) -> float:
        return self.context.clock.monotonic() - max(steps.last_activity, streams[0].opened, self._audible_since(pod))

    def _audible_since(self, pod: PodWatch) -> float:
        return max(pod.api_up_since, self._maintained_until)

    def _should_wait(self, verdict: Verdict) -> bool:
        """Return whether the policy is to wait; maintenance at most for as long as creating a pod may take."""
        if getattr(self.recovery.policy, verdict.kind, "") != "wait":
            self._waiting_since = None
            return False
        now = self.context.clock.monotonic()
        self._maintained_until = now if verdict.kind is VerdictKind.MAINTENANCE else self._maintained_until
        self._waiting_since = self._waiting_since or now
        return verdict.kind is VerdictKind.NETWORK_LOST or now - self._waiting_since < self.node.create_seconds

    def _report_change(self, verdict: Verdict) -> None:
        before, self._last_verdict = self._last_verdict, verdict
        if verdict.kind is before.kind and set(verdict.evidence) <= set(before.evidence):
            return
        if verdict.kind is VerdictKind.RUNNING:
            self.context.events.note(self.run_id, verdict.summary or "the run continues")
        elif verdict.kind is not before.kind:
            self.context.events.note(self.run_id, f"{verdict}; waiting")

    def _drain_queue(self, streams: list[_Stream], steps: StepTracker) -> None:
        """Process what the workers have sent, or wait a moment if there is nothing."""
        wait = min(self.poll_seconds, 0.5)
        for _ in range(LINES_AT_ONCE):
            try:
                worker, line = self._queue.get(timeout=wait)
            except queue.Empty:
                return
            wait = 0.0
            steps.record(line, worker, self.context.clock.monotonic())
            self._emit(worker, line)
            if "notice" in line:
                if not any(stream.notice for stream in streams):
                    self.context.events.note(self.run_id, f"worker {worker} received a {line['notice']} notice")
                streams[worker].notice = line["notice"]
            elif "exited" in line:
                streams[worker].exited = line["exited"]
            elif "end" in line:
                streams[worker].exited, streams[worker].drained = line["end"], True
                self._ends.append((worker, line["end"]))

    def _emit(self, worker: int, line: _Line) -> None:
        if "metrics" in line and worker == 0:
            self.context.events.emit("metrics", self.run_id, metrics=line["metrics"])
        elif "log" in line:
            self.context.events.emit("log", self.run_id, line["log"], worker=worker)
            if found := self._tracebacks.record(worker, line["log"], self.context.clock.monotonic()):
                about = {"worker": worker, "exception": found.message}
                self.context.events.emit("traceback", self.run_id, found.text.rstrip(), **about)
        elif "warning" in line or "lost" in line:
            message = line.get("lost") or f"worker {worker}: {line.get('warning')}"  # a lost worker names itself
            self.context.events.note(self.run_id, message)

    def _read_stream(self, worker: int, stream: _Stream) -> None:
        """Read one worker's stream until it ends, reconnecting after every break."""
        clock = self.context.clock
        while not self._stopping.is_set():
            payload: WatchRequest = {
                "run_id": self.run_id,
                "attempt": self.attempt,
                "log_offset": stream.log_offset,
                "metrics_offset": stream.metrics_offset,
            }
            try:
                for line in self.fleet.stream(worker, WATCH, payload):
                    stream.last_heard = clock.monotonic()
                    if stream.ssh_error:
                        stream.ssh_error, stream.opened = "", stream.last_heard
                    if "log" in line and "offset" in line:
                        stream.log_offset = line["offset"]
                    elif "metrics" in line and "offset" in line:
                        stream.metrics_offset = line["offset"]
                    elif "heartbeat" in line:
                        stopped = line.get("stopped", False)
                        stream.stopped_since = (stream.stopped_since or stream.last_heard) if stopped else None
                    if end := line.get("exited") or line.get("end"):
                        off = clock.now() - line["now"] if "now" in line else 0.0
                        stream.ended_at = (end["ended"] or -off) + off
                    self._pass_on(worker, {**line})
                    if "end" in line or self._stopping.is_set():
                        return
            except WorkerError as error:
                if not stream.ssh_error:
                    self._pass_on(worker, {"lost": str(error)})
                stream.ssh_error = error.message
            try:
                clock.sleep(self.context.poll_seconds)
            except InterruptedSleepError:
                return

    def _pass_on(self, worker: int, line: _Line) -> None:
        """Queue a line once there is room; drop it if nobody follows any more."""
        while not self._stopping.is_set():
            with suppress(queue.Full):
                self._queue.put((worker, line), timeout=1.0)
                return


@contextmanager
def _ctrl_c_sets(event: threading.Event) -> Iterator[None]:
    """Make Ctrl-C set an event instead of raising while the context is open.

    An asynchronous exception may be swallowed by any library that it hits. Does nothing where Ctrl-C is ignored (under
    nohup) and outside the main thread, which alone may handle signals.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: event.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)

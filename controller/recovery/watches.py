"""Watch a run from the side: Google's state of the pod, and the logs of all workers for what the program said last.

A JAX process whose peers have gone, or that exits while they run, ends with absl messages, C++ frames and the stacks
of all threads. These are consequences; the traceback before them, on one of the workers, is the cause.
"""

import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from controller.core.errors import SlipwayError
from controller.core.this_process import Clock, InterruptedSleepError
from controller.gcp.google_errors import GoogleError
from controller.resources.pod.provisioner import PodStatus


class FailureCause(StrEnum):
    """Resource that ran out or hardware that failed."""

    HBM = "hbm"
    RAM = "ram"
    DISK = "disk"
    HOST = "host"


LOG_PATTERNS: tuple[tuple[FailureCause, re.Pattern[str]], ...] = (
    (
        FailureCause.HBM,
        re.compile(
            r"RESOURCE_EXHAUSTED[^\n]*(?:[Mm]emory|HBM|hbm)|Ran out of memory (?:in|on) (?:memory space )?(?:hbm|HBM)|"
            r"exceeds available HBM"
        ),
    ),
    (
        FailureCause.RAM,
        re.compile(r"^(?:\[rank\d+\]: )?MemoryError\b|\b_ArrayMemoryError\b|std::bad_alloc|Cannot allocate memory|"
                   r"\[Errno 12\]|DataLoader worker .* killed by signal: Killed", re.MULTILINE),
    ),
    (FailureCause.DISK, re.compile(r"No space left on device|\[Errno 28\]|Disk quota exceeded|\[Errno 122\]")),
    (
        FailureCause.HOST,
        re.compile(
            r"Accelerator device halted prematurely|[Cc]ore halted|slice health check failed|"
            r"TPU initialization failed|Failed to get global TPU topology|uncorrectable (?:ECC|HBM)"
        ),
    ),
)  # fmt: skip
PEER_LOSS_PATTERN = re.compile(
    r"Connection (?:reset|closed) by peer|\bGloo\b(?!\] Rank \d+ is connected)|[Hh]eartbeat timeout|"
    r"coordination service|CoordinationService|Another task died|Shutdown barrier|lost its peers"
)
"""Messages of a JAX process whose peer has died."""
CONNECTED = re.compile(r"^.*\[Gloo\] Rank \d+ is connected to \d+ peer ranks.*\n?", re.MULTILINE)
KILLED_CHILD_PATTERN = re.compile(
    r"BrokenProcessPool|exitcode *: -9|Signal 9 \(SIGKILL\)|Signals\.SIGKILL|exit status 137|exit code 137|^Killed$",
    re.MULTILINE,
)
"""Messages of a program one of whose processes was killed: Python's pools and subprocesses, torchrun, a shell."""


def match_failure(text: str) -> FailureCause | None:
    """Return the first cause above that the text matches, or None."""
    return next((kind for kind, pattern in LOG_PATTERNS if pattern.search(text)), None)


def is_secondary_failure(text: str) -> bool:
    """Return whether the text only reports lost peers and no other known cause."""
    return match_failure(text) is None and PEER_LOSS_PATTERN.search(text) is not None


HEADER = "Traceback (most recent call last):"
RANK = re.compile(r"^\[(?:rank|default)\d+\]: ?", re.MULTILINE)
"""Prefix of each line of PyTorch's tracebacks: the number of the process."""
CHAINED = re.compile(
    r"\n\n(?:During handling of the above exception, another exception occurred|"
    r"The above exception was the direct cause of the following exception):\n\n\Z"
)
CRASH_REPORT = re.compile(
    r"^(?:[EF]\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ \S+:\d+\] |\*\*\* Check failure stack trace|Fatal Python error: |"
    r"Extension modules: |terminate called )",
    re.MULTILINE,
)
"""First line of what absl, C++ and Python's fault handler print about the end of a process."""
ABORTED = re.compile(r"^(?:F\d{4} \d\d:\d\d:\d\d\.|Fatal Python error: )", re.MULTILINE)
UNKNOWN_FLAGS = re.compile(r"^F\d{4} [^\]\n]*\] (Unknown flags? in XLA_FLAGS: [^\n]*)", re.MULTILINE)
"""What jaxlib says before it ends a process; libtpu's words about its own flags are no crash report."""
FIRST_AT_BARRIER = re.compile(r"Shutdown::.*?The first task at the barrier: (\d+)\.", re.DOTALL)
"""JAX's shutdown waits for all processes; when that fails, it names the process that came first."""
FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+)', re.MULTILINE)
CRASHED_STACK = re.compile(r"^Current thread [^\n]*\n(?:  File [^\n]*\n?)+", re.MULTILINE)
"""Stack of the thread that crashed, as Python's fault handler prints it, innermost call first."""
CRASHED_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)')
LIBRARIES = re.compile(r"/lib/python3\.\d+/|/(?:site|dist)-packages/")
THREAD = "Exception in thread "
"""Begins the line before the traceback of an exception that ended a thread."""
TAIL_LINES = 25
TRACEBACK_LINES = 60
MESSAGE_LINES = 12
"""Maximum number of lines of an exception's message."""


@dataclass(frozen=True)
class Traceback:
    """Last traceback of a log. `text` includes the exceptions that it was raised from."""

    text: str
    rest: str
    """What follows it in the log."""
    ended_thread: bool = False
    """Whether it ended a thread, and not the program."""

    @property
    def message(self) -> str:
        """Return the exception and the innermost frame, such as `ValueError: x (train.py:21)`."""
        block = self.text[self.text.rindex(HEADER) :]
        error = next((line for line in block.splitlines()[1:] if line[:1].strip()), "")
        frames = FRAME.findall(block)
        place = f" ({frames[-1][0].rpartition('/')[2]}:{frames[-1][1]})" if frames else ""
        return f"{error[:200]}{place}"

    @property
    def is_peer_loss(self) -> bool:
        """Return whether the exception only reports that another worker has gone."""
        return PEER_LOSS_PATTERN.search(self.text) is not None

    @property
    def is_final(self) -> bool:
        """Return whether the program itself printed nothing after it."""
        rest = self.rest.strip()
        report = CRASH_REPORT.match(rest)
        return not rest or (report is not None and ABORTED.search(rest) is not None)


def last_traceback(log: str) -> Traceback | None:
    """Return the last complete Python traceback of a log, without PyTorch's prefixes; None if there is none."""
    log = RANK.sub("", log)
    begin = log.rfind(HEADER)
    if begin < 0 or (begin and log[begin - 1] != "\n"):
        return None
    lines = log[begin:].splitlines(keepends=True)
    end = next((i for i, line in enumerate(lines[1:], 1) if line[:1].strip()), 0)
    if not end:
        return None  # cut off before the exception
    end += 1
    while end < min(len(lines), MESSAGE_LINES + 1) and _continues_message(lines[end]):
        end += 1
    text = "".join(lines[:end])
    rest = log[begin + len(text) :]
    ended_thread = log[:begin].rpartition("\n")[0].rpartition("\n")[2].startswith(THREAD)
    if CHAINED.search(log[:begin]) and (before := last_traceback(log[:begin])):
        text, ended_thread = f"{before.text}{before.rest}{text}", before.ended_thread
    return Traceback(text, rest, ended_thread)


def _continues_message(line: str) -> bool:
    """Return whether a line after the exception belongs to its message; JAX explains how it shortens tracebacks."""
    return line[:1] in " \t" or line.startswith(("--------------------", "For simplicity, JAX has removed"))


def cause_of_exit(log: str) -> Traceback | None:
    """Return the traceback that ended the program, unless it only reports lost peers; None if there is none."""
    found = last_traceback(log)
    return found if found and found.is_final and not found.is_peer_loss else None


def own_output(log: str) -> str:
    """Return the log without the crash report at its end, if it has one, and without Gloo's words for each device."""
    report = CRASH_REPORT.search(log)
    return CONNECTED.sub("", log[: report.start()] if report and ABORTED.search(log[report.start() :]) else log)


def only_lost_peers(log: str) -> bool:
    """Return whether a program ended only because it lost its peers."""
    return is_secondary_failure(log) and cause_of_exit(log) is None


def last_words(log: str, code: int | None = None) -> str:
    """Return the line that best says why a program ended: its exception, the crashed function, or its last output."""
    found = last_traceback(log) if code == 1 else cause_of_exit(log)  # exit handlers may have printed more
    if found:
        return found.message
    if unknown := UNKNOWN_FLAGS.search(log):
        return unknown[1][:200]
    if CRASH_REPORT.search(log) and not is_secondary_failure(log) and (stack := CRASHED_STACK.search(log)):
        frames = list(CRASHED_FRAME.finditer(stack[0]))
        own = [frame for frame in frames if not LIBRARIES.search(frame["file"])]
        return next((f"in {at['name']} ({at['file'].rpartition('/')[2]}:{at['line']})" for at in own or frames), "")
    lines = [line.strip() for line in own_output(log).splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""


def log_excerpt(log: str, code: int | None = None) -> str:
    """Return the part of a log that shows why its program ended: its traceback, else its last lines.

    A crash in C code has the stack of its thread, without those of the others.
    """
    found = last_traceback(log) if code == 1 else cause_of_exit(log)
    if found:
        return "\n".join(found.text.splitlines()[-TRACEBACK_LINES:])
    stack = None if is_secondary_failure(log) else CRASHED_STACK.search(log)
    return "\n".join([*own_output(log).splitlines()[-TAIL_LINES:], *([stack[0].rstrip()] if stack else [])])


def first_at_barrier(logs: Sequence[str]) -> int | None:
    """Return the worker that ended its program while others ran, according to JAX; None if that is not known.

    Args:
        logs: the end of each worker's log; empty while its program runs.
    """
    first = next((int(found[1]) for log in logs if (found := FIRST_AT_BARRIER.search(log))), None)
    if first is None or first >= len(logs) or is_secondary_failure(own_output(logs[first])):
        return None  # it ended because another worker was lost
    return first


STALE_SECONDS = 15.0
"""Age at which Google's answer is stale (three polls if those take longer)."""


class PodWatch:
    """Latest answer of Google about a pod, and its time."""

    def __init__(self, look: Callable[[], PodStatus], clock: Clock, poll_seconds: float) -> None:
        self._fetch, self._clock, self._poll_seconds = look, clock, poll_seconds
        self._stale_seconds = max(STALE_SECONDS, 3 * poll_seconds)
        self._wake, self._closed = threading.Event(), threading.Event()
        self._status: PodStatus | None = None
        self._asked_at = self._answered_at = 0.0
        self.api_up_since = clock.monotonic()
        """Time since which the API has answered without a gap."""
        self.error: BaseException | None = None
        """Permanent error, such as a missing permission."""
        threading.Thread(target=self._watch, daemon=True, name="pod-watch").start()

    def latest(self) -> PodStatus | None:
        """Return the latest answer, or None if it is stale."""
        return self._status if self._clock.monotonic() - self._answered_at <= self._stale_seconds else None

    def is_newer_than(self, time: float) -> bool:
        """Return whether the latest answer was requested after that time; if not, request one immediately."""
        if self._asked_at <= time:
            self._wake.set()
        return self._asked_at > time

    def close(self) -> None:
        self._closed.set()
        self._wake.set()

    def _watch(self) -> None:
        while not self._closed.is_set():
            self._wake.clear()
            asked = self._clock.monotonic()
            try:
                current = self._fetch()
            except InterruptedSleepError:
                return
            except GoogleError as error:
                if not error.is_transient:
                    self.error = error
                    return
            except SlipwayError as error:
                self.error = error
                return
            else:
                now = self._clock.monotonic()
                if now - self._answered_at > self._stale_seconds:
                    self.api_up_since = now
                self._status, self._asked_at, self._answered_at = current, asked, now
            self._clock.wait(self._wake, self._poll_seconds)


KEPT_CHARACTERS = 1 << 15
"""Length of the end of each log that is kept."""
MAX_SHOWN = 3
"""Maximum number of tracebacks shown per attempt; all workers may raise the same exception."""
SILENT_SECONDS = 20.0
"""Silence after a traceback that suggests that the program has ended in all but name."""


@dataclass
class _Log:
    """End of one worker's log; positions count from the start of the stream."""

    text: str = ""
    begin: int = 0
    heard: float = 0.0
    seen: int = -1
    """Position of the latest traceback that was reported."""
    named: int = -1
    """Position of the latest traceback after which the worker was reported as silent."""

    def position(self) -> int:
        return self.begin + self.text.rfind(HEADER)


class TracebackWatch:
    """Finds new tracebacks, and workers that have been silent since one."""

    def __init__(self) -> None:
        self._logs: dict[int, _Log] = {}
        self._shown: set[str] = set()

    def record(self, worker: int, text: str, now: float) -> Traceback | None:
        """Add log output; return a traceback that it completes, unless its like was returned before.

        An exception that only reports a lost peer is left out: its cause is on another worker.
        """
        log = self._logs.setdefault(worker, _Log())
        log.text, log.heard = log.text + text, now
        log.begin += max(0, len(log.text) - KEPT_CHARACTERS)
        log.text = log.text[-KEPT_CHARACTERS:]
        found = last_traceback(log.text)
        if found is None or not found.text.endswith("\n") or log.position() == log.seen:
            return None
        log.seen = log.position()
        if found.is_peer_loss or found.message in self._shown or len(self._shown) >= MAX_SHOWN:
            return None
        self._shown.add(found.message)
        return found

    def thread_exception(self, worker: int) -> str:
        """Return the exception that ended a thread, if it is the last thing in the worker's log; otherwise empty."""
        log = self._logs.get(worker)
        found = last_traceback(log.text) if log is not None and log.seen >= 0 else None
        return found.message if found and found.ended_thread and found.is_final and not found.is_peer_loss else ""

    def newly_silent(self, now: float) -> list[tuple[int, Traceback]]:
        """Return the workers whose log ends in a traceback and has not grown for a while; each once per traceback."""
        found = []
        for worker, log in self._logs.items():
            if log.seen < 0 or log.named == log.seen or now - log.heard < SILENT_SECONDS:
                continue
            log.named = log.seen
            last = last_traceback(log.text)
            if last is not None and last.is_final and not last.is_peer_loss:
                found.append((worker, last))
        return found

"""Stream of events for the live view, the JSON output and the record on disk; and the screen that shows a run."""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, Protocol

from conf.strict_json import dumps
from controller.core.json_documents import checked, stamped
from controller.core.text import width_of, wrap
from controller.core.this_process import Clock, iso_timestamp

EventKind = Literal[
    "step_started",  # a resource differs, or is being waited for
    "step_done",  # the resource matches the plan; data: action, seconds
    "step_failed",
    "note",  # a message for the user: a preemption, a retry
    "metrics",  # data: metrics, one line of the program's metrics.jsonl
    "progress",  # of a long transfer; data: bytes, total, bytes_per_second
    "log",  # program output; data: worker
    "traceback",  # an exception in the output of any worker; data: worker, exception
    "alert",  # a run goes on, but not as it should, or does again; data: alert (its name), over, attempt
]


@dataclass(frozen=True)
class Event:
    """One event; `subject` is a resource id or a run id."""

    time: float
    kind: EventKind
    subject: str
    message: str = ""
    data: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return a line of `events.jsonl` and of `--json`, with the keys of `data` at the top level."""
        body = stamped({"time": iso_timestamp(self.time), "kind": self.kind, "subject": self.subject})
        return body | ({"message": self.message} if self.message else {}) | self.data

    def as_json(self) -> str:
        return dumps(self.to_json())

    @classmethod
    def from_json(cls, body: Any, where: str = "event") -> "Event":
        """Parse what `to_json` wrote; raises FormatError for another format."""
        data = checked(body, where)
        time = datetime.fromisoformat(data.pop("time")).timestamp()
        return cls(time, data.pop("kind"), data.pop("subject"), data.pop("message", ""), data)


class Events:
    """Passes each event to every listener, one at a time, from any thread. A listener may emit another one."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._listeners: list[Callable[[Event], None]] = []
        self._lock = threading.RLock()

    def add_listener(self, listener: Callable[[Event], None]) -> None:
        self._listeners.append(listener)

    def remove_listener(self, listener: Callable[[Event], None]) -> None:
        with self._lock:
            self._listeners.remove(listener)

    def emit(self, kind: EventKind, subject: str, message: str = "", **data: Any) -> None:
        event = Event(self._clock.now(), kind, subject, message, data)
        with self._lock:
            for listener in self._listeners:
                listener(event)

    def note(self, subject: str, message: str, **data: Any) -> None:
        self.emit("note", subject, message, **data)


Waiting = Callable[[], AbstractContextManager[Callable[[str], object]]]
"""Makes a context manager for a wait: inside it, its value is called with what is being done."""


@contextmanager
def silent_wait() -> Iterator[Callable[[str], object]]:
    """Show nothing of a wait."""
    yield lambda text: None


class FinishedRun(Protocol):
    """Protocol of a finished run as shown on a screen; `records.ledger.Result` implements it."""

    @property
    def run_id(self) -> str: ...
    @property
    def outcome(self) -> str: ...
    @property
    def attempts(self) -> int: ...
    @property
    def ended(self) -> float: ...
    @property
    def seconds(self) -> float: ...
    @property
    def summary(self) -> Mapping[str, Any]: ...


class BoardScreen(Protocol):
    """Shows one run, event by event, and asks its user."""

    def __call__(self, event: Event) -> None: ...

    def set_price(self, usd_per_hour: float | None) -> None: ...

    def ask(self, question: str, yes: bool) -> bool: ...

    def show_detached(self) -> None: ...

    def show_result(self, result: FinishedRun, *, again: bool = False, cost: str = "") -> None: ...


def confirm(
    question: str, *, yes: bool = False, details: Iterable[str] = (), read: Callable[[str], str] = input
) -> bool:
    """Ask the user on a terminal; without a terminal return `yes`.

    Args:
        question: the text of the prompt.
        yes: the user has agreed beforehand, with --yes.
        details: lines printed above the question.
        read: prints the prompt and returns the answer.
    """
    if yes or not sys.stdin.isatty():
        return yes
    width = width_of(sys.stdout)
    for line in details:
        print(wrap(line, width, 2))
    return read(f"{wrap(f'{question} [y/N]', width, 2)} ").strip().lower() in ("y", "yes")

"""Protocol of a screen that shows a run, and the confirmation prompt."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from controller.core.events import Event
from controller.core.layout import width_of, wrap

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

"""What each run of a sweep is doing: for the terminal, and for `status -m` in another process."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from controller.clock import Clock
from controller.events import Event
from controller.ledger import Result
from controller.view import SHOWN

BARS = "▁▂▃▄▅▆▇█"
POINTS = 24
"""Of a metric, so many are kept for its sparkline."""
SAVE_SECONDS = 1.0


@dataclass
class Line:
    """One run. `metric` names what `values` are, the first of the usual ones that the program reports."""

    run: str
    title: str
    state: str = "waiting"
    pod: int | None = None
    began: float | None = None
    seconds: float | None = None
    step: int | None = None
    steps_total: int | None = None
    step_time: float | None = None
    metric: str = ""
    values: list[float] = field(default_factory=list)
    cost: str = ""
    why: str = ""


class Board:
    """The lines of a sweep; threads tell it what happens."""

    def __init__(self, lines: Iterable[Line], file: Path, clock: Clock, *, json_lines: bool) -> None:
        self._lines = {line.run: line for line in lines}
        self._file, self._clock, self._json = file, clock, json_lines
        self._lock = threading.Lock()
        self._saved = 0.0

    def add(self, line: Line) -> None:
        with self._lock:
            self._lines.setdefault(line.run, line)

    def lines(self) -> list[Line]:
        with self._lock:
            return list(self._lines.values())

    def state(self, run: str, state: str, words: str = "", **values: Any) -> None:
        """A run has come to another state, which is said."""
        with self._lock:
            line = self._lines[run]
            line.state = state
            for key, value in values.items():
                setattr(line, key, value)
            self._save(always=True)
        self.say(line, f"{state}{f': {words}' if words else ''}")

    def say(self, line: Line, words: str) -> None:
        """A line for people, or for programs."""
        pod = f"pod {line.pod}" if line.pod is not None else ""
        if self._json:
            document = {
                "time": self._clock.now(),
                "run": line.run,
                "pod": line.pod,
                "state": line.state,
                "words": words,
            }
            text = json.dumps(document)
        else:
            text = f"  {pod:<6} {line.run}  {line.title}  {words}"
        with self._lock:  # `print` writes a line and its end apart, and threads come between them
            print(text, flush=True)

    def tell(self, run: str, event: Event) -> None:
        """An event of a run: its metrics are kept, its notes said."""
        line = self._lines[run]
        if event.kind == "metrics":
            with self._lock:
                _take(line, event.data["metrics"])
                self._save()
        elif event.kind == "note" and not event.words.startswith("launched attempt 1 "):
            self.say(line, event.words)

    def _save(self, *, always: bool = False) -> None:
        now = time.monotonic()
        if always or now - self._saved >= SAVE_SECONDS:
            self._saved = now
            draft = self._file.with_suffix(".draft")
            draft.write_text(json.dumps([asdict(line) for line in self._lines.values()]))
            draft.replace(self._file)


class Screen:
    """Shows one run on the board; asks nothing, since the sweep has asked."""

    def __init__(self, board: Board, run: str, clock: Clock) -> None:
        self._board, self._run, self._clock = board, run, clock
        self.usd_per_hour: float | None = None

    def __call__(self, event: Event) -> None:
        self._board.tell(self._run, event)

    def ask(self, question: str, yes: bool) -> bool:
        return yes

    def detached(self) -> None:
        pass

    def finished(self, result: Result, *, again: bool = False, cost: str = "") -> None:
        shown = {key: value for key, value in result.summary.items() if isinstance(value, int | float)}
        words = "  ".join(f"{key} {value:.4g}" for key, value in list(shown.items())[:3])
        self._board.state(self._run, "finished", words, seconds=result.seconds, cost=cost)


def saved(file: Path) -> dict[str, Line]:
    """The lines that a controller on this machine has left, by run."""
    if not file.is_file():
        return {}
    return {line["run"]: Line(**line) for line in json.loads(file.read_bytes())}


def table(lines: Sequence[Line], now: float) -> list[str]:
    """One line per run: id, words, pod, state, step, sparkline, time to go, cost."""
    head = ["run", "words", "pod", "state", "step", "metric", "", "ETA", "cost"]
    rows = [head]
    for line in lines:
        step = "" if line.step is None else f"{line.step}{f'/{line.steps_total}' if line.steps_total else ''}"
        metric = f"{line.metric} {line.values[-1]:.4g}" if line.values else ""
        pod = "" if line.pod is None else str(line.pod)
        state = f"{line.state} {now - line.began:.0f} s" if line.state == "running" and line.began else line.state
        rows.append([line.run, line.title, pod, state, step, metric, sparkline(line.values), eta(line), line.cost])
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def sparkline(values: Sequence[float]) -> str:
    """The course of a metric in a few characters."""
    if not values:
        return ""
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(BARS[int((value - low) / span * (len(BARS) - 1))] for value in values[-POINTS:])


def eta(line: Line) -> str:
    if line.state != "running" or not line.steps_total or line.step is None or not line.step_time:
        return ""
    minutes, seconds = divmod(round(max(0, line.steps_total - line.step) * line.step_time), 60)
    return f"{minutes}:{seconds:02}"


def _take(line: Line, metrics: dict[str, Any]) -> None:
    if isinstance(step := metrics.get("step"), int | float):
        line.step = int(step)
    if isinstance(total := metrics.get("steps_total"), int | float):
        line.steps_total = int(total)
    line.step_time = metrics.get("step_time") or line.step_time
    line.metric = line.metric or next((name for name in SHOWN if metrics.get(name) is not None), "")
    if isinstance(value := metrics.get(line.metric), int | float):
        line.values = [*line.values, float(value)][-POINTS:]

"""Board of a sweep: the status of each run, for the live view and for `status` in another process.

The live view is redrawn in place on a terminal; elsewhere there are plain lines.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from conf.strict_json import dumps, loads
from controller.core.events import Event, Events, FinishedRun
from controller.core.json_documents import Record, checked, dump, stamped
from controller.core.local_notes import LocalNotes
from controller.core.text import (
    GAP,
    SHOWN_METRICS,
    Concession,
    fit_table,
    numeric,
    printable,
    result_lines,
    result_values,
    short_ids,
    short_overrides,
    unsanitized_stream,
    width_of,
    wrap,
)
from controller.core.this_process import Clock
from controller.lease_store import has_ended, process_id
from controller.records.spending import PodUsage

if TYPE_CHECKING:
    from rich.console import Console

SPARK_BARS = "▁▂▃▄▅▆▇█"
SPARK_POINTS = 24
"""Number of points of a metric kept for its sparkline."""
SAVE_SECONDS = 1.0
"""Interval at which metrics, and the changes of a large board, are written to the file."""
SMALL_BOARD = 100
"""Rows up to which each change of a run's state is written at once: each write takes the whole board."""
BOARD_METRICS = ("accuracy", "reward_mean", "loss", *SHOWN_METRICS)
"""Metrics by what they say about a run: the loss of GRPO says little."""


@dataclass
class BoardRow(Record):
    """Status of one run. `values` are of `metric`, the first of the usual metrics that the program reports.

    Of a run with a result, `metric` is the first of its results, and the last of `values` is that one.
    """

    KEYS: ClassVar = {"why": "reason", "before": "seconds_before"}

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
    """Recorded cost of an ended run; for a running one see `format_cost`."""
    why: str = ""
    before: float = 0.0
    """Seconds on pods before `began`: failed tries and earlier controllers."""
    usd_per_hour: float | None = None

    def show_result(self, summary: Mapping[str, Any]) -> None:
        """Show the first result of a summary.json, as the end of its metric's curve or in place of another's."""
        numbers = {name: value for name, value in summary.items() if numeric(value) is not None}
        for name in chain(*result_values(numbers)):
            known = self.values if self.metric == name else []
            value = float(numbers[f"{name}_after" if f"{name}_after" in numbers else name])
            self.metric, self.values = name, [*known, value][-SPARK_POINTS:]
            break


class Board:
    """Rows of a sweep, updated by its threads. `out` prints a line for people."""

    def __init__(self, lines: Iterable[BoardRow], file: Path, clock: Clock, *, json_lines: bool) -> None:
        self._rows = {line.run: line for line in lines}
        self._file, self._clock, self.json_lines = file, clock, json_lines
        self._lock, self._output_lock = threading.Lock(), threading.Lock()
        self._saved_at, self._process = 0.0, process_id()
        self._timer: threading.Timer | None = None
        self.out: Callable[[str], None] = partial(print, flush=True)
        told = Events(clock)
        told.add_listener(self._warn)
        self._notes = LocalNotes(told)

    def _warn(self, event: Event) -> None:
        text = event.as_json() if self.json_lines else wrap(f"  {event.message}", width_of(sys.stdout), indent=9)
        with self._output_lock:
            self.out(text)

    def add(self, line: BoardRow) -> None:
        with self._lock:
            self._rows.setdefault(line.run, line)

    def rows(self) -> list[BoardRow]:
        with self._lock:
            return list(self._rows.values())

    def set_state(
        self, run: str, state: str, message: str = "", summary: Mapping[str, Any] | None = None, **values: Any
    ) -> None:
        """Set the state of a run and report it. summary: the result of a finished one."""
        with self._lock:
            line = self._rows[run]
            if line.state == "running" and line.began is not None:
                line.before += self._clock.now() - line.began
            line.state = state
            for key, value in values.items():
                setattr(line, key, value)
            line.show_result(summary or {})
            self._save(changed=True)
        self.announce(line, f"{state}{f': {message}' if message else ''}")

    def announce(self, line: BoardRow, message: str) -> None:
        pod = f"pod {line.pod}" if line.pod is not None else ""
        if self.json_lines:
            body = {"time": self._clock.now(), "run": line.run, "pod": line.pod, "state": line.state}
            text = dump({**body, "message": message})
        else:
            text = wrap(f"  {pod:<6} {line.run}  {line.title}  {message}", width_of(sys.stdout), indent=9)
        with self._output_lock:  # `print` writes a line and its newline separately, and other threads could interleave
            self.out(text)

    def on_event(self, run: str, event: Event) -> None:
        """Handle an event of a run: keep its metrics, print its notes."""
        line = self._rows[run]
        if event.kind == "metrics":
            with self._lock:
                _apply_metrics(line, event.data["metrics"])
                self._save()
        elif (event.kind == "alert" and event.message) or (
            event.kind == "note" and not event.message.startswith("launched attempt 1 ")
        ):
            self.announce(line, event.message)

    def set_price(self, run: str, usd_per_hour: float | None) -> None:
        with self._lock:
            self._rows[run].usd_per_hour = usd_per_hour

    def close(self) -> None:
        """Mark the board as final, so that readers of the file need not wait."""
        with self._lock:
            self._write(over=True)

    def _save(self, *, changed: bool = False) -> None:
        """Write the board unless that was done a moment ago. changed: a run's state has, which is written soon."""
        if time.monotonic() - self._saved_at >= SAVE_SECONDS or (changed and len(self._rows) <= SMALL_BOARD):
            self._write()
        elif changed and self._timer is None:
            self._timer = threading.Timer(SAVE_SECONDS, self._save_late)
            self._timer.daemon = True
            self._timer.start()

    def _save_late(self) -> None:
        with self._lock:
            if self._timer is not None:  # else it has been written meanwhile
                self._write()

    def _write(self, *, over: bool = False) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._saved_at = time.monotonic()
        board = SavedBoard(self._clock.now(), over, self._rows, self._process)
        self._notes.write(self._file, dumps(board.to_json()))


class BoardScreen:
    """Screen that shows one run on the board; asks nothing, since the sweep has asked."""

    def __init__(self, board: Board, run: str, clock: Clock) -> None:
        self._board, self._run, self._clock = board, run, clock

    def set_price(self, usd_per_hour: float | None) -> None:
        self._board.set_price(self._run, usd_per_hour)

    def __call__(self, event: Event) -> None:
        self._board.on_event(self._run, event)

    def ask(self, question: str, yes: bool) -> bool:
        return yes

    def show_detached(self) -> None:
        pass

    def show_result(self, result: FinishedRun, *, again: bool = False, cost: str = "") -> None:
        shown = {key: value for key, value in result.summary.items() if isinstance(value, int | float)}
        message = "; ".join(" ".join(line.split()) for line in result_lines(shown)[:2])
        self._board.set_state(self._run, "finished", message, result.summary, seconds=result.seconds, cost=cost)


@dataclass(frozen=True)
class SavedBoard:
    """Board file written by a controller of this machine, `process`. `over` means that no more changes follow."""

    time: float = 0.0
    is_finished: bool = False
    rows: dict[str, BoardRow] = field(default_factory=dict)
    process: str = ""

    @property
    def is_abandoned(self) -> bool:
        """Return whether the controller has ended before its sweep."""
        return not self.is_finished and has_ended(self.process)

    def to_json(self) -> dict[str, Any]:
        """Return the content of `sweeps/ID.json` of the state folder."""
        lines = [line.to_json() for line in self.rows.values()]
        return stamped({"time": self.time, "over": self.is_finished, "process": self.process, "lines": lines})

    @classmethod
    def from_json(cls, body: Any, where: str = "board") -> "SavedBoard":
        """Parse a board; raises FormatError on another format."""
        body = checked(body, where)
        lines = {line["run"]: BoardRow.from_json(line) for line in body["lines"]}
        return cls(body["time"], body["over"], lines, body.get("process", ""))


def load_board(file: Path) -> "SavedBoard":
    """Load the board in a file; an empty one if the file does not exist, or is damaged, which is said."""
    try:
        return SavedBoard.from_json(loads(file.read_bytes()), str(file)) if file.is_file() else SavedBoard()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        print(f"warning: {file} is damaged ({error!r:.80}): what it says of the sweep is left out", file=sys.stderr)
        return SavedBoard()


def run_ids_by_sweep(state: Path) -> dict[str, list[str]]:
    """Return the run ids of each sweep with a board on this machine, including runs that it found finished."""
    return {file.stem: list(load_board(file).rows) for file in sorted((state / "sweeps").glob("*.json"))}


HEADER = ("run", "overrides", "pod", "state", "step", "metric", "curve", "ETA", "cost")


def layout_board(lines: Sequence[BoardRow], now: float, width: int | None) -> tuple[list[str], list[list[str]]]:
    """Return titles and rows of padded cells that fit `width`.

    What tells runs apart always stays: the hash of the id, the overrides, state, step and remaining time. Where there
    is no room, the name that all runs share goes first, then the curve, cost, pod and metric.
    """
    cells = [_format_row(line, now) for line in lines]
    columns = {title: [row[i] for row in cells] for i, title in enumerate(HEADER)}
    if not any(columns["pod"]):
        del columns["pod"]
    concessions: list[Concession] = [
        ("cost", [cost.replace(" pod minutes", " min").replace(", about ", " ") for cost in columns["cost"]]),
        ("run", short_ids(columns["run"])),
        ("overrides", short_overrides(columns["overrides"])),
        ("curve", [curve[-8:] for curve in columns["curve"]]),
        ("curve", None),
        ("cost", None),
        ("metric", [metric.rpartition(" ")[2] for metric in columns["metric"]]),
        ("pod", None),
        ("metric", None),
    ]
    titles, rows, _ = fit_table(columns, width, concessions, folded="overrides")
    return titles, rows


def _format_row(line: BoardRow, now: float) -> list[str]:
    """Format one run as cells under HEADER."""
    step = "" if line.step is None else f"{line.step}{f'/{line.steps_total}' if line.steps_total else ''}"
    metric = f"{line.metric} {line.values[-1]:.4g}" if line.values else ""
    pod = "" if line.pod is None else str(line.pod)
    state = f"{line.state} {now - line.began:.0f} s" if line.state == "running" and line.began else line.state
    cells = [line.run, line.title, pod, state, step, metric, sparkline(line.values), format_eta(line)]
    return [printable(cell) for cell in [*cells, format_cost(line, now)]]


def format_table(lines: Sequence[BoardRow], now: float, width: int | None = None) -> list[str]:
    """Format one line per run: id, overrides, pod, state, step, sparkline, remaining time, cost."""
    titles, rows = layout_board(lines, now, width)
    return [GAP.join(row).rstrip() for row in [titles, *rows]]


def format_counts(lines: Iterable[BoardRow]) -> str:
    """Format the number of runs per state: `2 running, 3 finished`."""
    states = [line.state for line in lines]
    return ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)) or "no runs yet"


def format_cost(line: BoardRow, now: float) -> str:
    """Format the recorded cost of an ended run, or the cost so far of a running one."""
    if line.cost or (line.state != "running" and not line.before):
        return line.cost
    since = now - line.began if line.state == "running" and line.began is not None else 0.0
    hours = (line.before + since) / 3600
    return str(PodUsage(hours, None if line.usd_per_hour is None else hours * line.usd_per_hour))


def sparkline(values: Sequence[float]) -> str:
    """Draw the course of a metric in a few characters, without what is not finite."""
    if not (values := [value for value in values if numeric(value) is not None]):
        return ""
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(SPARK_BARS[int((value - low) / span * (len(SPARK_BARS) - 1))] for value in values[-SPARK_POINTS:])


def format_eta(line: BoardRow) -> str:
    if line.state != "running" or not line.steps_total or line.step is None or not line.step_time:
        return ""
    minutes, seconds = divmod(round(max(0, line.steps_total - line.step) * line.step_time), 60)
    return f"{minutes}:{seconds:02}"


def _apply_metrics(line: BoardRow, metrics: dict[str, Any]) -> None:
    if (step := numeric(metrics.get("step"))) is not None:
        line.step = int(step)
    if (total := numeric(metrics.get("steps_total"))) is not None:
        line.steps_total = int(total)
    line.step_time = numeric(metrics.get("step_time")) or line.step_time
    best = next((name for name in BOARD_METRICS if numeric(metrics.get(name)) is not None), "")
    if best and (not line.metric or BOARD_METRICS.index(best) < BOARD_METRICS.index(line.metric)):
        line.metric, line.values = best, []  # GRPO reports its first accuracy after a warm start
    if (value := numeric(metrics.get(line.metric))) is not None:
        line.values = [*line.values, float(value)][-SPARK_POINTS:]


STATE_ORDER = ("running", "failed", "ended early", "waiting", "finished")
"""Display order by state if there is no room for every run."""
MIN_ROWS = 4
"""Lines of the terminal reserved for the header, the totals and the shell prompt."""
STYLES = {"running": "cyan", "failed": "red", "finished": "green", "ended early": "yellow", "waiting": "dim"}


@contextmanager
def live_board(board: Board, clock: Clock) -> Iterator[None]:
    """Keep the board at the bottom of the terminal with messages above it; print it a last time at the end."""
    if board.json_lines or not sys.stdout.isatty():
        yield
        return
    with redrawing(lambda height, width: render_board(board.rows(), clock.now(), height, width)) as console:
        before, board.out = board.out, lambda text: console.print(printable(text), markup=False)
        try:
            yield
        finally:
            board.out = before
    print("\n".join(format_table(board.rows(), clock.now(), width_of(sys.stdout))))


@contextmanager
def redrawing(draw: Any) -> Iterator["Console"]:
    """Redraw `draw(height, width)` a few times a second while the context is open, then erase it."""
    from rich.console import Console
    from rich.live import Live

    console = Console(file=unsanitized_stream(sys.stdout), highlight=False, soft_wrap=True)
    with Live(
        console=console,
        refresh_per_second=4,
        transient=True,
        get_renderable=lambda: draw(console.height - MIN_ROWS, console.width),
    ):
        yield console


def render_board(lines: Sequence[BoardRow], now: float, height: int, width: int) -> Any:
    """Render a table of as many runs as fit, and the states of the others."""
    from rich.console import Group
    from rich.text import Text

    room = max(1, height)
    shown = list(lines)
    if len(shown) > room:
        shown = sorted(shown, key=lambda line: STATE_ORDER.index(line.state) if line.state in STATE_ORDER else 0)[:room]
    titles, rows = layout_board(shown, now, width)
    made = [Text(GAP.join(titles).rstrip(), style="bold")]
    state_column = [title.strip() for title in titles].index("state")
    for row in rows[:room]:
        cells = [Text(cell) for cell in row]
        cells[state_column].stylize(next((STYLES[s] for s in STYLES if row[state_column].startswith(s)), ""))
        made.append(Text(GAP).join(cells))
    hidden = [line for line in lines if line not in shown]
    rest = f"; not shown: {format_counts(hidden)}" if hidden else ""
    made.append(Text(wrap(f"{format_counts(lines)}{rest}", width), style="bold"))
    return Group(*made)

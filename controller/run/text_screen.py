"""Print the progress of a run as plain lines: one per step with its duration, then training metrics at intervals.

With JSON lines, each event is one line on stdout, and text for people goes to stderr.
"""

import shlex
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from conf.schema.training.data import ArithmeticData
from conf.schema.training.loop import GrpoLoop
from controller.config.run_yaml import run_url
from controller.core.events import Event, FinishedRun, confirm
from controller.core.text import (
    DEFAULT_WIDTH,
    evaluation_line,
    format_duration,
    numeric,
    pad,
    plural,
    printable,
    result_lines,
    shorten,
    training_line,
    width_of,
    wrap,
)
from controller.plan.build import Plan

PLAIN_LINE_SECONDS = 10.0
"""Interval between training lines where they cannot be redrawn."""
SHOWN_TRACEBACK_LINES = 30
REPEATED_SECONDS = 60.0
"""Seconds after a launch in which metrics of the previous attempt may be sent once more."""
MAX_TITLE_WIDTH = 62
STEP_WIDTH = 23
"""Columns of a step's line beside its title: the mark, the state and the seconds."""
PAST_TENSE = {"create": "created", "update": "updated", "replace": "replaced", "delete": "deleted", "none": "ready"}
"""What has happened to a step. One that only had to be waited for is ready."""


class TextScreen:
    """A screen that prints lines: on a bastion, under `controller.api`. `cli.view.View` adds color and redraws."""

    def __init__(self, plan: Plan, *, json_lines: bool = False, discards: bool = False) -> None:
        """Initialize the screen; with `discards`, the results are deleted at the end, as those of a rehearsal are."""
        self._plan, self._json, self._discards = plan, json_lines, discards
        self._redraws = False
        self._stream: Any = sys.stderr if json_lines else sys.stdout
        self._under_way: dict[str, tuple[float, str]] = {}
        self._last_news = time.time()
        """When something was last shown, by the time of events."""
        self._ahead = 0.0
        """How many seconds the time of events is ahead of this machine's, which may be wrong."""
        self._unchanged = 0
        """Steps found as planned at once, for the line that counts them."""
        self._training = ""
        self._last_log_line = ""
        self._launched = False
        self._launched_at = 0.0
        self._newest_metrics = 0.0
        self._last_plain = 0.0
        self._last_moved: dict[str, float] = {}
        self._usd_per_hour: float | None = None

    @property
    def _width(self) -> int:
        return width_of(self._stream) or DEFAULT_WIDTH

    def __enter__(self) -> Self:
        names = {"local": "the emulated cloud", "here": "this machine"}
        where = names.get(self._plan.config.cloud.kind, self._plan.project)
        self._print((self._plan.run_id, "bold"), f" on {self._plan.node.name} ({where})", indent=2)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._count_unchanged()

    def __call__(self, event: Event) -> None:
        if self._json:
            print(event.as_json(), flush=True)
        self._ahead = event.time - time.time()
        if event.kind != "log" or event.data["worker"] == 0:
            self._last_news = event.time
        if event.kind == "step_started":
            self._under_way.setdefault(event.subject, (event.time, event.data.get("title", event.subject)))
        elif event.kind in ("step_done", "step_failed"):
            waited = self._under_way.pop(event.subject, None) is not None
            self._step(event, waited)
        elif event.kind == "progress":
            began, title = self._under_way.get(event.subject, (event.time, event.subject))
            self._under_way[event.subject] = began, f"{title.partition(': ')[0]}: {event.message}"
            if not self._redraws and event.time - self._last_moved.get(event.subject, began) >= PLAIN_LINE_SECONDS:
                self._last_moved[event.subject] = event.time
                self._print(f"  … {shorten(self._under_way[event.subject][1], self._width - 4)}")
        elif event.kind == "note":
            if "attempt" in event.data:  # what follows is said by another attempt than what came before
                self._training = self._last_log_line = ""
                self._launched, self._launched_at = True, event.time
            if event.subject == self._plan.run_id:  # a finding about one step may come between two others
                self._count_unchanged()
            self._print("  ", ("›", "yellow"), f" {event.message}", indent=4)
        elif event.kind == "alert" and event.message:
            mark = ("›", "green") if event.data["over"] else ("!", "red")
            self._print("  ", mark, f" {event.message}", indent=4)
        elif event.kind == "log" and event.data["worker"] == 0:
            lines = event.message.splitlines()
            if self._plan.config.program.kind == "command":
                self._print_output(lines)
            elif lines:
                self._last_log_line = lines[-1]
        elif event.kind == "traceback":
            worker = event.data["worker"]
            self._print("  ", ("✗", "red"), f" worker {worker}: {event.data['exception']}")
            if worker or self._plan.config.program.kind != "command":
                self._print_output(event.message.splitlines()[-SHOWN_TRACEBACK_LINES:])
        elif event.kind == "metrics" and not self._is_repeated(event):
            self._train(event)

    def _is_repeated(self, event: Event) -> bool:
        """Return whether a line is of an earlier attempt: a new one finds metrics.jsonl as it was, or restores it."""
        time_told = numeric(event.data["metrics"].get("time"))
        if time_told is None:
            return False
        newest, self._newest_metrics = self._newest_metrics, max(time_told, self._newest_metrics)
        return time_told <= newest and event.time - self._launched_at < REPEATED_SECONDS

    def _print_output(self, lines: Sequence[str]) -> None:
        """Print lines of the program's output."""
        for line in lines:
            self._print("    ", (line, "dim"))

    def set_price(self, usd_per_hour: float | None) -> None:
        """Use this price to show the cost until the end of training."""
        self._usd_per_hour = usd_per_hour

    def ask(self, question: str, yes: bool) -> bool:
        """Ask on a terminal; elsewhere return what --yes says."""
        return yes if self._json else confirm(question, yes=yes, read=self._read)

    def show_detached(self) -> None:
        self._print(
            "detached: the run continues; the same command re-attaches, `slipway status` shows it, "
            "`slipway cancel` ends it",
            indent=0,
        )

    def show_result(self, result: FinishedRun, *, again: bool = False, cost: str = "") -> None:
        """Print the result: the content of summary.json, where the rest is, and what to do with it."""
        if self._json:
            summary = {"summary": result.summary}
            print(Event(result.ended, "note", result.run_id, result.outcome, summary).as_json(), flush=True)
        self._training = self._last_log_line = ""
        self._count_unchanged()
        if again:
            self._print(f"{result.run_id} has already finished; nothing was changed", indent=0)
        for line in result_lines(result.summary, self._width - 2):
            self._print(f"  {line}")
        attempts = f" in {result.attempts} attempts" if result.attempts > 1 else ""
        spent = f"; {cost}" if cost else ""
        self._print(("finished", "green"), f" after {format_duration(result.seconds)}{attempts}{spent}", indent=2)
        if self._discards:
            return
        self._print(f"results  {run_url(self._plan.config, self._plan.bucket, result.run_id)}")
        config = self._plan.config
        has_curves = config.program.kind == "trainer" or "tensorboard" in config.logging.trackers
        curves = " · slipway tensorboard" if has_curves else ""
        self._print(f"next     slipway report{curves} · slipway get {result.run_id}", indent=9)
        if isinstance(config.data, ArithmeticData) and isinstance(config.loop, GrpoLoop):
            asked = shlex.quote(config.data.question(7, 2))
            self._print(f"ask      slipway generate {result.run_id} --prompt {asked}", indent=9)

    def _count_unchanged(self) -> None:
        """Say how many steps were found as planned since the last line that counted them."""
        count, self._unchanged = self._unchanged, 0
        if count:
            self._print("  ", ("✓", "dim"), (f" {plural(count, 'step')} unchanged", "dim"))

    def _step(self, event: Event, waited: bool) -> None:
        """Print a step that changed, failed or had to be waited for, and count the others."""
        title = printable(str(event.data.get("title", event.subject)))
        room = self._width - STEP_WIDTH
        if event.kind == "step_failed":
            self._count_unchanged()
            self._print("  ", ("✗", "red"), f" {shorten(title, self._width - 4)}")
            return
        action = event.data["action"]
        if action == "none" and not waited:
            self._unchanged += 1
            return
        style = "dim" if action == "none" else "green"
        done = (f"{PAST_TENSE[action]:<9}", style)
        name = pad(shorten(title, room), min(room, MAX_TITLE_WIDTH))
        self._print("  ", ("✓", style), f" {name} ", done, f"{event.data['seconds']:7.1f} s")

    def _train(self, event: Event) -> None:
        metrics = event.data["metrics"]
        if metrics.get("phase") == "eval":
            self._print("  ", ("eval", "bold"), f" {evaluation_line(metrics)}", indent=4)
            return
        line = training_line(metrics, self._usd_per_hour, self._width - 14)  # a spinner may need 12
        if line is None or "steps_total" not in metrics:
            return
        self._training = line
        if not self._redraws and event.time - self._last_plain >= PLAIN_LINE_SECONDS:
            self._last_plain = event.time
            self._print(f"  {line}")

    def _print(self, *parts: str | tuple[str, str], indent: int | None = None) -> None:
        """Print one line; its parts are text, or text and its style.

        With an `indent`, a sentence that is wider than the terminal is wrapped, and its further lines are indented.
        """
        text = printable("".join(part if isinstance(part, str) else part[0] for part in parts))
        stream = sys.stderr if self._json else sys.stdout
        print(text if indent is None else wrap(text, width_of(stream), indent), file=stream, flush=True)

    def _read(self, prompt: str) -> str:
        return input(prompt)

"""Print the progress of a run as plain lines: one per step with its duration, then training metrics at intervals.

With JSON lines, each event is one line on stdout, and text for people goes to stderr.
"""

import sys
from types import TracebackType
from typing import Any, Self

from controller.core.events import Event
from controller.core.printable import printable
from controller.core.ui import FinishedRun, confirm
from controller.plan.build import Plan

MAX_NUMBER = 1e15
"""Upper limit for step counts and seconds; JSON numbers are unbounded."""
PLAIN_LINE_SECONDS = 10.0
"""Interval between training lines where they cannot be redrawn."""
SHOWN_TRACEBACK_LINES = 30
SHOWN_METRICS = ("loss", "accuracy", "reward_mean", "pass_at_k", "entropy", "kl")
PAST_TENSE = {"create": "created", "update": "updated", "replace": "replaced", "delete": "deleted", "none": "unchanged"}


class TextScreen:
    """A screen that prints lines: on a bastion, under `controller.api`. `cli.view.View` adds color and redraws."""

    def __init__(self, plan: Plan, *, json_lines: bool = False) -> None:
        self._plan, self._json = plan, json_lines
        self._redraws = False
        self._under_way: dict[str, tuple[float, str]] = {}
        self._training = ""
        self._last_log_line = ""
        self._last_plain = 0.0
        self._last_moved: dict[str, float] = {}
        self._usd_per_hour: float | None = None

    def __enter__(self) -> Self:
        where = "the emulated cloud" if self._plan.config.cloud.kind == "local" else self._plan.project
        self._print((self._plan.run_id, "bold"), f" on {self._plan.node.name} ({where})")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def __call__(self, event: Event) -> None:
        if self._json:
            print(event.as_json(), flush=True)
        if event.kind == "step_started":
            self._under_way.setdefault(event.subject, (event.time, event.data.get("title", event.subject)))
        elif event.kind in ("step_done", "step_failed"):
            self._under_way.pop(event.subject, None)
            self._step(event)
        elif event.kind == "progress":
            self._show_transfer(event)
        elif event.kind == "note":
            self._print("  ", ("›", "yellow"), f" {event.message}")
        elif event.kind == "log" and event.data["worker"] == 0:
            self._log(event.message)
        elif event.kind == "traceback":
            self._show_traceback(event)
        elif event.kind == "metrics":
            self._train(event)

    def _show_transfer(self, event: Event) -> None:
        """Show the progress of a transfer: in the line of its step, or on lines of its own at intervals."""
        began, title = self._under_way.get(event.subject, (event.time, event.subject))
        self._under_way[event.subject] = began, f"{title.partition(': ')[0]}: {event.message}"
        if not self._redraws and event.time - self._last_moved.get(event.subject, began) >= PLAIN_LINE_SECONDS:
            self._last_moved[event.subject] = event.time
            self._print(f"  … {self._under_way[event.subject][1]}")

    def _log(self, text: str) -> None:
        """Show log output; of the bundled trainer only the last line, until its first metrics arrive."""
        lines = text.splitlines()
        if self._plan.config.program.kind == "command":
            for line in lines:
                self._print("    ", (line, "dim"))
        elif lines:
            self._last_log_line = lines[-1]

    def _show_traceback(self, event: Event) -> None:
        """Show an exception of any worker; worker 0's own program has just printed it here."""
        worker = event.data["worker"]
        self._print("  ", ("✗", "red"), f" worker {worker}: {event.data['exception']}")
        if worker or self._plan.config.program.kind != "command":
            for line in event.message.splitlines()[-SHOWN_TRACEBACK_LINES:]:
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
            "`slipway cancel` ends it"
        )

    def show_result(self, result: FinishedRun, *, again: bool = False, cost: str = "") -> None:
        """Print the result: the content of summary.json and where the rest is."""
        if self._json:
            summary = {"summary": result.summary}
            print(Event(result.ended, "note", result.run_id, result.outcome, summary).as_json(), flush=True)
        if again:
            self._print(f"{result.run_id} has already finished; nothing was changed")
        for name, value in result.summary.items():
            self._print(f"  {name:<24} {_number(value)}")
        where = f"gs://{self._plan.bucket}/runs/{result.run_id}"
        attempts = f" in {result.attempts} attempts" if result.attempts > 1 else ""
        spent = f"; {cost}" if cost else ""
        self._print(
            ("finished", "green"), f" after {_format_duration(result.seconds)}{attempts}{spent}; results: {where}"
        )

    def _step(self, event: Event) -> None:
        title = event.data.get("title", event.subject)
        if event.kind == "step_failed":
            self._print("  ", ("✗", "red"), f" {title}")
            return
        action = event.data["action"]
        style = "dim" if action == "none" else "green"
        done = (f"{PAST_TENSE[action]:<10}", style)
        self._print("  ", ("✓", style), f" {title:<62} ", done, f" {event.data['seconds']:6.1f} s")

    def _train(self, event: Event) -> None:
        metrics = event.data["metrics"]
        if metrics.get("phase") == "eval":
            values = [f"{k} {_number(v)}" for k, v in metrics.items() if k.startswith("eval_") and k != "eval_time"]
            self._print("  ", ("eval", "bold"), f" step {_numeric(metrics.get('step'))}  {'  '.join(values)}")
            return
        line = training_line(metrics, self._usd_per_hour)
        if line is None or "steps_total" not in metrics:
            return
        self._training = line
        if not self._redraws and event.time - self._last_plain >= PLAIN_LINE_SECONDS:
            self._last_plain = event.time
            self._print(f"  {line}")

    def _print(self, *parts: str | tuple[str, str]) -> None:
        """Print one line; its parts are text, or text and its style."""
        text = "".join(part if isinstance(part, str) else part[0] for part in parts)
        print(printable(text), file=sys.stderr if self._json else sys.stdout, flush=True)

    def _read(self, prompt: str) -> str:
        return input(prompt)


def training_line(metrics: dict[str, Any], usd_per_hour: float | None = None) -> str | None:
    """Format `step 120/700  loss 0.12  accuracy 0.61  1.2k tok/s  ETA 1:32, $0.65`; None for a line without a step.

    The dollars are the remaining cost, shown if the hourly price of the pod is known.
    """
    metrics = {name: value for name, value in metrics.items() if isinstance(value, str | int | float)}
    step, total, seconds = (_numeric(metrics.get(name)) for name in ("step", "steps_total", "step_time"))
    if step is None:
        return None
    parts = [f"{metrics.get('phase', '')} step {step}{f'/{total:.0f}' if total else ''}".strip()]
    parts += [f"{name} {_number(metrics[name])}" for name in SHOWN_METRICS if metrics.get(name) is not None]
    if _numeric(metrics.get("tokens_per_second")):
        parts.append(f"{_number(metrics['tokens_per_second'])} tok/s")
    if total and seconds:
        left = max(0.0, total - step) * seconds
        dollars = f", ${left / 3600 * usd_per_hour:,.2f}" if usd_per_hour else ""
        parts.append(f"ETA {_format_duration(left)}{dollars}")
    return "  ".join(parts)


def _numeric(value: Any) -> int | float | None:
    """Return the value if it is a number: a program may write anything as its metrics."""
    return value if isinstance(value, int | float) and abs(value) < MAX_NUMBER else None


def _number(value: Any) -> str:
    if not isinstance(value, float) or value.is_integer():
        return f"{value:,.0f}" if isinstance(value, float) else str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _format_duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"

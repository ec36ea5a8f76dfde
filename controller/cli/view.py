"""What people see while `up` works: one line per step with its duration, then the training line.

On a terminal the steps under way and the training line are redrawn in place; elsewhere every fact is one plain line.
With --json each event is one JSON line on stdout, and words for people go to stderr.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Protocol, Self

from controller.core.events import Event
from controller.core.printable import drawable, printable
from controller.plan.build import Plan
from controller.records.ledger import Result

LARGEST = 1e15
"""What counts steps and seconds is below; numbers of JSON have no end."""
PLAIN_SECONDS = 10.0
"""How often the training line is printed where it cannot be redrawn."""
SHOWN = ("loss", "accuracy", "reward_mean", "pass_at_k", "entropy", "kl")
DONE = {"create": "created", "update": "updated", "replace": "replaced", "delete": "deleted", "none": "as wanted"}


class Screen(Protocol):
    """Where a run is shown, and its user asked."""

    usd_per_hour: float | None

    def ask(self, question: str, yes: bool) -> bool: ...

    def detached(self) -> None: ...

    def finished(self, result: Result, *, again: bool = False, cost: str = "") -> None: ...


class View:
    """A listener for events; enter it for as long as it may draw."""

    def __init__(self, plan: Plan, *, json_lines: bool) -> None:
        from rich.console import Console

        self._plan, self._json = plan, json_lines
        screen = drawable(sys.stderr if json_lines else sys.stdout)
        self._console = Console(file=screen, highlight=False, soft_wrap=True)
        self._live: Any = None
        self._under_way: dict[str, tuple[float, str]] = {}
        self._training = ""
        self._said = ""
        self._last_plain = 0.0
        self._last_moved: dict[str, float] = {}
        self.usd_per_hour: float | None = None
        """Of the run's pod, once it is there."""

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._json:
            from rich.live import Live

            self._live = Live(console=self._console, refresh_per_second=4, transient=True, get_renderable=self._moving)
            self._live.__enter__()
        where = "the emulated cloud" if self._plan.config.cloud.kind == "local" else self._plan.project
        self._print(f"[bold]{self._plan.run_id}[/] on {self._plan.node.name} ({_plain(where)})")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.__exit__(kind, value, trace)
            self._live = None

    def __call__(self, event: Event) -> None:
        if self._json:
            print(event.as_json(), flush=True)
        if event.kind == "step_started":
            self._under_way.setdefault(event.subject, (event.time, event.data.get("title", event.subject)))
        elif event.kind in ("step_done", "step_failed"):
            self._under_way.pop(event.subject, None)
            self._step(event)
        elif event.kind == "progress":
            self._moved(event)
        elif event.kind == "note":
            self._print(f"  [yellow]›[/] {_plain(event.words)}")
        elif event.kind == "log" and event.data["worker"] == 0:
            self._log(event.words)
        elif event.kind == "metrics":
            self._train(event)

    def _moved(self, event: Event) -> None:
        """How far a transfer is: in the line of its step, or on lines of their own now and then."""
        began, title = self._under_way.get(event.subject, (event.time, event.subject))
        self._under_way[event.subject] = began, f"{title.partition(': ')[0]}: {event.words}"
        if self._live is None and event.time - self._last_moved.get(event.subject, began) >= PLAIN_SECONDS:
            self._last_moved[event.subject] = event.time
            self._print(f"  … {_plain(self._under_way[event.subject][1])}")

    def _log(self, words: str) -> None:
        """The bundled trainer speaks through its metrics; until the first of them its last line says what it does."""
        lines = words.splitlines()
        if self._plan.config.program.kind == "command":
            for line in lines:
                self._print(f"    [dim]{_plain(line)}[/]")
        elif lines:
            self._said = lines[-1]

    def ask(self, question: str, yes: bool) -> bool:
        """Ask on a terminal; elsewhere the answer is what --yes says."""
        if yes or self._json or not sys.stdin.isatty():
            return yes
        if self._live is not None:
            self._live.stop()
        answer = self._console.input(f"{question} [y/N] ")
        if self._live is not None:
            self._live.start()
        return answer.strip().lower() in ("y", "yes")

    def detached(self) -> None:
        self._print(
            "detached: the run goes on; the same command re-attaches, `slipway status` looks, `slipway cancel` ends it"
        )

    def finished(self, result: Result, *, again: bool = False, cost: str = "") -> None:
        """The last words: what the program left in summary.json, and where the rest is."""
        if self._json:
            print(
                Event(result.ended, "note", result.run_id, result.outcome, {"summary": result.summary}).as_json(),
                flush=True,
            )
        if again:
            self._print(f"{result.run_id} has finished already; nothing was changed")
        for name, value in result.summary.items():
            self._print(f"  {_plain(name):<24} {_plain(_number(value))}")
        where = f"gs://{self._plan.bucket}/runs/{result.run_id}"
        attempts = f" in {result.attempts} attempts" if result.attempts > 1 else ""
        spent = f"; {cost}" if cost else ""
        self._print(f"[green]finished[/] after {_clock(result.seconds)}{attempts}{spent}; results: {where}")

    def _step(self, event: Event) -> None:
        title = _plain(event.data.get("title", event.subject))
        if event.kind == "step_failed":
            self._print(f"  [red]✗[/] {title}")
            return
        action = event.data["action"]
        style = "dim" if action == "none" else "green"
        self._print(f"  [{style}]✓[/] {title:<62} [{style}]{DONE[action]:<10}[/] {event.data['seconds']:6.1f} s")

    def _train(self, event: Event) -> None:
        metrics = event.data["metrics"]
        if metrics.get("phase") == "eval":
            found = [f"{k} {_number(v)}" for k, v in metrics.items() if k.startswith("eval_") and k != "eval_time"]
            self._print(f"  [bold]eval[/] step {_counted(metrics.get('step'))}  {_plain('  '.join(found))}")
            return
        line = training_line(metrics, self.usd_per_hour)
        if line is None or "steps_total" not in metrics:
            return
        self._training = line
        if self._live is None and event.time - self._last_plain >= PLAIN_SECONDS:
            self._last_plain = event.time
            self._print(f"  {_plain(line)}")

    def _moving(self) -> Any:
        from rich.console import Group
        from rich.spinner import Spinner
        from rich.text import Text

        now = time.time()
        steps = [
            Spinner("dots", Text(printable(f" {title}  {now - began:.0f} s"), style="cyan"), style="cyan")
            for began, title in self._under_way.values()
        ]
        last = self._training or self._said
        return Group(*steps, *([Text(printable(f"  {last}"), overflow="ellipsis", no_wrap=True)] if last else []))

    def _print(self, line: str) -> None:
        self._console.print(line)


def training_line(metrics: dict[str, Any], usd_per_hour: float | None = None) -> str | None:
    """`step 120/700  loss 0.12  accuracy 0.61  1.2k tok/s  ETA 1:32, $0.65`; None for a line without a step.

    The dollars are those that are still to come, where an hour of the pod has a price.
    """
    metrics = {name: value for name, value in metrics.items() if isinstance(value, str | int | float)}
    step, total, seconds = (_counted(metrics.get(name)) for name in ("step", "steps_total", "step_time"))
    if step is None:
        return None
    words = [f"{metrics.get('phase', '')} step {step}{f'/{total:.0f}' if total else ''}".strip()]
    words += [f"{name} {_number(metrics[name])}" for name in SHOWN if metrics.get(name) is not None]
    if _counted(metrics.get("tokens_per_second")):
        words.append(f"{_number(metrics['tokens_per_second'])} tok/s")
    if total and seconds:
        left = max(0.0, total - step) * seconds
        dollars = f", ${left / 3600 * usd_per_hour:,.2f}" if usd_per_hour else ""
        words.append(f"ETA {_clock(left)}{dollars}")
    return "  ".join(words)


def _counted(value: Any) -> int | float | None:
    """The value where it is a number: a program may write anything as its metrics."""
    return value if isinstance(value, int | float) and abs(value) < LARGEST else None


def _number(value: Any) -> str:
    if not isinstance(value, float) or value.is_integer():
        return f"{value:,.0f}" if isinstance(value, float) else str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(printable(text))

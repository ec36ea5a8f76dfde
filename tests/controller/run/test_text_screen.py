"""What `up` prints in 80 columns, on a terminal and in a file: steps, notes, metrics and the end of a run."""

import io
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest

from controller.cli import main
from controller.cli.view import View
from controller.core.events import Event, EventKind
from controller.core.text import COLOUR
from controller.plan.build import Plan, build_plan
from controller.records.ledger import Result
from controller.run.text_screen import TextScreen
from tests.terminal import Tty

LONG_TITLE = "TPU v5litepod-256 (64 workers) slipway-of-a-researcher-with-a-long-name-0ef9e1"
NOTE = "preempted: us-central1-a has taken the pod back after 14 minutes; replacing it, and resuming from step 120"
GRPO = {"phase": "grpo", "step": 165, "steps_total": 188, "loss": 6.268e-05, "accuracy": 0.7797,
        "reward_mean": 0.7797, "pass_at_k": 0.975, "entropy": 0.6857, "kl": 0.06269, "tokens_per_second": 43210.0,
        "step_time": 2.0}  # fmt: skip
SPINNER = re.compile("[\u2800-\u28ff]")
EVAL = {"phase": "eval", "step": 188, "eval_accuracy": 0.8984, "eval_accuracy_low": 0.8553, "eval_accuracy_high": 0.93}


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    folder = tmp_path_factory.mktemp("screen")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("SLIPWAY_HOME", str(folder / "home"))
        return build_plan(main.parse(["plan", "+experiment=quickstart"]).options.config()[0], "slipway-local", folder)


@pytest.fixture(autouse=True)
def _narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")


@pytest.fixture(params=["terminal", "file"])
def show(request: pytest.FixtureRequest, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Print events, and the result if there is one; return the lines that stay."""

    def print_all(*events: Event, result: Result | None = None) -> list[str]:
        screen = Tty() if request.param == "terminal" else io.StringIO()
        monkeypatch.setattr(sys, "stdout", screen)
        with View(plan, json_lines=False) if request.param == "terminal" else TextScreen(plan) as view:
            for event in events:
                view(event)
            if result is not None:
                view.show_result(result, cost="4.2 pod minutes")
        return COLOUR.sub("", screen.getvalue()).splitlines()

    return print_all


def event(kind: EventKind, subject: str, message: str = "", **data: Any) -> Event:
    return Event(1000.0, kind, subject, message, data)


def step(name: str, action: str = "none", *, waited: bool = False, seconds: float = 0.0) -> list[Event]:
    begun = [event("step_started", name, title=name)] if waited or action != "none" else []
    return [*begun, event("step_done", name, title=name, action=action, seconds=seconds)]


def test_no_line_is_wider_than_80_columns_and_nothing_is_missing(show: Callable[..., list[str]], plan: Plan) -> None:
    lines = show(
        *step(LONG_TITLE, "create", seconds=12345.6),
        *step("SSH to 64 workers", waited=True, seconds=31.2),
        event("note", plan.run_id, NOTE),
        event("metrics", plan.run_id, metrics=GRPO),
        event("metrics", plan.run_id, metrics=EVAL),
        event("step_failed", "x", title=LONG_TITLE * 2),
        result=Result(plan.run_id, "finished", 2, 0.0, 238.0, {"accuracy_before": 0.25, "accuracy_after": 0.75}),
    )
    assert max(map(len, lines)) <= 80
    [created] = [line for line in lines if "created" in line]
    assert created.startswith("  ✓ TPU v5litepod-256 (64 workers)")
    assert "-0ef9e1 created  12345.6 s" in created
    assert "  ✓ SSH to 64 workers" + " " * 41 + "ready       31.2 s" in lines
    [begin] = [number for number, line in enumerate(lines) if line.startswith("  › preempted")]
    assert " ".join(line.strip() for line in lines[begin : begin + 2]) == f"› {NOTE}"
    assert lines[begin + 1].startswith("    ")
    assert "  eval step 188  accuracy 0.8984 (95 %: 0.8553 to 0.93)" in lines
    assert lines[-6:-2] == [
        "  accuracy           0.25 → 0.75",
        "finished after 3:58 in 2 attempts; 4.2 pod minutes",
        f"results  gs://{plan.bucket}/runs/{plan.run_id}",
        f"next     slipway report · slipway tensorboard · slipway get {plan.run_id}",
    ]
    asked = f"ask      slipway generate {plan.run_id} --prompt 'Kim has figs: 7, gets 2. '"
    assert " ".join(lines[-2:]).split() == asked.split()


def test_unchanged_steps_are_one_line_and_changed_ones_stay(show: Callable[..., list[str]], plan: Plan) -> None:
    """As of a second `up`: the code differs, and a step's finding comes in between."""
    unchanged = [each for i in range(9) for each in step(f"step {i}")]
    finding, attached = "warning: a finding about one step", "re-attached to attempt 1 on 4 workers"
    update = step("code on 4 workers", "update", seconds=2.4)
    before = (*unchanged, event("note", "network/x", finding), *update, *unchanged[:8])
    lines = show(*before, event("note", plan.run_id, attached, attempt=1), *unchanged[:3])
    said = [line.split("  ")[1].strip() for line in lines[1:]]
    assert said[:2] == [f"› {finding}", "✓ code on 4 workers"]
    assert said[2:] == ["✓ 17 steps unchanged", f"› {attached}", "✓ 3 steps unchanged"]


def test_results_that_are_deleted_at_once_are_not_offered(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    with TextScreen(plan, discards=True) as view:
        view.show_result(Result(plan.run_id, "finished", 2, 0.0, 238.0, {"accuracy": 0.5}), cost="4.2 pod minutes")
    last = "finished after 3:58 in 2 attempts; 4.2 pod minutes"
    assert capsys.readouterr().out.splitlines()[-2:] == ["  accuracy           0.5", last]


class Seen(View):
    """A view on a machine whose clock is an hour behind those that write events."""

    def __init__(self, plan: Plan, *, json_lines: bool) -> None:
        with mock.patch("time.time", return_value=1000.0):
            super().__init__(plan, json_lines=json_lines)

    def __call__(self, event: Event) -> None:
        with mock.patch("time.time", return_value=event.time - BEHIND):
            super().__call__(event)


BEHIND = 3600.0


def moving(view: View, now: float, monkeypatch: pytest.MonkeyPatch) -> str:
    from rich.console import Console

    monkeypatch.setattr("controller.cli.view.time.time", lambda: now - view._ahead)
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(view._moving())
    return console.export_text()


def test_a_wait_shows_its_seconds_until_the_next_attempt(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    view = Seen(plan, json_lines=False)
    view(event("note", plan.run_id, "launched attempt 1 on 4 workers", attempt=1))
    assert moving(view, 1001.0, monkeypatch).strip() == ""
    assert "waiting for the program's output  5 s" in moving(view, 1005.0, monkeypatch)
    view(event("log", plan.run_id, "compiled update in 19.2 s; 2 to go", worker=0))
    view(event("log", plan.run_id, "worker 1 says something", worker=1))
    assert moving(view, 1002.0, monkeypatch).strip() == "compiled update in 19.2 s; 2 to go"
    assert "compiled update in 19.2 s; 2 to go  7 s" in moving(view, 1007.0, monkeypatch)
    view(event("metrics", plan.run_id, metrics=GRPO))
    training = moving(view, 1002.0, monkeypatch).rstrip()
    assert training.startswith("  grpo step 165/188  ")
    assert training.endswith("ETA 0:46")
    view(event("note", plan.run_id, "launched attempt 2 on 4 workers", attempt=2))
    assert "grpo" not in moving(view, 1009.0, monkeypatch)


TRAINING = event("metrics", "r", metrics=GRPO)
LAUNCHED = event("note", "r", "launched attempt 1 on 4 workers", attempt=1)
LONG_WAITS = {
    "for the lease of the pod": [],
    "for capacity": [event("step_started", "node/p", "us-central1-a: no capacity", title=LONG_TITLE)],
    "for a stuck upload": [event("step_started", "m", "create", title="gemma"), event("progress", "m", "1 GB of 4 GB")],
    "for the first output": [LAUNCHED],
    "for a compilation": [LAUNCHED, event("log", "r", "compiled update in 19.2 s; 2 to go", worker=0)],
    "for a step": [LAUNCHED, TRAINING],
    "for worker 0": [LAUNCHED, *(Event(1000.0 + 5 * i, "log", "r", "x", {"worker": 1}) for i in range(99))],
    "for the network": [LAUNCHED, TRAINING, event("note", "r", "network lost; waiting")],
    "for the last logs": [LAUNCHED, TRAINING, event("metrics", "r", metrics=EVAL)],
}


@pytest.mark.parametrize("wait", LONG_WAITS)
def test_no_wait_is_silent_for_more_than_5_seconds(wait: str, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """What moves is compared without the spinner: words and seconds, in the first minute and after an hour."""
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    view = Seen(plan, json_lines=False)
    for one in LONG_WAITS[wait]:
        view(one)
    seconds = [*range(0, 65, 5), *range(3540, 3600, 5)]
    shown = [SPINNER.sub("", moving(view, 1000.0 + second, monkeypatch)) for second in seconds]
    assert all(before != after for before, after in pairwise(shown)), wait
    assert all(f"{second} s" in text for second, text in zip(seconds[1:], shown[1:], strict=True))
    assert max(len(line) for text in shown for line in text.splitlines()) <= 80


@pytest.mark.parametrize(("typed", "agrees"), [("yes\n", True), ("\n", False)])
def test_a_question_says_its_default(typed: str, agrees: bool, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", screen := Tty())
    monkeypatch.setattr(sys, "stdin", Tty(typed))
    with View(plan, json_lines=False) as view:
        assert view.ask("Create it?", yes=False) == agrees
    assert "Create it? [y/N] " in COLOUR.sub("", screen.getvalue())


def test_a_file_keeps_a_sentence_whole(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS")
    monkeypatch.setattr(sys, "stdout", screen := io.StringIO())
    with TextScreen(plan) as view:
        view(event("note", plan.run_id, NOTE))
        view(TRAINING)
    *_, note, training = screen.getvalue().splitlines()
    assert note == f"  › {NOTE}"
    assert (len(training) <= 80, training[:19], training[-8:]) == (True, "  grpo step 165/188", "ETA 0:46")


def test_after_a_recovery_the_line_of_the_previous_attempt_is_not_shown_again(plan: Plan) -> None:
    screen = TextScreen(plan)

    def at(time: float, step: int | None = None, told: float = 0.0) -> str:
        if step is None:
            screen(Event(time, "note", plan.run_id, "launched", {"attempt": 1}))
        else:
            screen(Event(time, "metrics", plan.run_id, "", {"metrics": {"step": step, "steps_total": 9, "time": told}}))
        return screen._training

    assert (at(100), at(111, 1, 110)) == ("", "step 1/9")
    assert (at(200), at(201, 1, 110), at(215, 2, 205)) == ("", "", "step 2/9")


def test_an_exception_of_another_worker_is_shown_at_once(show: Callable[..., list[str]]) -> None:
    lines = show(event("traceback", "r", "Traceback:\n  x\nValueError: y", worker=2, exception="ValueError: y"))
    assert lines[1:] == ["  ✗ worker 2: ValueError: y", "    Traceback:", "      x", "    ValueError: y"]


@pytest.mark.parametrize("screen", [Tty, io.StringIO])
def test_many_lines_are_drawn_in_blocks(screen: type[io.StringIO], plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line by itself costs the controller as much as a hundred of a block: it would lag behind the program."""
    drawn, out = [0], screen()
    monkeypatch.setattr(sys, "stdout", out)
    program = plan.config.program.model_copy(update={"kind": "command"})
    plan = replace(plan, config=plan.config.model_copy(update={"program": program}))
    lines = [f"line {i} \x1b[31mred\x1b[0m \x07" for i in range(1000)]
    with View(plan, json_lines=False) as view:
        real = view._console.print

        def count(*parts: Any, **how: Any) -> None:
            drawn[0] += 1
            real(*parts, **how)

        monkeypatch.setattr(view._console, "print", count)
        for begin in range(0, 1000, 250):
            view(event("log", plan.run_id, "".join(f"{line}\n" for line in lines[begin : begin + 250]), worker=0))
        view(event("log", plan.run_id, "", worker=0))
    assert drawn[0] <= 4
    shown = [line for line in COLOUR.sub("", out.getvalue()).splitlines() if "line " in line]
    assert shown == [f"    line {i} red \\x07" for i in range(1000)]

"""What workers print is shown, and steers nothing."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from controller.cli import main
from controller.cli.verbs import on_workers
from controller.cli.view import View
from controller.core.clock import Clock
from controller.core.events import Event
from controller.core.printable import SanitizedStream, printable, sanitized_output
from controller.plan.build import build_plan
from controller.records.ledger import Result
from tests.terminal import Tty

HOSTILE = "\x1b]0;title\x07\x1b[2J\x9b31m\x1b[6n\u202eevil\u2066[/][bold]\x08\x7f"


def harmless(text: str) -> bool:
    return not [sign for sign in (*"\x07\x08\x7f\x9b\u202e\u2066", "\x1b]", "\x1b[2J") if sign in text]


def test_control_characters_are_shown_and_colours_left_out() -> None:
    assert printable("a\tb\r\nc é 🙂 שלום") == "a\tb\r\nc é 🙂 שלום"
    assert printable("\x1b[1;32mgreen\x1b[0m") == "green"
    assert printable("\x1b]0;t\x07") == r"\x1b]0;t\x07"
    assert printable("\u202e\x9b\u2028\ud800") == r"\u202e\x9b\u2028\ud800"
    assert harmless(printable(HOSTILE))


def test_a_terminal_shows_and_a_file_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    tty, file = Tty(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", tty)
    monkeypatch.setattr(sys, "stderr", file)
    with sanitized_output():
        print(HOSTILE, end="")
        print(HOSTILE, end="", file=sys.stderr)
    assert harmless(tty.getvalue())
    assert (file.getvalue(), sys.stdout) == (HOSTILE, tty)
    command = Tty()
    write = on_workers._writer_for(SanitizedStream(command))  # pyright: ignore[reportArgumentType]
    for byte in "é\x1b[2J".encode():
        write(bytes([byte]))
    assert command.getvalue() == r"é\x1b[2J"


def test_words_of_an_error_are_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stderr", tty := Tty())
    url = HOSTILE.replace("[", "").replace("]", "")
    assert main.run(["plan", "program=command", f"code.repository.url={url}"]) == 2
    assert "error" in tty.getvalue()
    assert harmless(tty.getvalue())


@pytest.mark.parametrize("on_terminal", [True, False])
def test_the_live_view(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, on_terminal: bool) -> None:
    """Log, notes, titles, metrics and summary come from workers; none of them is markup, and none ends `up`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLIPWAY_HOME", str(tmp_path / "home"))
    (tmp_path / "code.py").write_text("")
    monkeypatch.setattr(sys, "stdout", screen := Tty() if on_terminal else io.StringIO())
    words = ["plan", "cloud=local", "program=command", "program.command=[a]", "env.packages=none"]
    plan = build_plan(main.parse(words).options.config()[0], "slipway-local", tmp_path)
    titled = {"title": HOSTILE}
    said: list[tuple[str, dict[str, Any]]]
    said = [("log", {"worker": 0}), ("note", {}), ("step_started", titled), ("progress", {}), ("step_failed", titled)]
    said += [("metrics", {"metrics": m}) for m in anything()]
    with sanitized_output(), View(plan, json_lines=False) as view:
        for kind, data in said:
            view(Event(Clock().now(), kind, HOSTILE, HOSTILE, data))  # pyright: ignore[reportArgumentType]
        if view._live is not None:
            view._live.refresh()
        view.show_result(Result("r", "finished", 1, 0.0, 0.0, {HOSTILE: HOSTILE, "x": [HOSTILE], "y": float("nan")}))
    shown = screen.getvalue()
    assert "[/][bold]" in shown
    assert harmless(shown.replace("\x1b[2J", "") if on_terminal else shown)
    assert "\x1b[6n" not in shown


def anything() -> list[dict[str, Any]]:
    """Lines that a program may write as its metrics."""
    odd = [HOSTILE, [1], {"a": 1}, None, True, -1, 10**400, float("nan"), float("inf"), 1e300]
    lines = [{"step": value, "steps_total": value, "step_time": value, "loss": value, "phase": value} for value in odd]
    lines += [{**line, "step": 3, "tokens_per_second": line["loss"]} for line in lines]
    lines += [{**line, "phase": "eval", "eval_x": line["loss"]} for line in lines]
    return json.loads(json.dumps(lines))

"""Waits before a run's screen opens: a spinner on a terminal, nothing elsewhere."""

import io
import sys
import time
from contextlib import suppress
from itertools import count, pairwise
from types import SimpleNamespace

import pytest

from controller.cli import view
from controller.cli.main import parse
from controller.cli.view import Spinner
from controller.core.errors import ConfigError
from controller.run import session
from controller.run.options import RunOptions
from tests.composed import config_of
from tests.terminal import Tty

ERASE_LINE = "\x1b[2K"
LIMIT_SECONDS = 240.0


def terminal(monkeypatch: pytest.MonkeyPatch) -> Tty:
    """Make stderr a terminal; not in a fixture, after which pytest replaces stderr again."""
    monkeypatch.setattr(sys, "stderr", screen := Tty())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    return screen


def wait_for(screen: Tty, text: str) -> None:
    until = time.monotonic() + LIMIT_SECONDS
    while text not in screen.getvalue():
        assert time.monotonic() < until, screen.getvalue()
        time.sleep(0.01)


def test_it_shows_what_is_done_and_disappears(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch)
    with Spinner(delay=0) as doing:
        doing("hashing code and data")
        wait_for(screen, "hashing code and data …")
        doing("starting the emulated cloud" + " and more" * 20 + "\x1b[2J")
        wait_for(screen, "starting the emulated cloud")
        print("warning: kept", file=sys.stderr)
        wait_for(screen, "warning: kept")
    shown = screen.getvalue()
    assert shown.rindex(ERASE_LINE) > shown.rindex("starting")
    assert "\x1b[2J" not in shown


def test_a_long_wait_shows_its_seconds_and_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = count(100, 5)
    monkeypatch.setattr(view, "time", SimpleNamespace(monotonic=lambda: next(ticks)))
    doing = Spinner(quiet=True)
    doing("observing what exists")
    doing._since += 5
    seen = [doing._line(80) for _ in range(700)]
    assert seen[:3] == ["observing what exists …", "observing what exists …  5 s", "observing what exists …  10 s"]
    assert all(before != after for before, after in pairwise(seen))
    assert len(doing._line(20)) <= 18
    doing("starting")
    assert doing._line(80) == "starting …  5 s"  # counted anew


def test_a_failure_erases_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch)
    with suppress(ConfigError), Spinner(delay=0) as doing:
        doing("composing")
        wait_for(screen, "composing …")
        raise ConfigError("wrong")
    assert screen.getvalue().rindex(ERASE_LINE) > screen.getvalue().rindex("composing")


def test_a_short_wait_shows_nothing_and_off_a_terminal_and_with_json_it_is_quiet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = terminal(monkeypatch)
    with Spinner(delay=LIMIT_SECONDS) as doing:
        doing("composing")
        timer = doing._timer
        assert timer is not None
        assert timer.is_alive()
    timer.join()  # at once: it is cancelled
    assert screen.getvalue() == ""
    for screen in (Tty(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", screen)
        with Spinner(quiet=screen.isatty(), delay=0) as doing:
            doing("composing")
            assert doing._timer is None
        assert screen.getvalue() == ""


def test_a_verb_says_each_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is slow before the screen opens: Hydra, hashing a repository, starting the emulated cloud."""
    terminal(monkeypatch)
    said: list[str] = []

    class Told(Spinner):
        def __call__(self, text: str) -> None:
            said.append(text)

    monkeypatch.setattr("controller.cli.view.Spinner", Told)
    monkeypatch.setattr(RunOptions, "checked_config", lambda self: config_of("+experiment=quickstart"))

    def refuse(config: object, *, keep_awake: bool) -> None:
        raise ConfigError("no cloud in this test")

    monkeypatch.setattr(session, "open_context", refuse)
    options = parse(["up", "+experiment=quickstart"]).options
    with pytest.raises(ConfigError, match="no cloud"), session.open_session(options):
        pass
    assert said == ["composing the config", "hashing code and data", "starting the emulated cloud"]

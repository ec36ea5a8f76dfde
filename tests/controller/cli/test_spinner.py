"""Waits before a run's screen opens: a spinner on a terminal, nothing elsewhere."""

from __future__ import annotations

import io
import sys
import time

import pytest

from controller.cli.main import parse
from controller.cli.spinner import Spinner
from controller.config.compose import compose
from controller.core.errors import ConfigError
from controller.run import session
from controller.run.options import RunOptions

ERASE_LINE = "\x1b[2K"
LIMIT_SECONDS = 60.0


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


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


def test_a_failure_erases_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch)

    def fail() -> None:
        with Spinner(delay=0) as doing:
            doing("composing")
            wait_for(screen, "composing …")
            raise ConfigError("wrong")

    with pytest.raises(ConfigError):
        fail()
    assert screen.getvalue().rindex(ERASE_LINE) > screen.getvalue().rindex("composing")


def test_a_short_wait_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch)
    with Spinner(delay=LIMIT_SECONDS) as doing:
        doing("composing")
        timer = doing._timer
        assert timer is not None
        assert timer.is_alive()
    timer.join()  # at once: it is cancelled
    assert screen.getvalue() == ""


@pytest.mark.parametrize("quiet", [True, False])
def test_off_a_terminal_and_with_json_it_is_quiet(quiet: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", screen := Tty() if quiet else io.StringIO())
    with Spinner(quiet=quiet, delay=0) as doing:
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

    monkeypatch.setattr("controller.cli.spinner.Spinner", Told)
    config, _ = compose(["+experiment=quickstart"])
    monkeypatch.setattr(RunOptions, "checked_config", lambda self: config)

    def refuse(config: object, *, keep_awake: bool) -> None:
        raise ConfigError("no cloud in this test")

    monkeypatch.setattr(session, "open_context", refuse)
    options = parse(["up", "+experiment=quickstart"]).options
    with pytest.raises(ConfigError, match="no cloud"), session.open_session(options):
        pass
    assert said == ["composing the config", "hashing code and data", "starting the emulated cloud"]

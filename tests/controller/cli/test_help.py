"""What somebody who has never seen it reads first, slipway help --web, and waits before a run's screen opens."""

import _thread
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from controller.cli import help as help_page
from controller.cli import main, view
from controller.cli.flags import VERBS, module_of
from controller.cli.help import ABOUT, DOCS, FIRST_STEPS
from controller.cli.main import parse
from controller.cli.view import Spinner
from controller.config.compose import config_groups
from controller.core.errors import ConfigError
from controller.run import session
from controller.run.options import RunOptions
from tests.composed import config_of
from tests.terminal import Tty


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main.run(words) == 0
    return capsys.readouterr().out


def test_the_first_page_has_every_verb_group_and_choice(capsys: pytest.CaptureFixture[str]) -> None:
    page = said(capsys, "--help")
    for name, verb in VERBS.items():
        assert re.search(rf"^  {name} +{re.escape(verb.help[:40])}", page, re.MULTILINE), name
    plain = " ".join(page.split())
    assert set(ABOUT) == set(config_groups())
    for group, choices in config_groups().items():
        assert f" {group}= " in plain
        assert all(choice in plain for choice in choices if not choice.startswith("tiny_"))
    assert all(words in page for words, _ in FIRST_STEPS)
    assert "\x1b" not in page
    assert said(capsys, "-h") == said(capsys, "help") == page


def test_every_verb_has_a_page_a_module_and_a_document(capsys: pytest.CaptureFixture[str]) -> None:
    for verb, about in VERBS.items():
        page = said(capsys, verb, "--help")
        assert all(f"slipway {example}" in page for example in about.examples), verb
        assert all(flag.names[-1] in page for flag in about.flags if flag.names[0].startswith("-")), verb
        assert importlib.util.find_spec(module_of(verb)) is not None, verb
        assert (DOCS / about.page).is_file(), verb
        assert said(capsys, "help", verb) == page, verb
        assert json.loads(said(capsys, "help", verb, "--json"))["examples"], verb


def test_mistakes_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert [main.run(["plam", "--help"]), main.run(["help", "plam"]), main.run(["help", "a=b"])] == [2, 2, 2]
    err = capsys.readouterr().err
    assert err.count("error: ") == 3
    assert err.count("did you mean 'plan'?") == 2
    assert main.run(["plan", "quickstart"]) == 2
    assert "plan: does not take 'quickstart'; did you mean +experiment=quickstart?" in capsys.readouterr().err


def test_alone_it_shows_the_help_and_it_knows_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys) == said(capsys, "--help")
    installed = said(capsys, "version")
    assert re.fullmatch(r"slipway \d+\.\d+\S*\n", installed)
    assert said(capsys, "--version") == said(capsys, "-V") == installed
    assert main.parse(["exec", "--", "ls", "--help"]).verb == "exec", "a program for workers has its own help"


@pytest.mark.parametrize("words", [["--help"], ["runs"]])
def test_what_needs_no_config_starts_fast(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By what is imported, not by a clock."""
    run = (
        f"import sys; sys.argv = ['slipway', *{words!r}]\n"
        "from controller.__main__ import main\nmain()\nprint(*sys.modules, file=sys.stderr)"
    )
    env = {**os.environ, "SLIPWAY_HOME": str(tmp_path)}
    argv = [sys.executable, "-c", run]
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    slow = "hydra omegaconf pydantic yaml google googleapiclient paramiko asyncio numpy jax rich ssl http email hashlib"
    assert set(slow.split()) & set(done.stderr.split()) == set()
    assert words == ["runs"] or done.stdout == said(capsys, "--help")


@pytest.fixture
def mkdocs(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A build that writes one page; the commands that were run."""
    ran: list[list[str]] = []

    def build(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        ran.append(command)
        folder = Path(command[-1])
        folder.mkdir(parents=True)
        (folder / "index.html").write_text("<h1>Slipway</h1>")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", build)
    return ran


def test_the_site_is_built_once_and_served_on_loopback(
    mkdocs: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    read: list[str] = []

    def browse(address: str) -> None:
        with urllib.request.urlopen(address.partition("reference")[0] or address, timeout=240) as answer:
            read.extend([address, answer.read().decode()])
        _thread.interrupt_main()

    assert help_page.show_site(tmp_path, "plan", browse) == 0
    assert read[0].startswith("http://127.0.0.1:")
    assert read[0].endswith("/reference/commands.html#slipway-plan")
    assert read[1] == "<h1>Slipway</h1>"
    assert read[0] in capsys.readouterr().out
    help_page.build_site(tmp_path)
    assert len(mkdocs) == 1


def test_a_failed_build_says_why_and_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "WARNING - a page is missing")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(ConfigError, match="could not be built:\nWARNING - a page is missing"):
        help_page.build_site(tmp_path)
    monkeypatch.setattr(help_page.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install 'slipway-tpu\[docs\]'"):
        help_page.build_site(tmp_path)
    monkeypatch.setattr(help_page, "SOURCE", tmp_path)
    with pytest.raises(ConfigError, match="installed without it"):
        help_page.build_site(tmp_path)


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

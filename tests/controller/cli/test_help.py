"""What somebody who has never seen it reads first, and `slipway help --web`."""

import _thread
import importlib.util
import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from controller.cli import help as help_page
from controller.cli import main
from controller.cli.flags import VERBS, module_of
from controller.cli.help import ABOUT, DOCS, FIRST_STEPS
from controller.config.compose import config_groups
from controller.core.errors import ConfigError


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
    with pytest.raises(ConfigError, match=r"pip install 'slipway\[docs\]'"):
        help_page.build_site(tmp_path)
    monkeypatch.setattr(help_page, "SOURCE", tmp_path)
    with pytest.raises(ConfigError, match="installed without it"):
        help_page.build_site(tmp_path)

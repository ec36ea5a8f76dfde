"""What somebody who has never seen it reads first."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from controller.cli import main
from controller.cli.flags import VERBS, module_of
from controller.cli.help import ABOUT, DOCS, FIRST_STEPS
from controller.config.compose import config_groups


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main.run(words) == 0
    return capsys.readouterr().out


def test_the_first_page_has_every_verb_group_and_choice(capsys: pytest.CaptureFixture[str]) -> None:
    page = said(capsys, "--help")
    for name, verb in VERBS.items():
        assert re.search(rf"^  {name} +{re.escape(verb.help[:40])}", page, re.MULTILINE), name
    plain = " ".join(page.split())
    for group, choices in config_groups().items():
        assert f" {group}= " in plain
        assert all(choice in plain for choice in choices if not choice.startswith("tiny_"))
    assert all(words in page for words, _ in FIRST_STEPS)
    assert "\x1b" not in page
    assert said(capsys, "-h") == said(capsys, "help") == page


def test_every_group_is_told_about() -> None:
    assert set(ABOUT) == set(config_groups())


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_a_page_a_module_and_a_document(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = said(capsys, verb, "--help")
    assert all(f"slipway {example}" in page for example in VERBS[verb].examples)
    assert all(flag.names[-1] in page for flag in VERBS[verb].flags if flag.names[0].startswith("-"))
    assert importlib.util.find_spec(module_of(verb)) is not None
    assert (DOCS / VERBS[verb].page).is_file()
    assert said(capsys, "help", verb) == page
    assert json.loads(said(capsys, "help", verb, "--json"))["examples"]


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


def test_of_a_program_for_workers_is_left_to_it() -> None:
    assert main.parse(["exec", "--", "ls", "--help"]).verb == "exec"


@pytest.mark.parametrize("words", [["--help"], ["runs"]])
def test_what_needs_no_config_starts_fast(words: list[str], tmp_path: Path) -> None:
    """By what is imported, not by a clock."""
    run = (
        f"import sys; sys.argv = ['slipway', *{words!r}]\n"
        "from controller.__main__ import main\nmain()\nprint(*sys.modules, file=sys.stderr)"
    )
    env = {**os.environ, "SLIPWAY_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", run], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    slow = (
        "hydra",
        "omegaconf",
        "pydantic",
        "yaml",
        "google",
        "googleapiclient",
        "paramiko",
        "asyncio",
        "numpy",
        "jax",
        "rich",
        "ssl",
        "http",
        "email",
        "hashlib",
    )
    assert set(slow) & set(done.stderr.split()) == set()


def test_the_module_says_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [sys.executable, "-m", "controller", "--help"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == said(capsys, "--help")

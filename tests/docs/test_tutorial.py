"""The tutorial as a reader follows it: every command in its order, in one folder, on one emulated cloud."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text()
HERE, _, GOOGLE = TUTORIAL.partition("## 6. On a TPU pod")
STEP = re.compile(
    r"write `(?P<file>slipway/[\w/]+\.yaml)`:\n\n```yaml\n(?P<yaml>.*?)```|```\n(?P<commands>.*?)```", re.DOTALL
)
COMMAND = re.compile(r"(?:slipway|python -m controller) (?P<words>[^#\n]+)")


def steps() -> list[tuple[str, str]]:
    """Return files to write (path, content) and commands ("", words) in the order of the page."""
    found: list[tuple[str, str]] = []
    for step in STEP.finditer(HERE):
        if step["file"]:
            found.append((step["file"], step["yaml"]))
        else:
            found += [("", command["words"].strip()) for command in COMMAND.finditer(step["commands"])]
    return found


def test_the_page_has_the_steps_that_are_run() -> None:
    commands = [words for file, words in steps() if not file]
    assert commands[0] == "+experiment=quickstart"
    assert "+experiment=sums" in commands
    verbs = {words.split()[0] for words in commands if not words.startswith("+")}
    assert verbs == {"runs", "report", "plan", "rehearse", "-m"}
    assert "slipway plan" in GOOGLE


@pytest.mark.e2e
@pytest.mark.deep
@pytest.mark.timeout(5400)
def test_every_command_works_in_its_order(tmp_path: Path) -> None:
    folder = tmp_path / "reader"
    folder.mkdir()
    # As for a user: not one virtual device of the tests, and no state of anyone else.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    environment |= {"SLIPWAY_HOME": str(tmp_path / "home"), "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}

    def run(words: str, expected: int = 0) -> str:
        command = [sys.executable, "-m", "controller", *shlex.split(words)]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == expected, f"slipway {words}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    said: dict[str, str] = {}
    try:
        for file, text in steps():
            if file:
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                (folder / file).write_text(text)
                continue
            trains = text.startswith(("+experiment=", "-m "))
            said[text] = run(f"{text} scale=tiny" if trains else text)
        assert "finished after" in said["+experiment=quickstart"]
        assert "quickstart-" in said["runs"]
        page = re.search(r"\S+\.html", said["report"])
        assert page
        assert Path(page[0]).is_file()
        assert "+ create" in said["plan +experiment=quickstart loop.group_size=4 run.seed=1"]
        assert "preempted" in said["rehearse +experiment=quickstart"]
        assert "did you mean loop.group_size" in run("plan +experiment=quickstart loop.group_sise=4", expected=2)
        assert "already finished" in run("+experiment=sums scale=tiny")
        rows = json.loads(run("runs --json"))
        finished = [row for row in rows if row["name"] == "quickstart" and row["state"] == "finished"]
        assert len(finished) == 6  # one of the sweep is the run of step 1
        assert len([row for row in finished if row.get("sweep")]) == 5
        first, second = (next(row["run"] for row in rows if row["name"] == name) for name in ("quickstart", "sums"))
        assert "data.largest_first" in run(f"runs --diff {first} {second}")
    finally:
        run("down --yes +experiment=quickstart")
        run("localcloud stop")

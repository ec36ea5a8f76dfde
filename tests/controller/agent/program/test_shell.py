"""The shell of someone who logs in has the variables and the folder of the program, and none of its secrets."""

from __future__ import annotations

import subprocess

from controller.cli.verbs.look.ssh import shell_command
from tests.controller.agent.conftest import ProgramRun

SHOW = ("sh", "-c", 'echo "$SLIPWAY_WORKER|$QUOTED|${TOKEN-none}|$PWD|$(command -v python)"')


def enter(run: ProgramRun, *words: str) -> str:
    line = shell_command(run.run_id, words, on_terminal=False)
    home = {"HOME": str(run.worker.home), "PATH": "/usr/bin:/bin"}
    return subprocess.run(["sh", "-c", line], env=home, capture_output=True, text=True, check=True).stdout.strip()


def test_a_command_runs_in_the_environment_of_the_program_without_its_secrets(run: ProgramRun) -> None:
    run.start("print(1)", env={"SLIPWAY_WORKER": "2", "QUOTED": "it's\n$HOME"}, secrets={"TOKEN": "s3cret"})
    run.wait_ended()
    [venv] = (run.worker.root / "venv").iterdir()
    expected = f"2|it's\n$HOME|none|{run.folder / 'work'}|{venv}/bin/python"
    assert enter(run, *SHOW) == expected
    assert "s3cret" not in (run.folder / "shell.sh").read_text()
    assert "PS1='worker 2:" in (run.folder / "shell.sh").read_text()


def test_before_a_launch_a_command_runs_in_the_home_folder_as_it_is(run: ProgramRun) -> None:
    assert enter(run, "sh", "-c", 'echo "${SLIPWAY_WORKER-none}"') == "none"

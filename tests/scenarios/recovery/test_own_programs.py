"""Programs of users that fail: the verdict, its words, and the seconds from the failure to the verdict.

The programs are in `tests/fixtures/own_programs/`. All cells share one pod of two workers, which is kept between them.
"""

import contextlib
import importlib.util
import io
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from controller import emulator
from controller.cli import main
from tests.controller.conftest import internal_errors
from tests.emulators import Emulators
from tests.paths import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.deep, pytest.mark.xdist_group("own_programs")]
TORCH = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
PROGRAMS = {
    "plain": ["python", "plain.py"],
    "jax": ["python", "with_jax.py"],
    "torch": ["python", "with_torch.py"],
    "shell": ["sh", "script.sh"],
}
POD = ["program=command", "cloud=local", "env.packages=image", "program.needs_chips=false",
       "tpu.accelerator_type=v4-16", "tpu.zone=us-central2-b", "cleanup.on_success=keep"]  # fmt: skip
HANG_SECONDS = 20
"""Longer than a silent start of plain Python on a busy machine."""
SILENT = ("hang", "thread")
"""Failures that only silence reveals."""
SECONDS = 120.0
"""Generous: a busy machine takes longer than the documented 5 s."""


@dataclass
class Lab:
    """A repository with the programs, and the emulated cloud with their pod."""

    home: Path

    def slipway(self, *words: str) -> tuple[int, str, str]:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main.run([*words])
        return code, out.getvalue(), err.getvalue()

    def up(self, program: str, failure: str, worker: int, *more: str) -> "Ended":
        struck = self.home / f"{program}-{failure}-{worker}"
        argv = json.dumps([*PROGRAMS[program], failure, str(worker), str(struck)], separators=(",", ":"))
        limit = HANG_SECONDS if failure in SILENT else "null"
        run = [f"program.command={argv}", f"recovery.hang_timeout_seconds={limit}", *POD, *more]
        code, _, err = self.slipway("up", *run)
        verdicts = json.loads(self.slipway("status", *run, "--json")[1])["run"]["verdicts"]
        return Ended(code, err, verdicts, float(struck.read_text()) if struck.exists() else 0.0)


@dataclass
class Ended:
    """An `up` that has ended."""

    code: int
    err: str
    verdicts: list[dict[str, Any]]
    struck: float


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, emulators: Emulators) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("own_programs")
    home, repository = folder / "home", folder / "repository"
    home.mkdir(mode=0o700)
    shutil.copytree(ROOT / "tests/fixtures/own_programs", repository)
    cloud = emulator.state_folder(str(home))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(repository)
        patch.setenv("SLIPWAY_HOME", str(home))
        patch.setattr(emulator, "run_emulator_verb", emulators.run_emulator_verb)
        with emulator.mark_in_use(cloud):
            yield Lab(home)
        mistakes = internal_errors(cloud)
        status, words = emulator.run_emulator_verb(["wipe"], cloud)
        assert status == 0, words
    assert mistakes == []


VALUE_ERROR = r"ValueError: broken on purpose \((failures.py|<string>):\d+\)"
TRACEBACK = r"Traceback \(most recent call last\):\n(  .*\n)+ValueError: broken on purpose\n"
CELLS = {
    ("exception", 0): ("program_error", VALUE_ERROR, TRACEBACK),
    ("exception", 1): ("program_error", VALUE_ERROR, TRACEBACK),
    ("thread", 1): ("program_error", f"an exception ended a thread of its program; {VALUE_ERROR}", TRACEBACK),
    ("exit", 1): ("program_error", r"its program exited with code 3; about to fail$", "about to fail\n"),
    ("segfault", 1): ("program_error", r"SIGSEGV\)?; in (fail|<module>) \((failures.py|<string>):\d+\)$", "string_at"),
    ("memory", 1): ("out_of_ram", r"MemoryError \((failures.py|<string>):\d+\)$", "\nMemoryError\nto fix: use fewer"),
    ("killed", 1): ("out_of_ram", r"SIGKILL\)?; its kernel killed a process because memory", "about to fail\n"),
    ("hang", 1): ("hung", r"no step and no output for \d+ s", r"\nworker 1: (in fail \(work/failures.py|sh: S)"),
}
"""For each failure on a worker: the verdict, its words, and the last words on the screen."""
SHELL_THREAD = ("program_error", r"its program exited with code 1; broken on purpose$", "about to fail\nbroken on")
"""A script that waits for its background jobs ends with their exit code."""


WIDE = [("exception", 0), ("thread", 1), ("exit", 1), ("killed", 1)]
"""Of each kind of end .ci/run has one; each night has all."""
OTHERS = {
    "jax": [("exception", 1), ("exception", 0), ("segfault", 1)],
    "torch": [("exception", 1), ("segfault", 1)],
    "shell": [("exit", 1), ("thread", 1), ("killed", 1), ("hang", 1)],
}
ROWS = [
    *(pytest.param("plain", *cell, marks=[pytest.mark.wide] * (cell in WIDE)) for cell in CELLS),
    *(
        pytest.param(
            program, *cell, marks=[TORCH] * (program == "torch") + [pytest.mark.wide] * (cell != OTHERS[program][0])
        )
        for program in OTHERS
        for cell in OTHERS[program]
    ),
]
"""The others where a runtime of their own ends them, or waits; what only Python decides, the plain program shows."""


@pytest.mark.parametrize(("program", "failure", "worker"), ROWS)
def test_one_attempt_ends_with_the_worker_and_its_own_words(lab: Lab, program: str, failure: str, worker: int) -> None:
    kind, words, shown = SHELL_THREAD if (program, failure) == ("shell", "thread") else CELLS[failure, worker]
    found = lab.up(program, failure, worker, *(["recovery.policy.hung=give_up"] if failure == "hang" else []))
    [verdict] = found.verdicts
    said, seconds = verdict["message"], verdict["time"] - found.struck
    print(f"\n| {program} | {failure} on {worker} | {verdict['kind']} | {said} | {seconds:.1f} s |")
    assert (found.code, verdict["response"], verdict["kind"]) == (5, "give_up", kind), said
    assert re.search(words, said), said
    assert f"worker {worker}: " in said or kind == "hung"
    assert re.search(shown, found.err), found.err
    assert "[rank" not in found.err
    assert seconds < HANG_SECONDS * (failure in SILENT) + SECONDS


@pytest.mark.parametrize("program", ["plain", pytest.param("torch", marks=[TORCH, pytest.mark.wide])])
def test_a_slow_start_is_no_hang(lab: Lab, program: str) -> None:
    found = lab.up(program, "slow", 1)
    assert (found.code, found.err, found.verdicts) == (0, "", [])

"""What may stand next, without a shell; and real shells, in which Tab and Return are pressed."""

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from controller.cli import main
from controller.cli.completion import MARKER, SHELLS, complete, install, uninstall
from controller.cli.flags import VERBS
from controller.records import index


@pytest.mark.parametrize(
    ("line", "some", "never"),
    [
        ("slipway ", [*VERBS, "+experiment="], ["loop.", "--json"]),
        ("slipway plan --s", ["--save"], ["--json"]),
        ("slipway up --", ["--run", "--yes", "--queue", "--json", "--help"], ["--save"]),
        ("slipway down --yes --", ["--all"], ["--yes"]),
        ("slipway +exp", ["+experiment="], []),
        ("slipway +experiment=quick", ["+experiment=quickstart"], []),
        ("slipway plan loop=gr", ["loop=grpo"], ["loop=lm"]),
        ("slipway +experiment=quickstart loop.st", ["loop.steps="], ["loop.prompts_per_step="]),
        ("slipway +experiment=quickstart optimizer.lr=", ["optimizer.lr=0.0007"], []),
        ("slipway plan cleanup.on_success=k", ["cleanup.on_success=keep"], ["cleanup.on_success=delete"]),
        ("slipway loop=grpo loop.filter_zero_variance_groups=t", ["loop.filter_zero_variance_groups=true"], []),
        ("slipway plan recovery.policy.hung=give", ["recovery.policy.hung=give_up"], []),
        ("slipway plan recovery.no_such=", [], ["recovery.no_such=null"]),
        ("slipway -m +experiment=quickstart optimizer=adamw,mu", ["optimizer=adamw,muon"], []),
        ("slipway -m loop=grpo,dapo loop.kl_e", ["loop.kl_estimator="], []),
        ("slipway 'env.vars={a: b}' tpu.zone", ["tpu.zone="], []),
        ("slipway plan 'env.vars={a: b", [], ["tpu.zone="]),
        ("slipway wrong=thing loop.k", [], []),
        ("slipway localcloud ", ["start", "wipe"], []),
        ("slipway completion ", ["install", "fish"], ["query"]),
        ("slipway exec --worker all -- l", [], ["logs", "loop."]),
        ("slipway", [], []),
        ("", [], []),
    ],
)
def test_lines(line: str, some: list[str], never: list[str], tmp_path: Path) -> None:
    found = list(complete(line, tmp_path))
    assert set(some) <= set(found)
    assert not set(never) & set(found)
    assert not any(word.startswith("hydra") for word in found)


def test_files_of_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "slipway" / "experiment" / "of mine").mkdir(parents=True)
    (tmp_path / "slipway" / "experiment" / "mine.yaml").write_text("# @package _global_\nloop: {my_key: 1}\n")
    assert list(complete("slipway +experiment=mi", tmp_path)) == ["+experiment=mine"]
    assert list(complete("slipway +experiment=mine loop.my", tmp_path)) == ["loop.my_key="]


def test_ids_of_runs_and_sweeps_and_the_verb_says_it_as_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPWAY_HOME", str(tmp_path))
    assert list(complete("slipway up --run ", tmp_path)) == []
    sweeps = {"q-1": "s-1", "q-2": "s-1", "r-3": ""}
    index.append_rows(tmp_path, [{"run": run, "sweep": sweep} for run, sweep in sweeps.items()])
    assert list(complete("slipway up --run ", tmp_path)) == ["r-3", "q-2", "q-1"]
    assert list(complete("slipway logs --run q", tmp_path)) == ["q-2", "q-1"]
    assert list(complete("slipway runs --diff q-1 r", tmp_path)) == ["r-3"]
    assert "r-3" not in complete("slipway runs --diff q-1 q-2 ", tmp_path)
    monkeypatch.setenv("COMP_LINE", "slipway orph")
    assert main.run(["completion", "query"]) == 0
    assert capsys.readouterr().out == f"orphans\t{VERBS['orphans'].help}\n"


PATIENCE = 240.0
"""Seconds after which a shell that does not answer is taken for broken."""


def depends_on(shell: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(shell) is None, reason=f"no {shell} here")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder, and a `slipway` on the path that shows its words and answers the shells for real."""
    program = tmp_path / "bin" / "slipway"
    program.parent.mkdir()
    ask = f'exec {sys.executable} -m controller "$@"'
    program.write_text(f'#!/bin/sh\n[ "$1" = completion ] && {ask}\nprintf "got[%s]" "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("SLIPWAY_HOME", str(tmp_path / "state"))
    for name in ("ZDOTDIR", "XDG_CONFIG_HOME", "INPUTRC"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / ".bashrc").write_text("PS1='ready> '")
    (tmp_path / ".zshrc").write_text("PS1='ready> '\nunsetopt prompt_cr\n")
    return tmp_path


class Keyboard:
    """A shell on a terminal of its own."""

    def __init__(self, argv: list[str], folder: Path) -> None:
        self.end, inner = pty.openpty()
        self.shell = subprocess.Popen(argv, stdin=inner, stdout=inner, stderr=inner, cwd=folder, start_new_session=True)
        os.close(inner)
        self.shown = ""

    def until(self, words: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while words not in self.shown:
            assert time.monotonic() < deadline, self.shown
            if select.select([self.end], [], [], 1.0)[0]:
                self.shown += os.read(self.end, 65536).decode(errors="replace")

    def press(self, keys: str, wanted: str) -> None:
        self.until("ready> ")
        self.shown = ""
        os.write(self.end, keys.encode())
        self.until(wanted)


@pytest.fixture(params=[pytest.param("bash", marks=depends_on("bash")), pytest.param("zsh", marks=depends_on("zsh"))])
def keyboard(request: pytest.FixtureRequest, home: Path) -> Iterator[Keyboard]:
    assert main.run(["completion", "install", request.param]) == 0
    made = Keyboard([request.param, "-i"], home)
    yield made
    made.shell.kill()
    made.shell.wait()
    os.close(made.end)


def test_tab(keyboard: Keyboard) -> None:
    keyboard.press("slipway plan --sa\t\r", "got[plan]got[--save]")
    words = "got[+experiment=quickstart]got[loop.warm_start_steps=3]"
    keyboard.press("slipway +exper\tquicks\t loop.warm_start_st\t3\r", words)
    keyboard.press("slipway -m optimizer=adamw,muo\t\r", "got[optimizer=adamw,muon]")


@depends_on("fish")
def test_fish(home: Path) -> None:
    assert main.run(["completion", "install", "fish"]) == 0
    lines = ["slipway orph", "slipway +experiment=quicks", "slipway +experiment=quickstart loop.warm_start_st"]
    script = "\n".join(f"complete -C '{line}'" for line in lines)
    done = subprocess.run(["fish", "-c", script], cwd=home, capture_output=True, text=True, check=True)
    found = [line.partition("\t")[0] for line in done.stdout.splitlines()]
    assert found == ["orphans", "+experiment=quickstart", "loop.warm_start_steps="]


@pytest.mark.parametrize("shell", SHELLS)
def test_installing_twice_is_installing_once(shell: str, home: Path) -> None:
    before = {file: file.read_text() for file in (home / ".bashrc", home / ".zshrc")}
    done = install(shell, home / "state")
    after = {file: file.read_text() for file in home.rglob("*") if file.is_file()}
    assert any(str(SHELLS[shell].file(home / "state")) in words for words in done)
    again = install(shell, home / "state")
    assert {file: file.read_text() for file in home.rglob("*") if file.is_file()} == after
    assert all("is up to date" in words or "open a new" in words for words in again)
    assert sum(text.count(MARKER) for file, text in after.items() if file in before) == (shell != "fish")
    uninstall(shell, home / "state")
    assert not SHELLS[shell].file(home / "state").exists()
    assert all(file.read_text().rstrip("\n") == text.rstrip("\n") for file, text in before.items())


def test_the_shell_is_the_users_own(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHELL", "/usr/bin/bash")
    assert main.run(["completion", "install"]) == 0
    assert f"changed {home / '.bashrc'}" in capsys.readouterr().out
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    assert main.run(["completion", "install"]) == 2
    assert "shells: bash, zsh, fish" in capsys.readouterr().err
    assert main.run(["completion", "bash"]) == 0
    assert capsys.readouterr().out == SHELLS["bash"].script

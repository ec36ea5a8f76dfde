"""`slipway run -- PROGRAM`: without a config file, and with the verbs that then mean the same run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from controller.cli import main
from controller.core.errors import ConfigError
from tests.controller.conftest import SlipwayCli

FAST = ["--tpu", "v5litepod-8", "cloud=local", "cloud.operation_seconds=0"]
PROGRAM = """
import json, os, sys
print("arguments", sys.argv[1:], os.path.basename(os.getcwd()))
json.dump({"loss": 0.5}, open(os.environ["SLIPWAY_RUN_DIR"] + "/summary.json", "w"))
"""


def with_program(line: str) -> main.Command:
    return main.with_program(main.parse(line.split()))


@pytest.mark.e2e
def test_a_program_runs_once_and_its_words_mean_the_same_run(slipway: SlipwayCli) -> None:
    folder = slipway.repository / "lab"
    folder.mkdir()
    (folder / "train.py").write_text(PROGRAM)
    words = ["lab/train.py", "--note", "a 'b' ${c} {d}"]

    def call(verb: str, *flags: str) -> tuple[int, str, str]:
        code = main.run([verb, *FAST, *flags, "--", "python", *words])
        return code, *slipway.capsys.readouterr()

    code, out, err = call("run")
    assert code == 0, err
    assert """arguments ['--note', "a 'b' ${c} {d}"] work""" in out
    [run] = json.loads(slipway("runs", "--json")[1])
    assert run["run"].startswith("train-")
    assert (run["state"], run["metrics.loss"]) == ("finished", 0.5)
    assert main.run(["status", "--json"]) == 0  # without words: the run that this folder started
    status, before = json.loads(slipway.capsys.readouterr().out), slipway.mutations()
    assert status["run"]["id"] == run["run"]
    code, out, _ = call("run")
    assert (code, slipway.mutations()) == (0, before)
    assert "arguments" not in out
    assert json.loads(call("plan", "--json")[1])["run"] == run["run"]
    (folder / "train.py").write_text(PROGRAM + "# edited\n")
    assert json.loads(call("plan", "--json")[1])["run"] != run["run"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("run", "run: no program; add it: -- python train.py"),
        ("plan --tpu v6e-8", "--tpu: no program"),
        ("run python train.py --lr 1", r"run: the program goes after --: slipway run -- python train.py --lr 1$"),
        ("run --tpu v6e-8 --yes train.py", r"run: the program goes after --: slipway run -- train.py$"),
        ("train.py", "unknown verb 'train.py'; did you mean `slipway run -- train.py …`"),
        ("python train.py", "unknown verb 'python'; did you mean `slipway run -- python …`"),
        ("run --tpu v6e-8 cloud=here -- python -m lab", "--tpu v6e-8: cloud=here runs on this machine; leave --tpu"),
        ("plan cloud=here --zone us-a1-b -- python -m lab.train", "--zone us-a1-b: cloud=here runs on this machine"),
        ("up -- python train.py", "up: takes no command after --; `slipway run` runs a program"),
        ("status -- python train.py", "status: takes no command after --; only run, plan, rehearse, ssh, exec do"),
    ],
)
def test_what_is_no_program_is_said(line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        with_program(line)


def test_words_are_shown_as_the_overrides_that_they_stand_for(capsys: pytest.CaptureFixture[str]) -> None:
    command = with_program("plan --tpu v6e-8 --name try budget.max_usd=5 -- python -m lab.train")
    known = ("program=command", "program.command=[python,-m,lab.train]", "run.name=try", "tpu=v6e_8")
    assert command.overrides[:4] == known
    assert command.overrides[-1] == "budget.max_usd=5"
    assert f"({' '.join(known[:1])} 'program.command=[python,-m,lab.train]'" in capsys.readouterr().err


def test_these_words_fit_a_terminal_of_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    with_program("plan cloud=gcp budget.max_usd=5 budget.max_hours=2 -- python -m lab.train --steps 100")
    err = capsys.readouterr().err
    assert "budget.max_hours=2" in err
    assert "env.requirements names others" in " ".join(err.split())
    assert max(map(len, err.splitlines())) <= 80


def test_packages_that_nobody_named_are_said(capsys: pytest.CaptureFixture[str], slipway: SlipwayCli) -> None:
    with_program("plan -- python -m lab.train")
    assert "the workers get Slipway's own packages" in capsys.readouterr().err
    with_program("rehearse -- python -m lab.train")
    assert "note:" not in capsys.readouterr().err

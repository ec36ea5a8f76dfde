"""Each command of each page and of help is run by a test that reads it from there, or has its proof or its reason."""

import json
import re
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from importlib import import_module
from inspect import signature
from pathlib import Path

import pytest

from controller.emulator import mark_in_use, state_folder
from tests.controller.report.recorded import CASES, SWEEP, edited_record, write_sweep
from tests.docs import commands
from tests.docs.commands import CANNOT, ELSEWHERE, PAGES, PLACEHOLDERS, SESSIONS, Step, commands_on, verb_of
from tests.docs.reader import Reader, as_a_user, reader
from tests.docs.test_proofs import exists
from tests.paths import ROOT
from tests.virtual_time import virtual_time

__all__ = ["reader"]
QUICKSTART = "+experiment=quickstart"
ORDER = (
    *("help", "version", "completion", "localcloud", "init", "plan", "fit", "up", "capacity", "status", "runs"),
    *("report", "tensorboard", "get", "export", "chat", "generate", "run", "rehearse", "logs", "verify", "ssh", "exec"),
    *("forward", "cancel", "stop", "orphans", "down"),
)
"""Verbs of README and help in the order in which the reader tries them."""
SEED_1 = f"slipway {QUICKSTART} loop.steps=300 optimizer.lr=3e-4 run.seed=1"
BEST = f"slipway {QUICKSTART} loop.steps=4 run.name=best 'checkpoint.best={{metric: eval_accuracy, mode: max}}'"
KEPT = "cleanup.on_success=keep run.name=kept -- python train.py"
BEFORE = {
    "get": f"slipway {QUICKSTART}",  # it has finished: the last run of the folder from now on
    "logs": f"slipway run {KEPT}",
    "stop": f"slipway run --tpu v5litepod-8 tpu.capacity=on_demand {KEPT}",
}
"""What is typed before the first command of a verb."""
DIFF = "slipway runs --diff A B"
BUCKET = "gs://slipway-local-slipway-us-central1"


@pytest.mark.parametrize("page", PAGES)
def test_every_command_is_run_or_has_a_proof(page: str) -> None:
    assert page not in SESSIONS or len(commands_on(page)) > 5
    assert commands.unproven(page) == []


def test_a_command_that_nothing_proves_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "```\nslipway plam\nmake all\n```\n- so `gcloud auth\n  list`, or\n"
    text += "   ```sh\n   slipway down   # all\n   ```\n```text\nany output\n```\n`pip --version`"
    monkeypatch.setattr(commands, "steps_on", lambda _: commands.steps_of(text))
    assert commands.unproven("page") == ["slipway plam", "make all", "gcloud auth list", "pip --version"]
    assert commands_on("page")[3] == "slipway down"


def test_what_no_reader_types_is_proven_elsewhere() -> None:
    """The test of a command exists and says its verb or module and its flags; a script says it word by word."""
    there = commands_on(*PAGES)
    assert [words for words in (*PLACEHOLDERS, *ELSEWHERE, *CANNOT) if words not in there] == []
    assert [words for words in ELSEWHERE if words in CANNOT] == []
    for words, proof in ELSEWHERE.items():
        text = (ROOT / proof.partition("::")[0]).read_text()
        if proof.endswith(".py") or "::" in proof:
            assert "/test_" not in proof or exists(proof), f"{words}: {proof}"
            assert [said for said in commands.said_by(words) if said not in text] == [], f"{words}: {proof}"
        else:
            assert words in text or words.replace("-e .", "-e '.[dev]'") in text, words
    named = {name for why in CANNOT.values() for name in re.findall(r"tests/[\w/.]+", why)}
    assert [name for name in named if not (ROOT / name).exists()] == []


class UnderstoodError(Exception):
    """A program has understood its words."""


def test_programs_of_ours_take_the_words_of_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but those that docs/performance.md has of an earlier commit, and those that take none."""
    parse = ArgumentParser.parse_args

    def parse_args(parser: ArgumentParser, given: Sequence[str] | None = None, _: object = None) -> None:
        parse(parser, given)
        raise UnderstoodError

    monkeypatch.setattr(ArgumentParser, "parse_args", parse_args)
    taken: list[str] = []
    for module, *arguments in filter(None, map(commands.module_of, commands_on(*PAGES))):
        file = ROOT / module.replace(".", "/")
        if arguments and (file.is_dir() or file.with_suffix(".py").is_file()):
            monkeypatch.setattr(sys, "argv", [module, *arguments])
            program = import_module(f"{module}.__main__" if file.is_dir() else module)
            with pytest.raises(UnderstoodError):
                program.main(*([arguments] if signature(program.main).parameters else []))
            taken.append(module)
    assert len(taken) > 12


@pytest.mark.e2e
@pytest.mark.deep
def test_the_first_command_keeps_its_promise(tmp_path: Path) -> None:
    """The quick start as a user types it: nothing is smaller, and nothing is forked."""
    assert all(commands_on(page)[0] == f"slipway {QUICKSTART}" for page in ("README.md", "--help"))
    environment = as_a_user(tmp_path)

    def types(*words: str) -> str:
        argv = [sys.executable, "-m", "controller", *words]
        done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    try:
        types(QUICKSTART)
        [row] = json.loads(types("runs", "--json"))
    finally:
        types("localcloud", "wipe", "--yes")
    assert row["metrics.accuracy_before"] < 0.8
    assert row["metrics.accuracy_after"] > 0.9


@pytest.mark.e2e
@pytest.mark.deep
def test_your_program(reader: Reader) -> None:
    for step in commands.session_of("docs/your-program.md"):
        reader.does(step)
    rehearsed = [out for words, out in reader.said.items() if words.startswith("slipway rehearse")]
    assert len(rehearsed) == 2
    assert all("preempted" in out and "✓ no billed resource is left" in out for out in rehearsed)


@pytest.mark.e2e
@pytest.mark.deep
def test_the_tutorial(reader: Reader) -> None:
    said = reader.said
    for step in commands.session_of("docs/tutorial.md"):
        if step.words == DIFF:
            ids = [str(reader.finished(name)[0]["run"]) for name in ("quickstart", "sums")]
            reader.stands_for[DIFF] = f"slipway runs --diff {' '.join(ids)}"
        reader.does(step)
    assert "finished after" in said[f"slipway {QUICKSTART}"]
    assert "quickstart-" in said["slipway runs"]
    page = re.search(r"\S+\.html", said["slipway report"])
    assert page
    assert Path(page[0]).is_file()
    assert "+ create" in said[f"slipway plan {QUICKSTART} loop.group_size=4 run.seed=1"]
    assert "data.largest_first" in said[DIFF]
    finished = reader.finished("quickstart")
    assert len(finished) == 6  # one of the sweep is the run of step 1
    assert len([row for row in finished if row.get("sweep")]) == 5
    assert "already finished" in reader.types("slipway +experiment=sums")


@pytest.mark.e2e
@pytest.mark.deep
@pytest.mark.longest
def test_readme_and_help(reader: Reader) -> None:
    """Every command that no other page has, the verbs in an order that makes sense."""
    of_others = [Step(words) for words in commands.of_the_others() if verb_of(words) in commands.OF_A_POLICY]
    steps = [*commands.session_of("README.md"), *commands.session_of("--help"), *of_others]
    reader.stands_for |= {
        SEED_1: BEST,
        "run.seed=0,1,2": "run.seed=0",
        "gs://my-bucket/model": f"{BUCKET}/model",
        "gs://my-bucket/weights": f"{BUCKET}/weights",
        "slipway export RUN --best --to ./model": "slipway export RUN --best --to ./best",
        "slipway export RUN --to gs://my-bucket/model --dtype bfloat16": (
            f"slipway export RUN --to {BUCKET}/latest --dtype bfloat16"
        ),
        "state=running": "name=quickstart",
        "slipway logs --worker 3 --follow +experiment=gemma2b_gsm8k": "slipway logs --worker 0 --follow",
    }
    for name in ("asked", "questions"):
        Path(f"{name}.jsonl").write_text('{"prompt": "1+2="}\n')
    verb = ""
    for step in sorted(steps, key=lambda step: ORDER.index(verb_of(step.words))):
        if verb_of(step.words) != verb:
            verb = verb_of(step.words)
            if verb == "status":
                row = next(row for row in reader.finished("quickstart") if row.get("sweep"))
                reader.stands_for |= {"quickstart-0b1c2d3e": str(row["run"]), "quickstart-5f0c": str(row["sweep"])}
            if verb in BEFORE:
                reader.types(BEFORE[verb])
        reader.does(step)
        if step.words == SEED_1:
            [best] = (str(row["run"]) for row in reader.finished("best"))
            reader.stands_for |= {"ID": best, "RUN": best, "quickstart-f9ce2387": best}


@pytest.mark.e2e
def test_the_other_pages(reader: Reader, tmp_path: Path) -> None:
    """Every command that only pages without a session have, and that neither trains nor rents, in virtual time."""
    with mark_in_use(state_folder(str(reader.home))), virtual_time(tmp_path / "time"):
        typed = [words for words in commands.of_the_others() if commands.is_typed(words)]
        assert len(typed) > 50
        for words in sorted(typed, key=when):
            if when(words) >= ORDER.index("status") and not reader.stands_for.get("ID"):
                a_run_and_a_sweep(reader)
            reader.types(words)


def when(words: str) -> int:
    """Return the place of a command among the others; one that shows a run comes after it."""
    return ORDER.index("status" if "--run" in words else "down" if "localcloud " in words else verb_of(words))


def a_run_and_a_sweep(reader: Reader) -> None:
    """Run the reader's program on a pod that is kept, and put a sweep on record."""
    reader.types(f"slipway run --tpu v5litepod-8 {KEPT}")
    [kept] = (str(row["run"]) for row in reader.finished("kept"))
    for run in write_sweep(reader.home):
        with edited_record(reader.home, run) as document:
            document["config"]["sweep"]["cases"] = {"plain": CASES[0]}
    names = {"ID": kept, "RUN": kept, "quickstart-f9ce2387": kept, "N": "0", "2": "0", "3": "0"}
    sweeps = dict.fromkeys(("grpo_ablations", "trm_lr", "nash_residuals"), "quickstart")
    reader.stands_for |= {**names, **sweeps, "quickstart-5f0c": SWEEP, "loop.kl_coef=0": "plain"}
    reader.stands_for |= {"eval_exact_accuracy": "eval_accuracy", "htop": "nproc"}

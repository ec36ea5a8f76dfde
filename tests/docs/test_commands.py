"""Each command of README, help, tutorial, first run and your-program is run by a test that reads it from the page."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.commands import CI, ELSEWHERE, SESSIONS, commands_on, session_of, unproven, verb_of
from tests.docs.reader import Reader, as_a_user, reader
from tests.docs.test_proofs import exists
from tests.paths import ROOT

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


@pytest.mark.parametrize("page", SESSIONS)
def test_every_command_is_run_or_has_a_proof(page: str) -> None:
    assert len(commands_on(page)) > 5
    assert unproven(commands_on(page)) == []
    assert unproven(["slipway plam", "gcloud auth login"]) == ["slipway plam", "gcloud auth login"]


def test_what_no_session_runs_is_proven_elsewhere() -> None:
    assert ELSEWHERE.keys() <= {words for page in SESSIONS for words in commands_on(page)}
    script = (ROOT / CI).read_text()
    for words, proof in ELSEWHERE.items():
        if proof == CI:
            assert words in script or words.replace("-e .", "-e '.[dev]'") in script, words
        else:
            assert exists(proof), f"{words}: {proof}"


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
    for step in session_of("docs/your-program.md"):
        reader.does(step)
    rehearsed = [out for words, out in reader.said.items() if words.startswith("slipway rehearse")]
    assert len(rehearsed) == 2
    assert all("preempted" in out and "✓ no billed resource is left" in out for out in rehearsed)


@pytest.mark.e2e
@pytest.mark.deep
def test_the_tutorial(reader: Reader) -> None:
    said = reader.said
    for step in session_of("docs/tutorial.md"):
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
    steps = [*session_of("README.md"), *session_of("--help")]
    reader.stands_for |= {
        SEED_1: BEST,
        "run.seed=0,1,2": "run.seed=0",
        "gs://my-bucket/model": "gs://slipway-local-slipway-us-central1/model",
        "state=running": "name=quickstart",
        "slipway logs --worker 3 --follow +experiment=gemma2b_gsm8k": "slipway logs --worker 0 --follow",
    }
    Path("asked.jsonl").write_text('{"prompt": "1+2="}\n')
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
            reader.stands_for |= {"ID": best, "quickstart-f9ce2387": best}

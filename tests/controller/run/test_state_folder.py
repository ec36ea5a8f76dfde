"""The laptop's own folder is best effort: a run goes on and its verdict counts, whatever happens to it meanwhile."""

import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from controller.cli import main
from controller.cli.flags import VERBS
from controller.records import index
from controller.recovery.responses import Verdict, VerdictKind
from controller.resources.machines import ThisMachine
from controller.resources.pod import capacity_log
from controller.run.attempt import AttemptResult, AttemptRunner
from tests.controller.run.test_damaged_objects import NODE, OpenedRun, begin, ended, opened
from tests.fakes.disks import DAMAGES, ERRORS, damaged, notes_of
from tests.golden import golden

find = ThisMachine.find
WAYS = [*DAMAGES, *ERRORS]
OFTEN = ("garbage", "full")
QUIET = ("garbage", "cut short", "empty", "other json", "nested")
"""Damages of what is only read again by later commands; new notes follow what they left."""


def state_of(run: OpenedRun) -> Path:
    return run.context.state_dir


def attempt_with(damage: Callable[[], object]) -> Callable[[AttemptRunner], AttemptResult]:
    """An attempt during which that happens; then it goes on, with metrics, notes and requests, to its end."""

    def attempt(runner: AttemptRunner) -> AttemptResult:
        now = begin(runner)
        runner.context.events.emit("metrics", "run", metrics={"step": 1})
        damage()
        for step in (2, 3):
            runner.context.events.emit("metrics", "run", metrics={"step": step})
            runner.context.events.note("run", f"step {step}")
        runner.spending.close_billing("stopped")
        runner.spending.open_billing(NODE)
        return ended(Verdict(VerdictKind.FINISHED), now)

    return attempt


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenedRun]:
    with opened(tmp_path, monkeypatch) as opened_run:
        yield opened_run


@pytest.mark.parametrize("how", WAYS)
def test_a_run_goes_on_and_its_result_counts(how: str, run: OpenedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as later:
        damage = attempt_with(lambda: later.enter_context(damaged(state_of(run), how)))
        monkeypatch.setattr(AttemptRunner, "run", damage)
        result = run.drive()
    assert result
    assert (result, result.summary) == (run.ledger.result(), {"loss": 1.5})
    assert run.screen.shown == [result]
    assert {"step 2", "step 3"} < {*run.screen.said}
    [row] = index.list_published_rows(run.context.google, run.plan.bucket)
    assert row["state"] == "finished"
    said = run.told("warning")
    assert all(str(state_of(run)) in note and "the run goes on" in note for note in said), said
    assert len(said) == len({*said})
    if how in ERRORS and how != "not ours":
        assert len(said) == 1, "of the disk, once"
    assert said or how in QUIET


@pytest.mark.parametrize("how", ["full", "read-only", "files in place of folders", "garbage"])
def test_a_run_begins_and_ends_without_notes(how: str, run: OpenedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    (state_of(run) / "runs" / run.plan.run_id).mkdir(parents=True)
    for name in (f"runs/{run.plan.run_id}/events.jsonl", "runs/index.jsonl", "machine"):
        (state_of(run) / name).write_text("")
    monkeypatch.setattr(AttemptRunner, "run", attempt_with(lambda: None))
    with damaged(state_of(run), how):
        assert run.drive() == run.ledger.result() is not None


def test_what_was_deleted_begins_anew(run: OpenedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    damage = attempt_with(lambda: DAMAGES["deleted"](state_of(run)))
    monkeypatch.setattr(AttemptRunner, "run", damage)
    assert run.drive()
    folder = state_of(run) / "runs" / run.plan.run_id
    assert "step 3" in (folder / "events.jsonl").read_text()
    assert [row["state"] for row in index.load_rows(state_of(run))] == ["finished"]
    assert any(f"{folder / 'told.jsonl'} was deleted" in note for note in run.told("warning"))


WORDS: dict[str, list[list[str]]] = {
    "status": [["status"], ["status", "--run", "RUN"], ["status", "--json", "--run", "RUN"]],
    "runs": [["runs"], ["runs", "--json"], ["runs", "--csv"], ["runs", "--refresh"], ["runs", "--last", "1"]],
    "plan": [["plan"]],
    "doctor": [["doctor"]],
    "capacity": [["capacity"]],
    "report": [["report", "RUN", "-o", "OUT"]],
    "logs": [["logs"], ["logs", "--run", "RUN"]],
    "get": [["get", "RUN", "--list"], ["get", "RUN", "--to", "GOT"]],
    "verify": [["verify", "--run", "RUN"]],
    "cancel": [["cancel", "--yes", "--run", "RUN"]],
    "down": [["down", "--yes", "--run", "RUN"]],
    "stop": [["stop", "--yes", "--run", "RUN"]],
    "orphans": [["orphans"]],
    "completion": [["completion", "bash"]],
    "version": [["version"]],
    "help": [["help", "up"]],
    "exec": [["exec", "--run", "RUN", "--", "true"]],
    "export": [["export", "RUN", "--to", "EXPORTED"]],
    "chat": [["chat", "RUN"]],
    "generate": [["generate", "RUN", "--prompt", "x"]],
}
"""Command lines of each verb; the run has no checkpoint, so some are refused, in words."""
ELSEWHERE = {"up", "run", "fit", "rehearse", "tensorboard", "ssh", "forward", "init", "witness", "localcloud"}
"""Those that drive runs, as above, or that start programs, a terminal or a cloud."""


def test_each_verb_is_tried() -> None:
    assert WORDS.keys() | ELSEWHERE == VERBS.keys()


OF_NOTES = {"runs", "report"}
"""Verbs that tell what this machine's notes hold: their verdict may be another one without these."""
NO_NOTES = "error: no runs are recorded on this machine; `--refresh cloud=…` reads the bucket's"


def verdicts(run: OpenedRun, capsys: pytest.CaptureFixture[str], names: dict[str, str]) -> dict[str, tuple[int, str]]:
    """Run each line; return its exit code and what it says on stderr."""
    found = dict[str, tuple[int, str]]()
    for line in itertools.chain(*WORDS.values()):
        words = [names.get(word, word) for word in line]
        takes_config = VERBS[line[0]].config and "--run" not in line
        at = words.index("--") if "--" in words else len(words)
        words[at:at] = run.options.overrides if takes_config else ["cloud=here"] if "--run" in line else []
        code = main.run(words)
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err, words
        found[" ".join(line)] = code, err
    return found


@pytest.mark.parametrize("how", [pytest.param(how, marks=() if how in OFTEN else pytest.mark.deep) for how in WAYS])
def test_every_verb_survives(
    how: str, run: OpenedRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(AttemptRunner, "run", attempt_with(lambda: None))
    index.save_last_command(index.LastCommand(run.options.overrides), Path.cwd())
    assert run.drive()
    code = run.plan.snapshot
    run.context.google.upload(run.plan.bucket, f"code/{code.sha256}.tar.gz", code.archive)
    names: Any = {"RUN": run.plan.run_id, "OUT": str(tmp_path / "report.html"), "GOT": str(tmp_path / "got")}
    assert notes_of(state_of(run))
    monkeypatch.setattr(ThisMachine, "find", find)
    expected = verdicts(run, capsys, names)
    shutil.rmtree(state_of(run) / "code", ignore_errors=True)  # verbs that only look do not unpack it
    shutil.rmtree(tmp_path / "got")
    with damaged(state_of(run), how):
        found = verdicts(run, capsys, names)
    for line, (code, err) in found.items():
        if line.split()[0] in OF_NOTES:
            assert code in (0, 1, 2), (line, err)
        else:
            assert code == expected[line][0], (line, err)
        new = err.count("\n") - expected[line][1].count("\n")
        assert new <= 2, (line, err)
        assert new <= 0 or str(state_of(run)) in err or err.startswith(NO_NOTES), (line, err)


@pytest.mark.parametrize("how", ["full", "read-only", "not ours"])
@pytest.mark.parametrize(("verb", "told"), [("runs", "other-0123abcd"), ("capacity", "us-central1-a")])
def test_what_the_bucket_has_is_shown_though_this_machine_cannot_keep_it(
    verb: str, told: str, how: str, run: OpenedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    google, bucket, entry = run.context.google, run.plan.bucket, golden("capacity")
    index.publish_row(google, bucket, {"run": "other-0123abcd", "state": "finished", "created": 1.0})
    text = json.dumps(entry | {"zone": "us-central1-a"})
    google.upload(bucket, f"{capacity_log.PREFIX}{entry['id']}", b"", metadata={"entry": text})
    words = [verb, *(["--days", "3650"] if verb == "capacity" else []), "--refresh", *run.options.overrides]
    with damaged(state_of(run), how):
        assert main.run(words) == 0
    said = capsys.readouterr()
    assert told in said.out
    [line] = said.err.splitlines()
    assert str(state_of(run)) in line
    assert "not kept on this machine" in line

"""The record of a run, and a run from its record: on the emulated cloud, with a program that echoes."""

import json
import os
import shutil
from pathlib import Path

import pytest

from controller.cli import main
from controller.records import index
from tests.controller.conftest import SlipwayCli
from tests.controller.inputs.wheels import git, git_repository
from tests.golden import golden

pytestmark = pytest.mark.e2e
SAYS = 'program.command=[sh,-c,"cat train.py new.py"]'


@pytest.mark.deep
def test_a_run_leads_back_to_what_made_it_and_is_repeated_in_a_clone(slipway: SlipwayCli, tmp_path: Path) -> None:
    root = slipway.repository
    commit = git_repository(root, {"train.py": "lr = 1\n", "old.py": "gone\n", ".gitignore": "out/\n"})
    (root / "train.py").write_text("lr = 2\n")
    (root / "new.py").write_text("untracked\n")
    (root / "old.py").unlink()
    about = (("status", "--porcelain"), ("rev-parse", "HEAD"), ("diff", "--cached"))
    before = [git(root, *words) for words in about]
    code, out, err = slipway("up", SAYS)
    assert (code, err) == (0, "")
    assert "lr = 2" in out
    assert [git(root, *words) for words in about] == before
    [run] = [row["run"] for row in index.load_rows(slipway.home)]
    document = json.loads((slipway.home / "runs" / run / "record.json").read_text())
    assert set(document) == set(golden("record"))
    assert document["overrides"] == slipway.line(SAYS)
    assert document["git"]["commit"] == commit
    assert document["worker_0"]["packages"]["pytest"]
    assert git(root, "for-each-ref", "--format=%(refname)", "refs/runs") == ""
    requests = (slipway.home / "runs" / run / "requests.jsonl").read_text().splitlines()
    called = {f"{call['api']} {call['method']}" for call in map(json.loads, requests)}
    assert "tpu projects.locations.queuedResources.create" in called
    assert not any("ssh-rsa" in line or "ssh-ed25519" in line for line in requests)
    objects = json.dumps(slipway.cloud().get("state")["objects"])
    for name in ("record.json", "plan.yaml", "run.yaml", "git.json", "diff.patch", "events/", "requests/"):
        assert f"runs/{run}/{name}" in objects, name
    finished = slipway.json("status", "--run", run)
    assert (finished["run"]["id"], finished["run"]["state"]) == (run, "finished")

    clone = tmp_path / "clone"
    git(tmp_path, "clone", "--quiet", str(root), str(clone))
    os.chdir(clone)
    assert (clone / "train.py").read_text() == "lr = 1\n"
    code, out, err = slipway("up", "--run", run)
    assert (code, err) == (0, "")
    assert "lr = 2\n" in out
    assert "untracked" in out
    again = json.loads((slipway.home / "runs" / f"{run}-r1" / "record.json").read_text())
    assert again["repeats"] == run
    for same in ("config", "code_sha256", "overrides", "git", "requirements"):
        assert again[same] == document[same], same
    _, out, _ = slipway("up", "--run", run)
    assert f"{run}-r1 has already finished; nothing was changed" in out
    for words, said in (
        ((run, "run.seed=3"), "overrides cannot change what a recorded run computes"),
        (("nobody-00000000",), "no such run on this machine or in gs://"),
    ):
        code, _, err = slipway("up", "--run", *words)
        assert (code, said in err) == (2, True)
    (slipway.home / "runs" / run / "record.json").unlink()  # another machine knows it from the bucket
    assert slipway.json("status", "--run", run)["run"]["state"] == "finished"


@pytest.mark.deep
def test_another_machine_reads_the_table_from_the_bucket_and_what_differs(slipway: SlipwayCli) -> None:
    summary = "echo '{\"acc\": %s}' > $SLIPWAY_RUN_DIR/summary.json\n"
    words = ["program.command=[sh,run.sh]", "tpu.accelerator_type=v5litepod-1", "cleanup.on_success=keep"]
    runs = []
    for acc, seed in ((0.5, 1), (0.75, 2)):
        (slipway.repository / "run.sh").write_text(summary % acc)
        assert slipway("up", *words, f"run.seed={seed}")[0] == 0
        runs.append(index.load_rows(slipway.home)[-1]["run"])
    shutil.rmtree(slipway.home / "runs")
    assert slipway("runs")[1] == "no runs\n"
    code, out, err = slipway("runs", "--refresh", "--sort", "metrics.acc", "--json")
    assert (code, err) == (0, "")
    rows = json.loads(out)
    assert [(row["run"], row["state"], row["metrics.acc"]) for row in rows] == [
        (run, "finished", acc) for run, acc in zip(runs, (0.5, 0.75), strict=True)
    ]
    assert slipway.json("runs", "--refresh", "--last", "1")[0] == rows[1]  # nothing is added twice
    found = slipway.json("runs", "--diff", *runs)
    assert found["config"] == {"run.seed": [1, 2]}
    assert set(found["code"]) == {"sha256"}
    assert found["result"]["metrics.acc"] == [0.5, 0.75]
    code, out, _ = slipway("runs", "--diff", *runs)
    assert out.startswith(f"- {runs[0]}\n+ {runs[1]}\n\nconfig\n  run.seed: 1 -> 2\n")
    assert slipway("runs", "--diff", runs[0], "nobody-00000000")[0] == 2


def test_a_failed_run_of_code_without_git_is_on_record_all_the_same(slipway: SlipwayCli) -> None:
    assert slipway("up", 'program.command=[sh,-c,"exit 7"]')[0] == 5
    [row] = index.load_rows(slipway.home)
    assert (row["state"], row["commit"], "worker" in row["reason"]) == ("failed", None, True)
    assert row["seconds"] >= 0


def test_a_plan_is_saved_committed_and_planned_again(slipway: SlipwayCli) -> None:
    words = ['program.command=["true"]', "run.name=kept"]
    planned = slipway.json("plan", "--save", *words, "run.seed=5")["run"]
    file = slipway.repository / "plans" / f"{planned}.yaml"
    assert str(slipway.home) not in file.read_text()
    ids = []
    for more in ([], ["run.seed=6"]):
        assert main.run(["plan", "--json", "--plan", str(file), *more]) == 0
        ids.append(json.loads(slipway.capsys.readouterr().out)["run"])
    assert ids[0] == planned != ids[1], "the file itself is not shipped"
    assert main.run(["plan", "--plan", "nothing.yaml"]) == 2
    assert "--plan nothing.yaml: No such file" in slipway.capsys.readouterr().err

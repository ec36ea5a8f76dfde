"""The record of a run: written on the emulated cloud, read whole or damaged; damaged pod times count as spent."""

import json
import os
import shutil
import time
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from conf.schema.config import Config
from controller.cli import main
from controller.context import SurplusSlice
from controller.core.json_documents import DamagedRecordError
from controller.core.local_notes import LocalNotes
from controller.core.this_process import Clock, boot_time
from controller.gcp.folder_store import FolderClient
from controller.gcp.google_errors import GoogleError
from controller.records import index
from controller.records.ledger import UNKNOWN_POD, Launch, Ledger, Result, record_cancellations
from controller.records.spending import Account, PodLifetime, Spending, close_billing, read_limit, write_limit
from controller.recovery.responses import Incident
from controller.resources.pod.provisioner import Place, SliceSpec, SliceStatus, pod_object
from controller.run.options import RunOptions
from tests.controller.conftest import SlipwayCli
from tests.controller.inputs.wheels import git, git_repository
from tests.fakes.clock import ManualClock
from tests.golden import golden

RUN = "runs/r-1"
GARBAGE = ["", "{", "[]", '{"attempt": 1}', '{"format": 1}', '{"format": 1, "attempt": {}, "run_id": 3}', "\udcff"]


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(FolderClient(Clock()), str(tmp_path), "r-1")


def put(tmp_path: Path, name: str, text: str) -> None:
    file = tmp_path / RUN / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(text.encode(errors="surrogateescape"))


@pytest.mark.parametrize("garbage", GARBAGE)
def test_what_is_damaged_is_named(ledger: Ledger, tmp_path: Path, garbage: str) -> None:
    """A launch keeps its number, an incident is left out, and a result is an error."""
    assert ledger.record_launch(Launch(2, "pod", 10.0))
    for name in ("launches/0001.json", "verdicts/0001.json", "result.json"):
        put(tmp_path, name, garbage)
    put(tmp_path, "launches/notes.txt", "somebody else's")
    for _ in range(2):
        first, second = ledger.launches()
    assert (first.attempt, first.node_uid, second) == (1, UNKNOWN_POD, Launch(2, "pod", 10.0))
    assert first.time == pytest.approx((tmp_path / RUN / "launches/0001.json").stat().st_mtime, abs=1)
    [launch] = ledger.problems
    ledger.report(here := "/home/me/.slipway/runs/r-1/record.json is damaged: no JSON")
    assert ledger.problem_urls == [f"{tmp_path}/{launch}", here]
    ledger.incidents(Incident.from_json)
    ledger.add_incident(Incident(1, "preempted", "gone", "replace_node", None, 1.0).to_json())
    assert [incident.kind for incident in ledger.incidents(Incident.from_json)] == ["preempted"]
    told = [problem.partition(" is damaged: ")[0] for problem in ledger.problems if problem != here]
    assert told == [f"{RUN}/launches/0001.json", f"{RUN}/verdicts/0001.json"]
    with pytest.raises(DamagedRecordError, match=rf"{RUN}/result\.json is damaged: "):
        ledger.result()


def test_a_result_is_read_as_written_and_a_later_format_is_not_damaged(ledger: Ledger, tmp_path: Path) -> None:
    result = Result("r-1", "finished", 2, 20.0, 10.0, {"loss": 1.0}, "keep")
    assert ledger.result() is None
    ledger.record_result(result)
    ledger.record_result(Result("r-1", "finished", 3, 30.0, 20.0))
    assert ledger.result() == result
    put(tmp_path, "launches/0001.json", '{"format": 99, "attempt": 1}')
    [launch] = ledger.launches()
    assert (launch.attempt, launch.node_uid) == (1, UNKNOWN_POD)
    assert "99" in ledger.problems[0]


BEGAN, WRITTEN, ENDED = 1_700_000_000, 1_700_007_200, 1_700_010_800


@pytest.fixture
def pods(tmp_path: Path) -> Path:
    (folder := tmp_path / "runs/r-1/pods").mkdir(parents=True)
    life = PodLifetime("uid-2", "pod", "v6e-1", "us-east5-b", "spot", 2.0, WRITTEN, ENDED, "finished")
    (folder / f"{life.key}.json").write_text(json.dumps(life.to_json()))
    return folder


@cache
def budgeted(budget: str) -> Config:
    return RunOptions(("+experiment=quickstart", "cloud=local", "budget.usd_per_hour=3", budget)).config()[0]


def spending(folder: Path, account: Account | None = None, run: str = "r-1", budget: str = "max_hours=2.5") -> Spending:
    return Spending(FolderClient(Clock()), Clock(), str(folder), run, budgeted(f"budget.{budget}"), account)


def test_it_counts_from_the_time_in_its_name_to_its_last_write(pods: Path, tmp_path: Path) -> None:
    damaged = pods / f"abc-{BEGAN}.json"
    damaged.write_text("{")
    os.utime(damaged, (WRITTEN, WRITTEN))
    account = spending(tmp_path)
    assert [life.hours(ENDED) for life in account.lifetimes()] == [2.0, 1.0]
    assert account.usage().usd == 2 * 3.0 + 1 * 2.0
    assert "have run for 3.00 h" in account.budget_exceeded()
    assert "is damaged" in account.lifetimes()[0].why
    damaged.rename(pods / "notes.json")  # no time in its name: left out, and named
    account = spending(tmp_path)
    assert account.usage().hours == 1.0
    [problem] = account.problems
    assert "pods/notes.json is damaged" in problem


def test_a_slice_that_was_given_back_counts_against_the_budget(pods: Path, tmp_path: Path) -> None:
    account = spending(tmp_path)
    began = account._clock.now() - 7200
    account.add_surplus(SurplusSlice("uid-7", "pod", "v6e-1", "us-east5-b", "spot", began))
    [_, surplus] = spending(tmp_path).lifetimes()  # the next controller knows it too
    assert surplus.hours(0.0) == pytest.approx(2.0, abs=0.01)
    assert (surplus.uid, surplus.usd_per_hour) == ("uid-7", 3.0)
    assert surplus.why == "given back: another place was first"
    assert "have run for 3.00 h" in account.budget_exceeded()


def test_the_wait_in_a_queue_is_not_billed(tmp_path: Path) -> None:
    account = spending(tmp_path)
    now = account._clock.now()
    spec = SliceSpec(workers=1, accelerator_type="v6e-1", runtime_version="", network="", external_ip=False)
    status = SliceStatus(spec=spec, place=Place("us-east5-b", "spot", ""), state="READY", uid="u", created=now - 36000)
    assert status.billed_since == now - 36000  # where nothing else is known
    node: Any = SimpleNamespace(name="pod", place=status.place, status=replace(status, running_since=now - 3600))
    account.open_billing(node)
    assert account.usage().hours == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("off", [0.0, 7200.0, -7200.0])
def test_the_limit_of_a_pod_is_told_by_the_clock_of_the_bucket(
    off: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    google, pod = FolderClient(ManualClock(time.time() + off)), cast(Any, SimpleNamespace)
    node = pod(name="pod", status=pod(uid="uid-9"))
    write_limit(google, str(tmp_path), node, "r-1", 3600.0)
    left = partial(read_limit, google, str(tmp_path), "pod", "uid-9")
    assert left("r-1") == pytest.approx(3600.0, abs=60.0)
    later = boot_time() + 7200.0
    with monkeypatch.context() as patch:
        patch.setattr("controller.gcp.folder_store.boot_time", lambda: later)
        assert left("r-1") == pytest.approx(-3600.0, abs=60.0), "overdue"
    assert left("r-2") is None, "another run had the pod"
    for seconds in (None, "soon"):
        write_limit(google, str(tmp_path), node, "r-1", cast(Any, seconds))
        assert left("r-1") is None
    google.upload(str(tmp_path), pod_object("limits", "pod", "uid-9"), b"", metadata={"limit": "{"})
    assert left("r-1") is None
    assert read_limit(google, str(tmp_path), "pod", "uid-7", "r-1") is None


@pytest.mark.parametrize("said", ['"time": 1', '"time": 9e9', '"time": "x"', '"other": 0'])
def test_a_pod_that_deleted_itself_is_billed_until_its_note_was_written(said: str, tmp_path: Path) -> None:
    """Whatever time its worker takes it for."""
    account = spending(tmp_path)
    began, written = account._clock.now() - 7200.0, account._clock.now() - 3600.0
    account._write(PodLifetime("uid-9", "pod", "v6e-1", "us-east5-b", "spot", 2.0, began))
    note = tmp_path / pod_object("ends", "pod", "uid-9")
    note.parent.mkdir(parents=True, exist_ok=True)
    note.write_text(f'{{"format": 1, {said}, "reason": "idle"}}')
    os.utime(note, (written, written))
    account.close_lost("")
    [life] = account.lifetimes()
    assert (life.ended, life.why) == (pytest.approx(written, abs=1.0), "idle")


@pytest.mark.parametrize("text", ["{", '{"format": 1}', '{"format": 1, "latest": 3}'])
def test_a_pod_whose_claim_is_damaged_can_be_deleted_all_the_same(tmp_path: Path, text: str) -> None:
    claim = tmp_path / pod_object("claims", "pod", "uid-9")
    claim.parent.mkdir(parents=True)
    claim.write_text(text)
    said: list[str] = []
    events = SimpleNamespace(note=lambda subject, message: said.append(message))
    context: Any = SimpleNamespace(google=FolderClient(Clock()), clock=Clock(), events=events)
    node: Any = SimpleNamespace(id="node/pod", name="pod", status=SimpleNamespace(uid="uid-9"))
    close_billing(context, str(tmp_path), cast(Any, None), node, "deleted by down")
    [message] = said
    assert message.startswith(f"warning: {claim} is damaged: ")
    assert message.endswith("; the end of the pod's time is not on record")


def test_a_budget_limits_all_pods_of_a_run_together(pods: Path, tmp_path: Path) -> None:
    own = spending(tmp_path)
    now = own._clock.now()
    (others := tmp_path / "runs/r-1-sampler-1/pods").mkdir(parents=True)
    beside = PodLifetime("uid-3", "pod-sampler-1", "v6e-1", "us-east5-b", "spot", 4.0, now - 3600, now, "finished")
    (others / f"{beside.key}.json").write_text(json.dumps(beside.to_json()))
    account = Account(pods=2, usd_per_hour=7.0)
    parts = [spending(tmp_path, account, run) for run in ("r-1", "r-1-sampler-1", "r-1-sampler-2")]
    assert (parts[0].usage().hours, parts[1].usage().hours) == (1.0, 1.0)
    assert (account.usage().hours, account.usage().usd) == (2.0, 2.0 + 4.0)
    assert all(part.hours_left() == pytest.approx(0.25) for part in parts), "two pods share what is left of 2.5 hours"
    assert own.hours_left() == pytest.approx(1.5)
    assert parts[0].budget_exceeded() == ""
    node: Any = SimpleNamespace(name="pod-sampler-2", status=SimpleNamespace(uid="uid-4"))
    node.status.billed_since, node.status.spec = now - 3600, SimpleNamespace(accelerator_type="v6e-1")
    node.place = SimpleNamespace(zone="us-east5-b", capacity="spot")
    parts[2].open_billing(node)
    assert all("have run for 3.00 h" in part.budget_exceeded() for part in parts)
    in_dollars = spending(tmp_path, Account(pods=2, usd_per_hour=7.0), budget="max_usd=16")
    assert in_dollars.hours_left() == pytest.approx((16 - 2) / 7), "as long as all pods are billed"


def test_an_account_can_be_read_in_an_outage(pods: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The account of a run of samplers is read by the trainer's controller as well."""
    account = spending(tmp_path)
    assert account.usage().hours == 1.0

    def fail(*_: Any) -> Any:
        raise GoogleError("storage objects.list", 503, "UNAVAILABLE", "backend error")

    with monkeypatch.context() as outage:
        outage.setattr(Spending, "_read_all", fail)
        with pytest.raises(GoogleError):
            account.reload()
    assert account.usage().hours == 1.0
    other = spending(tmp_path)
    other.add_surplus(SurplusSlice("uid-7", "pod", "v6e-1", "us-east5-b", "spot", account._clock.now() - 7200))
    account.reload()
    assert round(account.usage().hours, 2) == 3.0


SAYS = 'program.command=[sh,-c,"cat train.py new.py"]'


@pytest.mark.e2e
@pytest.mark.deep
def test_a_run_leads_back_to_what_made_it_and_is_repeated_in_a_clone(slipway: SlipwayCli, tmp_path: Path) -> None:
    root = slipway.repository
    commit = git_repository(root, {"train.py": "lr = 1\n", "old.py": "gone\n", ".gitignore": "out/\n"})
    (root / "train.py").write_text("lr = 2\n")
    (root / "new.py").write_text("untracked\n")
    (root / "old.py").unlink()
    (root / "lib").mkdir()
    (root / "lib/near.py").touch()
    (root / "linked").symlink_to("lib")
    (root / "out").mkdir()
    (root / "out/x").touch()
    left_out = {"old.py": "deleted here, tracked by git", "out/": "ignored by git"}
    for words in ((SAYS,), ("-m", SAYS, "run.seed=1,2")):
        assert slipway.json("plan", *words)["left_out"] == left_out
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
        ((run, "tpu=v6e_8"), "tpu=v6e_8: --run"),
        (("nobody-00000000",), "no such run on this machine or in gs://"),
    ):
        code, _, err = slipway("up", "--run", *words)
        assert (code, said in err) == (2, True)
    (slipway.home / "runs" / run / "record.json").unlink()  # another machine knows it from the bucket
    shutil.rmtree(slipway.home / "trusted")
    assert slipway.json("status", "--run", run)["run"]["state"] == "finished"
    code, out, err = slipway("up", "--run", run)
    assert (code, out, "own code" in err, "pass --trust" in err) == (2, "", False, True)
    code, out, err = slipway("up", "--run", run, "--trust")
    assert (code, f"{run}-r1 has already finished" in out, commit in err) == (0, True, True)
    assert slipway("up", "--run", run)[2] == ""


@pytest.mark.e2e
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


@pytest.mark.e2e
def test_a_failed_run_of_code_without_git_is_on_record_all_the_same(slipway: SlipwayCli) -> None:
    assert slipway("up", 'program.command=[sh,-c,"exit 7"]')[0] == 5
    [row] = index.load_rows(slipway.home)
    assert (row["state"], row["commit"], "worker" in row["reason"]) == ("failed", None, True)
    assert row["seconds"] >= 0


@pytest.mark.e2e
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


@pytest.mark.parametrize("count", [1, 100])
def test_many_cancellations_read_the_table_of_runs_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    runs, state = [f"r-{number}" for number in range(count)], tmp_path / "state"
    index.append_rows(state, [{"run": run, "state": "running", "created": 1.0} for run in [*runs, "another"]])
    read, real = list[Path](), index.load_rows
    monkeypatch.setattr(index, "load_rows", lambda state: read.append(state) or real(state))
    google, clock = FolderClient(Clock()), Clock()
    context: Any = SimpleNamespace(google=google, clock=clock, state_dir=state, local_notes=LocalNotes(print))
    for run in runs:
        assert Ledger(google, str(tmp_path), run).record_launch(Launch(1, "pod", 10.0))
    assert record_cancellations(context, str(tmp_path), runs) == []
    assert read == [state]
    states = {row["run"]: row["state"] for row in real(state)}
    assert states == dict.fromkeys(runs, "cancelled") | {"another": "running"}

"""What `status` prints in 80 columns: run, failures, cost and every worker; the column `data` of `verify`."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from controller.agent.protocol import Fingerprints
from controller.cli import main
from controller.cli.verbs import status
from controller.cli.verbs.verify import data_cells
from controller.plan.build import build_plan
from controller.records import index
from controller.records.restore import MissingInputsError
from controller.resources.pod.provisioner import Place, ProvisionerName
from controller.run import session
from controller.ssh.fleet import WorkerError
from tests.composed import config_of

RUN = "gemma2b-of-a-researcher-who-names-runs-018e4c33"
DRIVER = "somebody@a-workstation.of.the.department (bastion) for another-run-12345678 since 2026-11-23 00:09:16 UTC"
WHY = "worker 11: ResourceExhaustedError: out of memory while trying to allocate 17179869184 bytes on device 3 of 4"
ERROR = "SSH to 10.128.0.17 was refused: the host key has changed since 2026-11-22; run `slipway verify`"
BUCKET = "gs://a-bucket-with-a-name-as-long-as-google-allows-62c990"
SINCE = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(1.7e9))
URL = "https://console.cloud.google.com/compute/tpus/details/us-central1-a/slipway-v5litepod-256-62c990?project=acme"
DOCUMENT: dict[str, Any] = {
    "pod": {"name": "slipway-v5litepod-256-62c990", "state": "ready in us-central1-a, spot", "driver": DRIVER,
            "console": URL},
    "run": {
        "id": RUN, "state": "running", "attempts": 3,
        "verdicts": [
            {"time": 1.7e9, "attempt": attempt, "message": WHY, "response": "restart_from_checkpoint", "kind": "oom"}
            for attempt in (1, 2)
        ],
        "summary": {"accuracy_before": 0.25, "accuracy_after": 0.75, "accuracy_low_after": 0.7, "steps": 188},
        "damaged": [f"{BUCKET}/runs/{RUN}/launches/0001.json is damaged: no JSON (Expecting value: line 1 column 1)"],
        "alerts": [], "is_followed": True, "abandoned": 1.7e9,
        "results": f"{BUCKET}/runs/{RUN}",
    },
    "cost": {"pod_hours": 12.5, "usd": 1234.56, "usd_per_hour": 98.76, "price": "Google's list price of 2026-11-01",
             "stored_gb": 123.4, "stored_usd_per_month": 2.47, "pods": []},
    "workers": [{"worker": worker, "running": RUN, "free_gb": 88.1} for worker in range(63)]
    + [{"worker": 63, "error": ERROR}],
}  # fmt: skip


PAGES: dict[ProvisionerName, str] = {
    "node": "tpus/details/us-east5-b",
    "queued": "tpus/details/us-east5-b",
    "instance": "instancesDetail/zones/us-east5-b/instances",
    "mig": "instanceGroups/details/us-east5-b",
}


def test_a_pod_of_either_plane_has_a_page_in_googles_console() -> None:
    config = config_of("+experiment=quickstart", "cloud=gcp", "cloud.project=acme")
    plan = build_plan(config, "acme", Path.cwd())
    emulated = config.model_copy(update={"cloud": config.cloud.model_copy(update={"kind": "local"})})
    for provisioner, page in PAGES.items():
        there = replace(plan.node.status, place=Place("us-east5-b", "spot", "slipway", provisioner))
        node = replace(plan.node, status=there)
        url = f"https://console.cloud.google.com/compute/{page}/{node.name}?project=acme"
        assert status.console_url(plan, node) == url
        assert status.console_url(replace(plan, config=emulated), node) is None


@contextmanager
def no_session(options: object, *, keep_awake: bool) -> Any:
    assert keep_awake, "starting the emulated cloud again takes longer than all the rest"
    yield type("Session", (), {"context": None})


def test_no_line_is_wider_than_80_columns_and_nothing_is_cut(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(status, "open_session", no_session)
    monkeypatch.setattr(status, "retry_deletions", lambda context: [])
    monkeypatch.setattr(status, "gather_status", lambda session: DOCUMENT)
    assert main.run(["status", "+experiment=quickstart"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > 80 and len(line.split()) > 1] == []
    assert URL in lines, "whole, to be clicked"
    words = " ".join(" ".join(lines).split())
    run = DOCUMENT["run"]
    for text in (RUN, DRIVER, f"attempt 2: {WHY}", run["results"], f"warning: {run['damaged'][0]}", "$1234.56",
                 f"nobody has driven it since {SINCE}, when its controller was last heard of", "12.50 pod hours",
                 "accuracy 0.25 → 0.75", f"worker 63: {ERROR}"):  # fmt: skip
        assert text in words
    assert all(f"worker {worker}: running {RUN}" in words for worker in range(63))


UNREPEATABLE = "--run q-1: its code is missing from gs://b/code/0a.tar.gz"
METRICS = {"accuracy_before": 0.4883, "accuracy_after": 0.8984}


@pytest.fixture
def emptied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with the table of two runs, and a bucket without their code."""
    monkeypatch.setenv("SLIPWAY_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    finished = {"run": "q-1", "state": "finished", "attempts": 2, "seconds": 242.0, "metrics": METRICS}
    index.append_rows(tmp_path, [finished, {"run": "q-2", "state": "running"}])

    @contextmanager
    def restored(*_: Any, **__: Any) -> Iterator[Any]:
        raise MissingInputsError(UNREPEATABLE)
        yield

    monkeypatch.setattr(session, "restored_run", restored)


@pytest.mark.usefixtures("emptied")
def test_a_finished_run_is_shown_from_the_record_of_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["status", "--run", "q-1"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "run  q-1: finished, 2 attempts, 4:02"
    assert "0.4883 → 0.8984" in out[1]
    assert out[2] == f"     from the record of this machine: {tmp_path / 'runs' / 'q-1'}"
    assert out[3].startswith("     its code is missing from gs://b/code/0a.tar.gz, so the run cannot be repeated")
    assert main.run(["status", "--run", "q-1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["run"]["summary"], document["missing"]) == (METRICS, UNREPEATABLE)
    assert main.run(["status", "--run", "q-2"]) == 2, "it has not finished"
    assert capsys.readouterr().err == f"error: {UNREPEATABLE}\n"


def test_a_worker_with_other_data_than_most_is_named_with_its_keys() -> None:
    usual = {"data.path": "a", "model.weights": "b"}
    found = [usual, usual, usual | {"data.path": "c"}, usual | {"data.path": "absent"}, dict.fromkeys(usual, "d")]
    prints: list[Fingerprints | WorkerError] = [{"data": one} for one in found]
    assert data_cells([*prints, WorkerError(5, "10.0.0.5", "agent", "run.yaml is missing")]) == [
        "ok", "ok", "data.path differs", "data.path absent", "data.path, model.weights differs", "run.yaml is missing"
    ]  # fmt: skip
    assert data_cells([{"data": {"data.path": "absent"}}] * 2) == ["data.path absent"] * 2, "the same nothing"
    assert data_cells([{"data": {}}] * 2) == ["ok", "ok"], "generated problems have no files"
    assert data_cells([{"data": {"a": "1"}}, {"data": {"a": "2"}}]) == ["ok", "a differs"], "a tie: the first"

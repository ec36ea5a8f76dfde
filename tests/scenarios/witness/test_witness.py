"""`slipway witness` on the emulated cloud: what it shows, records and leaves; and its recording, replayed."""

from __future__ import annotations

import copy
import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from controller.cli import main
from controller.witness import drill, limits, recording
from controller.witness.recording import RequestLine
from controller.witness.stages import StageLog
from tests.controller.conftest import SlipwayCli
from tests.controller.localcloud.harness import EmulatedCloud
from tests.emulators import Emulators
from tests.planes import Plane, pods
from tests.witness.__main__ import OPERATION_SECONDS, WAIT_SECONDS, load, replay, running_cloud
from tests.witness.replay import Report

pytestmark = pytest.mark.e2e
WORDS = ["witness", "cloud=local", "cloud.operation_seconds=0", "--yes", "-o", "recorded"]
FIRST_CONTACT = ("look", "first run", "checkpoint", "preempt", "recover", "clean up", "verify")
Lines = list[RequestLine]


def witness(slipway: SlipwayCli, *words: str) -> tuple[int, str, str]:
    code = main.run([*WORDS, *words])
    out, err = slipway.capsys.readouterr()
    return code, out, err


def stages(folder: Path = Path("recorded")) -> dict[str, dict[str, Any]]:
    return {stage["name"]: stage for stage in json.loads((folder / recording.STAGES).read_text())["stages"]}


def nothing_is_left(slipway: SlipwayCli) -> bool:
    state = slipway.cloud().get("state")
    accounts = [name for name in state["serviceAccount"] if name.startswith(drill.NAME)]
    return not (pods(state) or state["bucket"] or accounts or slipway_networks(state))


def slipway_networks(state: dict[str, Any]) -> list[str]:
    return [path for path in state["compute"] if drill.NAME in path]


def replayed(emulators: Emulators, lines: Lines, wait: float = WAIT_SECONDS) -> Report:
    """Replay a recording against an emulated cloud that nobody has used before."""
    flags = f"--operation-seconds={OPERATION_SECONDS}"
    with running_cloud(lambda cloud: emulators.start(cloud.state, flags)) as cloud:
        return replay(lines, cloud, wait)


@pytest.mark.deep
def test_a_first_contact_is_recorded_leaves_nothing_and_is_replayed_without_a_difference(
    slipway: SlipwayCli, plane: Plane, emulators: Emulators
) -> None:
    code, out, err = witness(slipway, *(plane.two if plane.is_compute_engine else ()))
    assert (code, err) == (0, ""), out
    assert "verified: nothing that it made is left" in out
    found = stages()
    assert [(name, stage["outcome"]) for name, stage in found.items()] == [(name, "ok") for name in FIRST_CONTACT]
    made = {step["resource"].partition("/")[0] for step in found["first run"]["steps"] if step["outcome"] == "ok"}
    kinds = {"services", "service account", "roles of", "bucket", "network", "subnet", "nat", "node", "ssh", "venv"}
    assert kinds <= made
    assert nothing_is_left(slipway)
    worker = json.loads(Path("recorded", recording.WORKERS).read_text())["workers"][0]
    assert worker["python"]
    assert "TPU_WORKER_ID" in worker["environment_names"]
    assert {file.stat().st_mode & 0o777 for file in Path("recorded").iterdir()} == {0o600}
    everything = "".join(file.read_text() for file in Path("recorded").iterdir())
    for secret in ("slipway-local", json.loads((slipway.home / "localcloud/endpoint.json").read_text())["token"]):
        assert secret not in everything
    if plane.is_compute_engine:
        return
    lines = load(Path("recorded"))
    report = replayed(emulators, lines)
    assert [str(found) for found in report.differences.values()] == []
    assert report.sent > 300
    found = replayed(emulators, PLANTED(lines), wait=10.0).differences.values()
    assert sorted((d.kind, d.method_id, d.subject) for d in found) == sorted(EXPECTED), "\n".join(map(str, found))


QUEUED, NODES = "tpu.projects.locations.queuedResources.get", "tpu.projects.locations.nodes.get"
GUESTS = "tpu.projects.locations.nodes.getGuestAttributes"
SERVICES, METRICS = "serviceusage.services.batchGet", "serviceusage.services.consumerQuotaMetrics.list"
EXPECTED = [
    ("status", METRICS, "GET tpu.googleapis.com/consumerQuotaMetrics PERMISSION_DENIED"),
    ("reason", "storage.buckets.get", "404"),
    ("words", "compute.networks.get", "404 NOT_FOUND"),
    ("field", "compute.networks.get", "selfLinkWithId"),
    ("field", NODES, "createTime"),
    ("type", NODES, "networkEndpoints[].port"),
    ("state", "compute.networks.insert", "WAITING"),
    ("order", SERVICES, "ENABLED, then DISABLED+ENABLED"),
    ("attribute", GUESTS, "guestInventory/KernelVersion of worker 0"),
    ("attribute order", GUESTS, "hostkeys/ssh-ed25519 of worker 0, then hostname/hostname of worker 0"),
]


def PLANTED(lines: Lines) -> Lines:  # noqa: N802 - beside EXPECTED
    """The recording with ten differences: each is the answer that another Google would have given."""
    lines = [replace(line, answer=copy.deepcopy(line.answer)) for line in lines]

    def edit(method_id: str, change: Callable[[RequestLine], Any], **wanted: Any) -> None:
        for at, line in enumerate(lines):
            if line.method_id == method_id and line.status == wanted.get("status", 200):
                lines[at] = change(line) or line

    refusal = {"error": {"code": 403, "status": "PERMISSION_DENIED", "message": "no"}}
    edit(METRICS, lambda line: replace(line, status=403, answer=refusal))
    edit("storage.buckets.get", lambda line: line.answer["error"].update(status="GONE"), status=404)
    edit("compute.networks.get", lambda line: line.answer["error"].update(message="There is none"), status=404)
    edit("compute.networks.get", lambda line: line.answer.update(selfLinkWithId="https://x"))
    edit("compute.networks.insert", lambda line: line.answer.update(status="WAITING"))
    edit(NODES, lambda line: line.answer.pop("createTime") and None)
    edit(NODES, port_as_text)
    services = [line for line in lines if line.method_id == SERVICES]
    lines.append(replace(services[0], number=lines[-1].number + 1, began=lines[-1].began + 1))
    guests = [line.answer["guestAttributes"][0]["queryValue"] for line in lines if line.method_id == GUESTS]
    kernel = {"namespace": "guestInventory", "key": "KernelVersion", "value": "5.15"}
    for answer in guests:
        answer["items"].append(kernel)
    guests[0]["items"] = [item for item in guests[0]["items"] if item["namespace"] != "hostname"]
    return lines


def port_as_text(line: RequestLine) -> None:
    for endpoint in line.answer.get("networkEndpoints", []):
        endpoint["port"] = str(endpoint["port"])


def at_stage(monkeypatch: pytest.MonkeyPatch, stage: str, act: Callable[[], object]) -> None:
    """Do something as soon as a stage begins."""
    begin = StageLog.begin

    def begin_and_act(log: StageLog, name: str) -> None:
        begin(log, name)
        if name == stage:
            act()

    monkeypatch.setattr(StageLog, "begin", begin_and_act)


@pytest.mark.deep
@pytest.mark.parametrize("stage", ["first run", "checkpoint", "recover"])
def test_ctrl_c_cleans_up(slipway: SlipwayCli, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    at_stage(monkeypatch, stage, lambda: os.kill(os.getpid(), signal.SIGINT))
    code, out, _ = witness(slipway)
    assert code == 130, out
    found = stages()
    assert found[stage]["outcome"] == "interrupted"
    assert [found[name]["outcome"] for name in ("clean up", "verify")] == ["ok", "ok"]
    assert nothing_is_left(slipway)


@pytest.mark.deep
def test_the_limit_of_minutes_ends_it(slipway: SlipwayCli, monkeypatch: pytest.MonkeyPatch) -> None:
    reached: list[Callable[[], None]] = []
    monkeypatch.setattr(limits.TimeLimit, "_start_timer", lambda limit, reach: reached.append(reach))
    at_stage(monkeypatch, "preempt", lambda: reached[0]())
    code, out, _ = witness(slipway, "--minutes", "7")
    assert code == 2, out
    assert stages()["preempt"]["outcome"] == "limit"
    assert "the limit of 7 minutes is reached" in out
    assert nothing_is_left(slipway)


@pytest.mark.deep
@pytest.mark.parametrize("match", ["POST .*/nodes|POST .*queuedResources", "POST .*serviceAccounts"])
def test_a_stage_that_google_refuses_for_good_is_recorded_and_the_rest_deleted(slipway: SlipwayCli, match: str) -> None:
    fault = f"{{kind: http, status: 403, times: 1000, match: '{match}', message: refused for good}}"
    code, out, _ = witness(slipway, f"cloud.faults=[{fault}]")
    assert code == 2, out
    found = stages()
    assert found["first run"]["outcome"] == "failed"
    assert "refused for good" in found["first run"]["detail"]
    assert found["recover"]["outcome"] == "skipped"
    assert nothing_is_left(slipway)


def test_nothing_is_made_where_something_would_be_lost(slipway: SlipwayCli) -> None:
    slipway.cloud()
    cloud, bucket = EmulatedCloud(slipway.home / "localcloud"), "slipway-local-slipway-us-central1-witness"
    cloud.call_ok("POST", "storage/v1/b?project=slipway-local", {"name": bucket, "location": "US"})
    assert cloud.send("POST", f"upload/storage/v1/b/{bucket}/o?uploadType=media&name=precious", b"x")[0] == 200
    code, _, err = witness(slipway)
    assert code == 2
    assert f"gs://{bucket} of an earlier witness holds objects" in err
    Path("recorded").mkdir()
    Path("recorded", "file").touch()
    code, _, err = witness(slipway)
    assert code == 2
    assert "--output recorded: is not empty" in err
    assert slipway.cloud().get("state")["bucket"].keys() == {bucket}

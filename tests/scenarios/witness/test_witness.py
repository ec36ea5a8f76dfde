"""`slipway witness` on the emulated cloud: what it shows, records and leaves; and its recording, replayed."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from controller.cli import main
from controller.witness import drill, recording
from controller.witness.stages import StageLog
from tests.controller.conftest import SlipwayCli
from tests.controller.localcloud.harness import EmulatedCloud
from tests.emulators import Emulators
from tests.planes import Plane, pods
from tests.witness.__main__ import OPERATION_SECONDS, WAIT_SECONDS, load, replay, running_cloud

pytestmark = pytest.mark.e2e
WORDS = ["witness", "cloud=local", "cloud.operation_seconds=0", "--yes", "-o", "recorded"]
FIRST_CONTACT = ("look", "first run", "checkpoint", "preempt", "recover", "clean up", "verify")


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
    flags = f"--operation-seconds={OPERATION_SECONDS}"
    with running_cloud(lambda cloud: emulators.start(cloud.state, flags)) as cloud:  # that nobody has used before
        report = replay(load(Path("recorded")), cloud, WAIT_SECONDS)
    assert [str(found) for found in report.differences.values()] == []
    assert report.sent > 300


def at_stage(monkeypatch: pytest.MonkeyPatch, stage: str, act: Callable[[], object]) -> None:
    """Do something as soon as a stage begins."""
    begin = StageLog.begin

    def begin_and_act(log: StageLog, name: str) -> None:
        begin(log, name)
        if name == stage:
            act()

    monkeypatch.setattr(StageLog, "begin", begin_and_act)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("stage", "how", "code"),
    [("first run", "interrupted", 130), ("recover", "interrupted", 130), ("preempt", "limit", 2)],
)
def test_it_cleans_up_after_ctrl_c_and_at_its_limit(
    slipway: SlipwayCli, monkeypatch: pytest.MonkeyPatch, stage: str, how: str, code: int
) -> None:
    reached: list[Callable[[], None]] = []
    monkeypatch.setattr(drill.TimeLimit, "_start_timer", lambda limit, reach: reached.append(reach))
    at_stage(monkeypatch, stage, lambda: reached[0]() if how == "limit" else os.kill(os.getpid(), signal.SIGINT))
    ended, out, _ = witness(slipway, "--minutes", "7")
    assert ended == code, out
    assert ("the limit of 7 minutes is reached" in out) == (how == "limit")
    found = stages()
    assert [found[name]["outcome"] for name in (stage, "clean up", "verify")] == [how, "ok", "ok"]
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

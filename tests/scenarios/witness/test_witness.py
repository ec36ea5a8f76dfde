"""`slipway witness` on the emulated cloud: what it shows, records and leaves; and its recording, replayed."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from controller.cli import main
from controller.run.options import RunOptions
from controller.witness import drill, play
from controller.witness.recording import REQUESTS, Recording, load
from tests.controller.conftest import SlipwayCli
from tests.controller.localcloud.harness import EmulatedCloud
from tests.planes import pods

pytestmark = pytest.mark.e2e
WORDS = ["witness", "cloud=local", "--yes", "-o", "recorded"]
AT_ONCE = ("cloud.operation_seconds=0", "--plane", "tpu_api")


def witness(slipway: SlipwayCli, *words: str) -> tuple[int, str, str]:
    code = main.run([*WORDS, *words])
    out, err = slipway.capsys.readouterr()
    return code, out, err


def stages(folder: Path = Path("recorded")) -> dict[str, dict[str, Any]]:
    return {stage["name"]: stage for stage in load(folder / REQUESTS)[0]["stages"]}


def nothing_is_left(slipway: SlipwayCli) -> bool:
    state = slipway.cloud().get("state")
    accounts = [name for name in state["serviceAccount"] if name.startswith(drill.NAME)]
    return not (pods(state) or state["bucket"] or accounts or slipway_networks(state))


def slipway_networks(state: dict[str, Any]) -> list[str]:
    return [path for path in state["compute"] if drill.NAME in path]


@pytest.mark.deep
def test_a_first_contact_is_recorded_leaves_nothing_and_is_replayed_without_a_difference(slipway: SlipwayCli) -> None:
    code, out, err = witness(slipway, "cloud.operation_seconds=0.1")
    assert code == 0, out + err
    assert "verified: nothing that it made is left" in out
    found = stages()
    looked, played = play.STAGES[:2], play.STAGES[2:]
    planes = "tpu_api", "compute_engine"
    every = [(f"{plane}: {name}", "ok") for names in (looked, played) for plane in planes for name in names]
    assert [(name, stage["outcome"]) for name, stage in found.items()] == every
    assert nothing_is_left(slipway)
    assert {file.stat().st_mode & 0o777 for file in Path("recorded").iterdir()} == {0o600}
    everything = "".join(file.read_text() for file in Path("recorded").iterdir())
    for secret in ("slipway-local", json.loads((slipway.home / "localcloud/endpoint.json").read_text())["token"]):
        assert secret not in everything
    assert "the emulated cloud answers otherwise in 0 places" in out, Path("recorded/README.md").read_text()


def at_stage(monkeypatch: pytest.MonkeyPatch, stage: str, act: Callable[[], object]) -> None:
    """Do something as soon as a stage begins."""
    begin = Recording.begin

    def begin_and_act(made: Recording, name: str) -> None:
        begin(made, name)
        if name == f"tpu_api: {stage}":
            act()

    monkeypatch.setattr(Recording, "begin", begin_and_act)


@pytest.mark.deep
@pytest.mark.wide
@pytest.mark.parametrize(
    ("stage", "how", "code"),
    [("up", "interrupted", 130), ("recover", "interrupted", 130), ("preempt", "limit", 2)],
)
def test_it_cleans_up_after_ctrl_c_and_at_its_limit(
    slipway: SlipwayCli, monkeypatch: pytest.MonkeyPatch, stage: str, how: str, code: int
) -> None:
    timers: list[Any] = []
    monkeypatch.setattr(drill.TimeLimit, "__enter__", lambda limit: timers.append(limit._timer))

    def strike() -> None:
        timers[0].function(*timers[0].args) if how == "limit" else os.kill(os.getpid(), signal.SIGINT)

    at_stage(monkeypatch, stage, strike)
    ended, out, _ = witness(slipway, *AT_ONCE, "--minutes", "7")
    assert ended == code, out
    assert ("the limit of 7 minutes is reached" in out) == (how == "limit")
    found = stages()
    assert [found[f"tpu_api: {name}"]["outcome"] for name in (stage, "down", "verify")] == [how, "ok", "ok"]
    assert nothing_is_left(slipway)


@pytest.mark.deep
@pytest.mark.wide
@pytest.mark.parametrize("match", ["POST .*/nodes|POST .*queuedResources", "POST .*serviceAccounts"])
def test_a_stage_that_google_refuses_for_good_is_recorded_and_the_rest_deleted(slipway: SlipwayCli, match: str) -> None:
    fault = f"{{kind: http, status: 403, times: 1000, match: '{match}', message: refused for good}}"
    code, out, _ = witness(slipway, *AT_ONCE, f"cloud.faults=[{fault}]")
    assert code == 2, out
    found = stages()
    assert found["tpu_api: up"]["outcome"] == "failed"
    assert "refused for good" in found["tpu_api: up"]["detail"]
    assert found["tpu_api: recover"]["outcome"] == "skipped"
    assert nothing_is_left(slipway)


def test_nothing_is_made_where_something_would_be_lost(slipway: SlipwayCli) -> None:
    slipway.cloud()
    options = drill.drill_options(RunOptions(overrides=("cloud=local",)), drill.Limits(), "tpu_api")["tpu_api"]
    bucket = f"slipway-local-slipway-{options.cloud_config().region}-witness"
    cloud = EmulatedCloud(slipway.home / "localcloud")
    cloud.call_ok("POST", "storage/v1/b?project=slipway-local", {"name": bucket, "location": "US"})
    assert cloud.send("POST", f"upload/storage/v1/b/{bucket}/o?uploadType=media&name=precious", b"x")[0] == 200
    code, _, err = witness(slipway, *AT_ONCE)
    assert code == 2
    assert f"gs://{bucket} of an earlier witness holds objects" in err
    Path("recorded").mkdir()
    Path("recorded", "file").touch()
    code, _, err = witness(slipway, *AT_ONCE)
    assert code == 2
    assert "--output recorded: is not empty" in err
    assert slipway.cloud().get("state")["bucket"].keys() == {bucket}


def test_it_refuses_to_cost_more_than_allowed_before_anything_is_made(slipway: SlipwayCli) -> None:
    code, _, err = witness(slipway, "cloud.operation_seconds=0", "budget.usd_per_hour=3")
    assert code == 2
    assert "--max-dollars 5:" in err
    assert "v5litepod-1" in err
    assert "v6e-1" in err
    assert "$6.00 in all" in err
    assert slipway.mutations() == []
    assert not Path("recorded").exists()
    code, _, err = witness(slipway, "--max-dollars", "0")
    assert (code, "--max-dollars: must be a number above 0, not '0'" in err) == (2, True)

"""Trackers that are shipped: for real, where their packages are installed (each night), and with stand-ins.

TensorBoard's is in tests/scenarios/recovery/test_recovery.py.
"""

import json
import shutil
import sqlite3
import struct
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from controller.agent.tracker_kinds import Mlflow, Trackio, Wandb
from tests.controller.agent.conftest import ProgramRun
from tests.controller.agent.test_trackers import PROGRAM, order
from tests.fakes.loopback import FakeBucket

CONFIG = {"name": "e", "pod": {"accelerator_type": "v5litepod-16"}, "loop": {"steps": 6}}
Point = tuple[int, str, float]


def trackio_points(folder: Path) -> list[Point]:
    with closing(sqlite3.connect(folder / "trackers/trackio/slipway.db")) as store:
        names = {name for (name,) in store.execute("SELECT DISTINCT run_name FROM metrics")}
        assert names == {"run-1"}
        rows = store.execute("SELECT step, metrics FROM metrics").fetchall()
    return [(step, name, value) for step, text in rows for name, value in json.loads(text).items()]


def mlflow_points(folder: Path) -> list[Point]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/trackers/mlflow/mlflow.db")
    known = client.get_experiment_by_name("slipway")
    assert known is not None
    [run] = client.search_runs([known.experiment_id])
    assert (run.info.run_name, run.info.status, run.data.tags["slipway.score"]) == ("run-1", "FINISHED", "6")
    assert run.data.params["loop.steps"] == "6"
    histories = [client.get_metric_history(run.info.run_id, name) for name in run.data.metrics]
    return [(point.step, point.key, point.value) for history in histories for point in history]


BLOCK = 32768


def records(file: Path) -> list[Any]:
    """All that one life has written: LevelDB's log format behind seven bytes of W&B's own.

    https://github.com/google/leveldb/blob/main/doc/log_format.md
    """
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, found, text = file.read_bytes(), 7, [], b""
    while at + 7 <= len(content):
        if (rest := BLOCK - at % BLOCK) < 7:
            at += rest
            continue
        _, size, kind = struct.unpack("<IHB", content[at : at + 7])
        text += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            found.append(Record.FromString(text))
            text = b""
    return found


def wandb_points(folder: Path) -> list[Point]:
    points: list[Point] = []
    for file in folder.glob("wandb/offline-run-*/*.wandb"):
        everything = records(file)
        [run] = [record.run for record in everything if record.HasField("run")]
        assert (run.run_id, run.project, run.run_group, run.host) == ("run-1", "slipway", "e", "v5litepod-16")
        for record in everything:
            if record.HasField("history"):
                row = {item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                points += [(row["_step"], name, value) for name, value in row.items() if name[0] != "_"]
    return points


POINTS: dict[str, Callable[[Path], list[Point]]] = {
    "trackio": trackio_points,
    "mlflow": mlflow_points,
    "wandb": wandb_points,
}


@pytest.mark.filterwarnings("default")  # of the packages that they bring along
@pytest.mark.parametrize("use", POINTS)
def test_what_is_read_back_equals_metrics_jsonl(run: ProgramRun, bucket: FakeBucket, tmp_path: Path, use: str) -> None:
    """Across an attempt on the same machine and one on another, each of which repeats steps."""
    pytest.importorskip(use)
    wanted = order(use) | {"config": CONFIG}
    given = {"trackers": [wanted], "bucket": "b", "log_object": "log", "exit_object": "exit"}
    env = {"WANDB_MODE": "offline", "WANDB_API_KEY": "0123456789abcdef" * 3}
    for attempt, (first, last, code) in enumerate([(1, 3, 75), (3, 4, 75), (3, 6, 0)], 1):
        run.start(PROGRAM, str(first), str(last), str(code), attempt=attempt, env=env, **given)
        ended = run.wait_ended(attempt)
        assert (ended["code"], ended["summary"], ended["log_tail"]) == (code, {"score": last}, "")
        if attempt == 2:
            shutil.rmtree(run.folder)
    for name, content in bucket.objects.items():
        assert env["WANDB_API_KEY"].encode() not in content
        path = tmp_path / "read" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    points = [(step, name, pytest.approx(value)) for step, name, value in POINTS[use](tmp_path / "read/runs/run-1")]
    metrics = {"loss": lambda step: step / 2, "eval/loss": lambda step: 1 / step}
    assert sorted(points, key=lambda p: p[:2]) == [
        (step, name, metrics[name](step)) for step in range(1, 7) for name in sorted(metrics)
    ]


class Calls:
    """A package that writes down how it is called. What it returns is given by name; anything else returns None."""

    def __init__(self, **returned: Any) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self._returned = returned

    def __getattr__(self, name: str) -> Any:
        def called(*args: Any, **named: Any) -> Any:
            self.calls.append((name, args, named))
            return self._returned.get(name)

        return called


def install(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
    module = ModuleType(name)
    vars(module).update(content)
    monkeypatch.setitem(sys.modules, name, module)


def test_wandb_is_told_the_run_and_nothing_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    run = SimpleNamespace(resumed=True, starting_step=4, offline=False, summary={}, log=None, finish=lambda: None)
    logged: list[Any] = []
    run.log = lambda *args, **named: logged.append((args, named))
    calls = Calls(init=run, Settings="quiet")
    install(monkeypatch, "wandb", init=calls.init, Settings=calls.Settings)
    tracker = Wandb("r-1", CONFIG, "/f", {"project": "p", "entity": "team", "mode": "online"})
    (_, _, settings), (_, _, named) = calls.calls
    assert {"disable_git", "disable_code", "x_disable_meta", "host"} <= set(settings)
    assert named["id"] == named["name"] == "r-1"
    assert (named["resume"], named["project"], named["entity"], named["mode"]) == ("allow", "p", "team", "online")
    assert (tracker.last_step, tracker.is_buffered) == (3, False)
    tracker.log(4, {"loss": 1.0})
    tracker.finish({"score": 2})
    assert (logged, run.summary) == ([(({"loss": 1.0},), {"step": 4, "commit": True})], {"score": 2})


def test_mlflow_finds_its_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    known = SimpleNamespace(info=SimpleNamespace(run_id="m"), data=SimpleNamespace(metrics={"loss": 1.0}))
    for found, last in (([], 7), ([known], 7)):
        client = Calls(
            search_runs=found, create_run=known, create_experiment="0", get_metric_history=[SimpleNamespace(step=7)]
        )
        entities = {"Metric": lambda *args: args, "Param": lambda *args: args}
        install(monkeypatch, "mlflow", MlflowClient=lambda tracking_uri, made=client: made)
        install(monkeypatch, "mlflow.entities", **entities)
        tracker = Mlflow("r-1", CONFIG, "/f", {})
        assert tracker.last_step == last
        names = [name for name, _, _ in client.calls]
        assert ("create_run" in names) == (not found)
        batches = [named for name, _, named in client.calls if name == "log_batch"]
        assert [("loop.steps", "6") in batch["params"] for batch in batches] == ([] if found else [True])
        client.calls.clear()
        tracker.log(8, {"loss": 0.5})
        tracker.finish(None)
        [(_, _, named)] = client.calls
        assert [point[:2] + point[3:] for point in named["metrics"]] == [("loss", 0.5, 8)]


@pytest.mark.parametrize(("space", "last"), [(None, 5), ("me/board", None)])
def test_trackio_resumes_its_run(monkeypatch: pytest.MonkeyPatch, space: str | None, last: int | None) -> None:
    calls = Calls()
    install(monkeypatch, "trackio", init=calls.init, log=calls.log, finish=calls.finish)
    store = SimpleNamespace(get_max_step_for_run=lambda project, run: 5 if (project, run) == ("slipway", "r-1") else 0)
    install(monkeypatch, "trackio.sqlite_storage", SQLiteStorage=store)
    monkeypatch.setenv("TRACKIO_DIR", "/elsewhere")
    if space:
        monkeypatch.setenv("TRACKIO_SPACE_ID", space)
    tracker = Trackio("r-1", CONFIG, "/f", {})
    assert tracker.last_step == last
    tracker.log(6, {"loss": 1.0})
    tracker.finish({})
    assert [(name, args) for name, args, _ in calls.calls] == [("init", ()), ("log", ({"loss": 1.0},)), ("finish", ())]
    began = calls.calls[0][2]
    assert (began["resume"], began["name"], began["space_id"], began["embed"]) == ("allow", "r-1", space, False)

"""The Python interface gives what the command line gives; how far a transfer is."""

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from controller import api
from controller.core.events import Event, Events
from controller.progress import Progress, format_size
from controller.records import index
from controller.sweep.definition import define_sweep
from tests.controller.conftest import ECHO_COMMAND, SlipwayCli
from tests.fakes.clock import ManualClock


@pytest.mark.e2e
def test_from_a_config_to_rows_metrics_and_the_record(slipway: SlipwayCli) -> None:
    lines = [{"step": 1, "phase": "train", "loss": 2.0}, {"step": 1, "phase": "eval", "eval_loss": 1.5}]
    wanted = "; ".join(f"echo '{json.dumps(line)}' >> $SLIPWAY_RUN_DIR/metrics.jsonl" for line in lines)
    (slipway.repository / "run.sh").write_text(f"{wanted}\necho '{{\"acc\": 0.5}}' > $SLIPWAY_RUN_DIR/summary.json\n")
    words = [*slipway.base_overrides, "tpu.accelerator_type=v5litepod-1", "program.command=[sh,run.sh]"]
    assert api.compose(*words).run.seed == 0
    planned = api.plan(*words)
    assert "create" in {resource["action"] for resource in planned["resources"]}
    row = api.up(*words)
    assert (row["run"], row["state"], row["metrics.acc"]) == (planned["run"], "finished", 0.5)
    assert api.runs("state=finished") == [row]
    assert api.record(row["run"])["config"]["run"]["seed"] == 0
    assert api.up(run=row["run"])["run"] == f"{row['run']}-r1"
    rows = api.sweep(*words, "run.seed=0,1")
    assert rows[0]["run"] == row["run"]
    assert {r["state"] for r in rows} == {"finished"}
    with pytest.raises(api.ConfigError, match="no metrics of it"):
        api.metrics("nobody-1")
    with pytest.raises(api.ConfigError, match="did you mean run"):
        api.compose("run.sead=1")


@pytest.mark.e2e
def test_the_workers_of_a_pod_are_fabric_connections(slipway: SlipwayCli) -> None:
    from fabric import Connection, ThreadingGroup

    two = ("tpu.accelerator_type=v4-16", "tpu.zone=us-central2-b")
    with pytest.raises(api.ConfigError, match="no run was started from this folder"):
        api.pod()
    with pytest.raises(api.ConfigError, match="is absent; run `slipway up`"):
        api.pod(*slipway.line(ECHO_COMMAND, *two))
    assert slipway("up", ECHO_COMMAND, *two, "cleanup.on_success=keep")[0] == 0
    with api.pod() as pod:
        assert len(pod) == 2
        connection = pod.connection(worker=1)
        assert isinstance(connection, Connection)
        ran = connection.run("basename $(dirname $HOME); exit 3", hide=True, warn=True)
        assert (ran.stdout, ran.exited) == ("worker-1\n", 3)
        connection.put(io.BytesIO(b"notes"), "notes.txt")
        assert (connection.run("cat notes.txt", hide=True).stdout, connection.user) == ("notes", "slipway")
        everywhere = ThreadingGroup.from_connections(pod.connections()).run("basename $(dirname $HOME)", hide=True)
        assert sorted(result.stdout for result in everywhere.values()) == [f"worker-{n}\n" for n in range(2)]
        with pytest.raises(api.ConfigError, match="the pod has workers 0 to 1"):
            pod.connection(worker=2)
    with pytest.raises(api.SlipwayError, match="closed on this side"):
        connection.run("true")


def test_the_rows_of_a_search_are_those_that_it_drew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPWAY_HOME", str(tmp_path))
    search = "sweep.search={method: random, trials: 2, metric: loss, mode: min, prune: false, seed: 0}"
    words = ["+experiment=quickstart", "optimizer.lr=interval(1e-5,1e-3)", search]
    made_by = define_sweep(words, Path.cwd()).id
    rows = [{"run": name, "created": at, "sweep": made_by} for at, name in ((2.0, "late"), (1.0, "early"))]
    monkeypatch.setattr(
        "controller.sweep.pool.drive_sweep", lambda options: index.append_rows(tmp_path, [*rows, {"run": "other"}])
    )
    assert [row["run"] for row in api.sweep(*words)] == ["early", "late"]


def test_it_tells_bytes_and_rate_once_a_second() -> None:
    clock, told = ManualClock(), list[Event]()
    events = Events(clock)
    events.add_listener(told.append)
    progress = Progress(cast(Any, SimpleNamespace(clock=clock, events=events)), "model/gemma", 4_000_000_000)
    for _ in range(10):
        clock.elapsed += 0.25
        progress.advance(100_000_000)
    assert [event.message for event in told] == ["400 MB of 4 GB, 400 MB/s", "800 MB of 4 GB, 400 MB/s"]
    assert told[0].data == {"bytes": 400_000_000, "total": 4_000_000_000, "bytes_per_second": 400_000_000}
    assert (told[0].kind, told[0].subject) == ("progress", "model/gemma")
    assert [format_size(n) for n in (0, 999, 1e3, 1.5e6, 2.34e9)] == ["0 B", "999 B", "1 kB", "1.5 MB", "2.34 GB"]

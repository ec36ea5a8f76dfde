"""Runs without a pod: killed controllers, killed programs, damaged records, sweeps over the devices of this machine."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from controller import api
from controller.cli import main
from tests.conftest import deep
from tests.controller.cli.verbs.test_up import until
from tests.paths import ROOT

pytestmark = pytest.mark.e2e
PROGRAM = """
import json, os, signal, sys, time
from pathlib import Path

run, kept = Path(os.environ["SLIPWAY_RUN_DIR"]), Path(os.environ["SLIPWAY_RUN_URL"]) / "checkpoints"
kept.mkdir(parents=True, exist_ok=True)
begin = max((int(path.name) for path in kept.iterdir()), default=0)
with (run / "begins").open("a") as file:
    print(begin, file=file)
(kept / str(begin + 1)).mkdir()
if "dies" in sys.argv and begin == 0:
    os.kill(os.getpid(), signal.SIGKILL)
print("waiting", flush=True)
while "waits" in sys.argv and not (run / "go").exists():
    time.sleep(0.02)
(run / "summary.json").write_text(json.dumps({"steps": begin + 1, "python": sys.executable}))
"""
DAMAGE = """
import os, sys, time
from pathlib import Path

run, how, pattern = Path(os.environ["SLIPWAY_RUN_URL"]), sys.argv[1], sys.argv[2]
while not (run / "record.json").is_file():
    time.sleep(0.02)
found = [path for path in run.glob(pattern) if path.is_file()]
assert found, pattern
for path in found:
    path.unlink() if how == "deleted" else path.write_text({"cut": '{"format": 1, "att', "other": "[]"}[how])
print("damaged", *sorted(str(path.relative_to(run)) for path in found), flush=True)
"""


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    (repository := tmp_path / "repository").mkdir()
    (repository / "train.py").write_text(PROGRAM)
    monkeypatch.chdir(repository)
    monkeypatch.setenv("SLIPWAY_HOME", str(tmp_path / "state"))
    return ["cloud=here", "cloud.backend=cpu", "program=command"]


def test_a_killed_controller_leaves_the_program_running(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*words, "program.command=[python,train.py,waits]"]
    run = api.plan(*words)["run"]
    at_work = tmp_path / "state/here/here-cpu-0/runs" / run
    argv = [sys.executable, "-m", "controller", *words]
    quiet = subprocess.DEVNULL
    controller = subprocess.Popen(argv, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=quiet, stderr=quiet)
    try:
        until((at_work / "begins").is_file)
    finally:
        controller.kill()
        controller.wait()
    assert main.run(["status", *words]) == 0
    said = capsys.readouterr().out
    assert f"run  {run}: running" in said
    assert "nobody has driven it since " in said
    with pytest.raises(api.ConfigError, match=f"the pod is busy with {run}"):
        api.up(*words[:-1], "program.command=[python,train.py]")
    assert [folder.name for folder in at_work.parent.iterdir()] == [run], "nothing was changed there"
    (at_work / "go").touch()
    row = api.up(*words)
    assert main.run(["status", *words]) == 0
    assert "nobody has driven it" not in capsys.readouterr().out
    assert api.status(*words) == api.Status(run, "finished", 1, {"steps": 1, "python": row["metrics.python"]})
    assert (row["run"], row["state"], row["attempts"], row["metrics.steps"]) == (run, "finished", 1, 1)
    assert (at_work / "begins").read_text() == "0\n", "it was not started again"
    assert (row["type"], row["cloud"]) == ("cpu-1", "here")
    assert Path(row["metrics.python"]).samefile(sys.executable)


def test_a_program_that_dies_goes_on_from_its_checkpoint(words: list[str], tmp_path: Path) -> None:
    row = api.up(*words, "program.command=[python,train.py,dies]")
    assert (row["state"], row["attempts"], row["metrics.steps"]) == ("finished", 2, 2)
    at_work = tmp_path / "state/here/here-cpu-0/runs" / row["run"]
    assert (at_work / "begins").read_text() == "0\n1\n"
    assert (tmp_path / "state/here/store/runs" / row["run"] / "checkpoints/2").is_dir()
    assert api.up(run=row["run"])["run"] == f"{row['run']}-r1", "from the record alone"


@pytest.mark.parametrize("own_exit", ["true", *deep("false")])
def test_a_program_for_pods_that_joins_the_others_first_runs(words: list[str], own_exit: str) -> None:
    lines = ("import jax, json, os, pathlib", "jax.distributed.initialize()", "import jax.numpy as jnp")
    summary = 'pathlib.Path(os.environ["SLIPWAY_RUN_DIR"], "summary.json").write_text(json.dumps(found))'
    found = 'found = {"processes": jax.process_count(), "devices": jax.device_count(), "sum": int(jnp.arange(4).sum())}'
    Path("pod.py").write_text("\n".join([*lines, found, summary]))
    exits = f"recovery.exit_on_exception={own_exit}"
    row = api.up(*words, "program.command=[python,pod.py]", "cloud.devices=2", exits)
    assert row["state"] == "finished"
    assert [row[f"metrics.{name}"] for name in ("processes", "devices", "sum")] == [1, 2, 6]


def test_a_run_is_started_looked_at_and_cancelled(words: list[str]) -> None:
    words = [*words, "program.command=[python,train.py,waits]"]
    assert api.status(*words).state == "absent"
    assert api.logs(*words) == ""
    row = api.start(*words)
    assert [row[name] for name in ("seconds", "ended")] == [None, None], "keys that it has at its end"
    assert api.status(*words) == api.Status(row["run"], "running", 1)
    until(lambda: "waiting" in api.logs(*words))
    assert api.cancel(*words)
    assert (api.status(*words).state, api.cancel(*words)) == ("stopped", False)
    [listed] = api.runs()
    assert (listed["run"], listed.keys() >= row.keys()) == (row["run"], True)


def test_verbs_of_a_pod_say_that_there_is_none_and_a_report_is_made(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*words, "program.command=[python,train.py]"]
    row = api.up(*words)
    assert main.run(["report", row["run"]]) == 0
    assert row["run"] in (tmp_path / "state/reports" / f"{row['run']}.html").read_text()
    capsys.readouterr()
    assert main.run(["verify", *words]) == 0, "a CPU has no chips to look for"
    assert "no device nodes" not in capsys.readouterr().out
    for verb in ("down", "stop", "ssh", "forward"):
        assert main.run([verb, *(["8080"] if verb == "forward" else []), *words]) == 2
        said = capsys.readouterr().err
        about = (
            "there is no SSH; `slipway exec` runs" if verb in ("ssh", "forward") else "has no pod to delete or stop: "
        )
        assert said.startswith("error: cloud=here")
        assert about in said


@pytest.mark.parametrize("how", ["cut", "deleted"])
def test_a_run_survives_the_loss_of_its_record(
    words: list[str], how: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Each object by itself is in `tests/controller/run/test_damaged_objects.py`."""
    (Path.cwd() / "damage.py").write_text(DAMAGE)
    code = main.run(["up", *words, f"program.command=[python,damage.py,{how},**/*]"])
    out, err = capsys.readouterr()
    assert (code, err) == (0, ""), out
    results = [*tmp_path.rglob("runs/*/result.json")]
    assert results
    assert all(json.loads(result.read_text())["outcome"] == "finished" for result in results)
    if how == "deleted":
        assert "record.json is missing; the run goes on without it" in out
        assert all((result.parent / "record.json").is_file() for result in results)
    else:
        assert "launches/0001.json is damaged" in out
        assert "the run goes on without it" in out
        assert main.run(["status"]) == 0
        [warning] = [line for line in capsys.readouterr().out.splitlines() if "warning: " in line]
        assert warning.startswith(f"     warning: {tmp_path}")
        assert "/launches/0001.json is damaged: " in warning


@pytest.mark.deep
def test_a_sweep_divides_the_devices(words: list[str], tmp_path: Path) -> None:
    (Path.cwd() / "show.py").write_text(
        "import json, os, jax\n"
        "facts = {'devices': jax.device_count(), 'seed': os.environ['SEED']}\n"
        "open(os.environ['SLIPWAY_RUN_DIR'] + '/summary.json', 'w').write(json.dumps(facts))\n"
    )
    command = "program.command=[python,show.py]"
    rows = api.sweep(*words, "cloud.devices=2", command, "sweep.pods=2", "env.vars.SEED=a,b,c")
    assert [(row["state"], row["metrics.devices"], row["metrics.seed"]) for row in rows] == [
        ("finished", 2, seed) for seed in "abc"
    ]
    assert {path.name for path in (tmp_path / "state/here").glob("here-*")} >= {"here-cpu-0to1", "here-cpu-2to3"}


@pytest.mark.deep
def test_ctrl_c_detaches_from_a_real_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPWAY_HOME", str(tmp_path))
    words = ["+experiment=quickstart", "cloud=here", "cloud.backend=cpu", "cloud.devices=2", "scale=tiny"]
    argv = [sys.executable, "-m", "controller", *words]
    seen = ""
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        for line in first.stdout:
            seen += line
            if line.lstrip().startswith("grpo step"):
                first.send_signal(signal.SIGINT)
    assert first.returncode == 0
    assert "detached: the run continues" in seen
    again = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    assert "re-attached to attempt 1" in again.stdout
    assert again.returncode == 0, again.stderr
    [row] = api.runs("state=finished", state=tmp_path)
    assert row["attempts"] == 1
    assert [line["phase"] for line in api.metrics(row["run"], state=tmp_path)]

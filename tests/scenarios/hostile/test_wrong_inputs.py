"""Whatever is wrong with the input: exit 2, a clear message naming the key, no traceback, nothing done."""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from controller import emulator
from controller.cli import main
from controller.records.index import LastCommand, load_last_command, save_last_command
from tests.emulators import Emulators
from tests.paths import ROOT

TRAINER = ["+experiment=quickstart"]


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """The error lines of a command that must end with 2."""
    assert main.run(list(words)) == 2
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    assert out == ""
    return [line.removeprefix("error: ") for line in err.splitlines() if not line.startswith(("warning: ", "note: "))]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, emulators: Emulators) -> Iterator[Path]:
    monkeypatch.setattr(emulator, "run_emulator_verb", emulators.run_emulator_verb)
    monkeypatch.setenv("SLIPWAY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path / "gcloud"))
    for name in ("GOOGLE_CLOUD_PROJECT", "CLOUDSDK_CORE_PROJECT", "GOOGLE_APPLICATION_CREDENTIALS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    yield tmp_path / "home"
    emulators.run_emulator_verb(["wipe"], tmp_path / "home" / "localcloud")  # in this process


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("tpu.acelerator_type=v4-8", "tpu.acelerator_type: unknown key; did you mean tpu.accelerator_type?"),
        ("loop.steps=-5", "loop.steps: input should be greater than or equal to 1 (got -5)"),
        ("tpu.capacity=sopt", "tpu.capacity: unknown choice 'sopt'; did you mean 'spot'? choices: on_demand, spot"),
        ("tpu.capacity=[]", "tpu.capacity: must list at least one tier"),
        ("tpu.capacity=[spot,spot]", "tpu.capacity: lists a tier twice"),
        ("tpu.zone=here", "tpu.zone: 'here' is invalid; use a zone such as us-central1-a"),
        (
            "program.command=python train.py",
            "program.command: must be a list of words, not 'python train.py'; did you mean 'program.command=[python, ",
        ),
        ("lr=1e-3", "lr: unknown group; did you mean optimizer.lr=1e-3?"),
        (
            "optimizer.param_groups=[{match: '*', lrs: 1}]",
            "optimizer.param_groups.0.lrs: unknown key; did you mean optimizer.param_groups.0.lr?",
        ),
        ("tpu=v5", "tpu: no tpu named 'v5'; choices: "),
        ("tpu.zone=[1", "tpu.zone: '[1' cannot be parsed"),
        ("run.state_dir=/dev/null/state", "run.state_dir: "),
    ],
)
def test_a_wrong_value(capsys: pytest.CaptureFixture[str], typed: str, words: str) -> None:
    [line] = refused(capsys, *TRAINER, typed)
    assert line.startswith(words)


def test_a_misspelled_experiment(capsys: pytest.CaptureFixture[str]) -> None:
    [line] = refused(capsys, "+experiment=quickstrat")
    assert line.startswith("experiment: no experiment named 'quickstrat'; did you mean experiment=quickstart?")


@pytest.mark.parametrize("type_", ["v5litepod-16", "v2-8", "v4-32"])
def test_a_type_that_a_plane_lacks_is_told_by_plan(capsys: pytest.CaptureFixture[str], type_: str) -> None:
    assert main.run(["plan", *TRAINER, "tpu.plane=compute_engine", f"tpu.accelerator_type={type_}"]) == 2
    shown = "".join(capsys.readouterr())
    assert "error: tpu.plane: Compute Engine has no " in shown
    assert "Traceback" not in shown


def test_every_mistake_is_reported_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    found = refused(capsys, *TRAINER, "tpu.zoen=x", "mesh.data=3", "network.nat=false", "tpu.external_ip=false")
    assert sorted(line.partition(":")[0] for line in found) == ["mesh", "network.nat", "tpu.zoen"]
    assert refused(capsys, "up", "cloud=local") == [
        "program: nothing says what to run; give +experiment=NAME, -- PROGRAM …, or a run's name"
    ]
    found = refused(capsys, "up", "cloud=local", "model=tiny")
    assert [line.partition(":")[0] for line in found] == ["data", "loop", "optimizer"]


def test_a_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        found = refused(capsys, *TRAINER, f"cloud.port={taken.getsockname()[1]}")
    assert len(found) == 1
    assert "cloud.port" in found[0]


def test_an_unknown_fault(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["plan", *TRAINER, "cloud.faults=[{kind: meteor}]"]) == 2
    assert "error: cloud.faults: unknown kind 'meteor'; known: preempted" in capsys.readouterr().out
    assert main.run(["up", *TRAINER, "cloud.faults=[{kind: meteor}]"]) == 2
    assert "cloud.faults: unknown kind 'meteor'; known: preempted" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (["lgos"], "unknown verb 'lgos'; did you mean 'logs'?"),
        (["quickstart"], "unknown verb 'quickstart'; did you mean +experiment=quickstart?"),
        (["up", "--fast"], "up: has no --fast; flags: -m, --multirun, --run, "),
        (["plan", "run.seed", "=", "1"], "plan: 'run.seed = 1' is not how a value is set; did you mean run.seed=1?"),
        (["plan", "program.command=[python", "t.py]"], "plan: a shell splits at spaces; put the override in quotes: '"),
        (["plan", "--experiment=quickstart"], "plan: has no --experiment; an experiment is chosen with +experi"),
        (["logs", "--worker", "9", *TRAINER], "--worker 9: the pod has workers 0 to 3"),
        (["runs", "--diff", "quickstart-aaaa1111"], "--diff: takes 2 words; see slipway runs --help"),
        (["localcloud", "explode"], "action: unknown choice 'explode'; choices: start, stop, w"),
        (["localcloud"], "needs start or stop or wipe or env or requests; see slipway localcloud --help"),
        (["forward"], "needs PORT[:REMOTE]; see slipway forward --help"),
        (["runs", "--last", "0"], "--last: must be a whole number of at least 1, not '0'"),
        (["generate", "--top-p", "2"], "--top-p: must be a number above 0 and at most 1, not '2'"),
        (["generate", "--seed", "x"], "--seed: must be a whole number, not 'x'; see slipway generate --help"),
        (["forward", "8080", "demo"], "PORT[:REMOTE]: invalid port 'demo'; use 8888, or 9999:8888 for local port 9"),
        (["forward", "demo", "8080:"], "PORT[:REMOTE]: invalid port '8080:'; use 8888"),
        (["logs", "--worker"], "--worker: takes one word; see slipway logs --help"),
    ],
)
def test_a_wrong_command_line(capsys: pytest.CaptureFixture[str], typed: list[str], words: str) -> None:
    [line] = refused(capsys, *typed)
    assert line.startswith(words)


def test_a_refused_up_is_not_this_folders_last_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`status` after it asked for Google's credentials instead of showing the run before."""
    before = LastCommand(("cloud=local",), run="q-1")
    save_last_command(before, Path.cwd())
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/no/such.json")
    assert main.run(["up", "--yes", *TRAINER, "cloud=gcp", "cloud.project=my-project-412345"]) == 2
    assert "GOOGLE_APPLICATION_CREDENTIALS names /no/such.json" in capsys.readouterr().err
    assert load_last_command(Path.cwd()) == before


def test_plan_of_a_sweep_needs_no_credentials(capsys: pytest.CaptureFixture[str]) -> None:
    sweep = ["-m", "+experiment=quickstart", "cloud=gcp", "env.packages=lock", "run.seed=0,1"]
    assert main.run(["plan", *sweep, "cloud.project=my-project-412345"]) == 0
    out = capsys.readouterr().out
    assert "2 runs, 0 finished, 2 remaining" in out
    assert "time     about 0.50 h (an estimate: " in out
    assert out.count("  0.3 h and $1.52 ($0.98 for TPUs, $0.54 for egress)") == 2
    assert "cost     about $3.05; per pod $3.92 per hour" in out
    assert "warning: cloud: no Google credentials, so nothing was checked" in out
    assert main.run(["plan", *sweep]) == 0
    assert re.search(
        "warning: cloud.project: is not set; set it, or run .*; `plan` goes on without it, `up` does not",
        " ".join(capsys.readouterr().out.split()),
    )
    assert main.run(["plan", "--json", *sweep]) == 0
    assert [run["state"] for run in json.loads(capsys.readouterr().out)["runs"]] == ["waiting", "waiting"]


def test_plan_needs_no_credentials(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["plan", "+experiment=gemma2b_gsm8k"]) == 0
    first = capsys.readouterr().out
    assert "v5litepod-16, 4 workers, 16 devices, spot in us-central1-a" in first
    assert first.count("no Google credentials") == 1
    steps = [line.removeprefix("  ? unknown  ") for line in first.splitlines() if line.startswith("  ? unknown  ")]
    for step in ("network", "nat", "firewall", "bucket", "TPU v5litepod-16 (4 workers)", "venv", "code", "verify"):
        assert any(line.startswith(step) for line in steps), step
    assert len(steps) >= 20
    assert "price    $3.92 per hour" in first
    assert main.run(["plan", "+experiment=gemma2b_gsm8k"]) == 0
    assert capsys.readouterr().out == first


def test_a_repository_may_hold_packages_of_the_same_names(tmp_path: Path) -> None:
    for module in ("conf", "trainer", "yaml"):
        (tmp_path / module).mkdir()
        (tmp_path / module / "__init__.py").write_text("raise SystemExit('not this one')\n")
    command = [sys.executable, "-m", "controller", "plan", "+experiment=quickstart", "run.name=x"]
    env = {**os.environ, "SLIPWAY_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [*command, "tpu.zone=here"], cwd=tmp_path, capture_output=True, text=True, env=env, check=False
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("error: tpu.zone: ")


def test_verbs_of_a_run_say_when_there_is_none_and_orphans_needs_none(capsys: pytest.CaptureFixture[str]) -> None:
    [words] = refused(capsys, "status")
    assert words.startswith("no run was started from this folder; give status its overrides")
    [words] = refused(capsys, "orphans")
    assert words.startswith("cloud.project: is not set")
    [words] = refused(capsys, "up", "+experiment=gemma2b_gsm8k")
    assert words.startswith("cloud.project: is not set")

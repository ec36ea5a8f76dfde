"""What status and plan print in 80 columns; slipway run -- PROGRAM without a config file; the column data of verify."""

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
from controller.cli.verbs.on_workers import data_cells
from controller.cli.verbs.up import _wrapped, format_permissions, format_plan
from controller.core.errors import ConfigError
from controller.core.finding import Finding
from controller.gcp.credentials import NO_CREDENTIALS
from controller.gcp.prices import hourly_price
from controller.plan.build import Plan, ResourcePreview, build_plan
from controller.plan.needed_permissions import permissions_of_plan
from controller.reconcile import Absent, Change, Diff, NotEnabled, Unknown
from controller.records import index
from controller.records.recorded_code import MissingInputsError
from controller.resources.pod.provisioner import Place, ProvisionerName
from controller.run import session
from controller.run.preview import RunPreview
from controller.ssh.fleet import WorkerError
from tests.composed import config_of
from tests.controller.conftest import SlipwayCli

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

    monkeypatch.setattr(session, "open_record", restored)


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


ONE = ["--tpu", "v5litepod-8", "cloud=local"]
PROGRAM = """
import json, os, sys
print("arguments", sys.argv[1:], os.path.basename(os.getcwd()))
json.dump({"loss": 0.5}, open(os.environ["SLIPWAY_RUN_DIR"] + "/summary.json", "w"))
"""


def with_program(line: str) -> main.Command:
    return main.with_program(main.parse(line.split()))


@pytest.mark.e2e
def test_a_program_runs_once_and_its_words_mean_the_same_run(slipway: SlipwayCli) -> None:
    folder = slipway.repository / "lab"
    folder.mkdir()
    (folder / "train.py").write_text(PROGRAM)
    words = ["lab/train.py", "--note", "a 'b' ${c} {d}"]

    def call(verb: str, *flags: str) -> tuple[int, str, str]:
        code = main.run([verb, *ONE, *flags, "--", "python", *words])
        return code, *slipway.capsys.readouterr()

    code, out, err = call("run")
    assert code == 0, err
    assert """arguments ['--note', "a 'b' ${c} {d}"] work""" in out
    [run] = json.loads(slipway("runs", "--json")[1])
    assert run["run"].startswith("train-")
    assert (run["state"], run["metrics.loss"]) == ("finished", 0.5)
    assert main.run(["status", "--json"]) == 0  # without words: the run that this folder started
    status, before = json.loads(slipway.capsys.readouterr().out), slipway.mutations()
    assert status["run"]["id"] == run["run"]
    code, out, _ = call("run")
    assert (code, slipway.mutations()) == (0, before)
    assert "arguments" not in out
    assert json.loads(call("plan", "--json")[1])["run"] == run["run"]
    (folder / "train.py").write_text(PROGRAM + "# edited\n")
    assert json.loads(call("plan", "--json")[1])["run"] != run["run"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("run", "run: no program; add it: -- python train.py"),
        ("plan --tpu v6e-8", "--tpu: no program"),
        ("run python train.py --lr 1", r"run: the program goes after --: slipway run -- python train.py --lr 1$"),
        ("run --tpu v6e-8 --yes train.py", r"goes after --: slipway run --tpu v6e-8 --yes -- train.py$"),
        ("train.py", "unknown verb 'train.py'; did you mean `slipway run -- train.py …`"),
        ("python train.py", "unknown verb 'python'; did you mean `slipway run -- python …`"),
        ("run --tpu v6e-8 cloud=here -- python -m lab", "--tpu v6e-8: cloud=here runs on this machine; leave --tpu"),
        ("plan cloud=here --zone us-a1-b -- python -m lab.train", "--zone us-a1-b: cloud=here runs on this machine"),
        ("up -- python train.py", "up: takes no command after --; `slipway run` runs a program"),
        ("status -- python train.py", "status: takes no command after --; only run, plan, rehearse, ssh, exec do"),
    ],
)
def test_what_is_no_program_is_said(line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        with_program(line)


def test_words_are_shown_as_the_overrides_that_they_stand_for_with_the_packages_that_nobody_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "train.py").touch()
    command = with_program("plan --tpu v6e-8 --name try budget.max_usd=5 -- python -m lab.train")
    known = ("program=command", "program.command=[python,-m,lab.train]", "run.name=try", "tpu=v6e_8")
    assert (command.overrides[:4], command.overrides[-1]) == (known, "budget.max_usd=5")
    shown = capsys.readouterr().err
    assert "(program=command 'program.command=[python,-m,lab.train]'" in " ".join(shown.split())
    assert "the workers get Slipway's own packages" in " ".join(shown.split())
    assert max(map(len, shown.splitlines())) <= 80
    with_program("rehearse -- python -m lab.train")
    assert "note:" not in capsys.readouterr().err
    for typed in ("env.secrets.KEY=sk-planted", "env.vars.HF_TOKEN=hf_planted", "notify.webhook=https://h/planted"):
        assert with_program(f"plan {typed} -- python -m lab.train").overrides[-1] == typed
        shown = capsys.readouterr().err
        assert "run.name=" in shown
        assert "planted" not in shown


LONG_PROJECT = "example.com:a-project-with-a-long-name"
OVERRIDES = (
    "+experiment=gemma2b_gsm8k",
    f"cloud.project={LONG_PROJECT}",
    "run.name=gemma2b-of-a-researcher-who-names-runs",
    "tpu.fallback_zones=[us-west4-a,us-west1-c,europe-west4-b,us-south1-a]",
    "network.name=network-of-the-whole-department-for-learning",
)


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Plan:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLIPWAY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "80")
    return build_plan(main.parse(["plan", *OVERRIDES]).options.config()[0], LONG_PROJECT, tmp_path)


def test_no_line_of_a_plan_is_wider_than_80_columns_and_nothing_is_cut(plan: Plan) -> None:
    changes = Diff("update", (Change("machine_type", "e2-small", "a-machine-with-quite-a-long-name-indeed-" * 2),))
    denied = Unknown("permission denied: compute.networks.get is missing on the project; ask for roles/viewer")
    rows = [ResourcePreview(resource, Absent(), resource.diff(Absent())) for resource in plan.resources]
    rows[1], rows[2] = replace(rows[1], observed=None, diff=changes), replace(rows[2], observed=denied, diff=None)
    busy = "the pod is busy with another-run: `up --queue` waits for it"
    finding = Finding("quota", "warning", "tpu.zone", "the quota of us-central1-a is 8 chips, and the plan needs 16")
    preview = RunPreview(plan, rows, [finding], hourly_price(plan.config, 0.0), busy)
    lines = _wrapped(format_plan(preview)).splitlines()
    too_wide = [line for line in lines if len(line) > 80]
    assert [line for line in too_wide if len(line.split()) > 1 and "gs://" not in line] == []
    shown = " ".join(" ".join(lines).split())
    last = f"+ create {rows[-1].resource.title}"
    titles = [row.resource.title for row in rows]
    for words in (plan.run_id, plan.node.name, plan.bucket, denied.why, str(finding), busy, last, *titles):
        assert " ".join(words.split()) in shown
    assert all(f" {zone}" in shown for zone in plan.config.tpu.all_zones)


def test_a_fresh_projects_plan_creates_what_disabled_apis_would_manage(plan: Plan) -> None:
    services = ("iam.googleapis.com", "tpu.googleapis.com")
    hidden = [NotEnabled(f"{service} is not enabled yet", service) for service in services]
    rows = [ResourcePreview(r, hidden[i % 2], None) for i, r in enumerate(plan.resources)]
    lines = format_plan(RunPreview(plan, rows, [], hourly_price(plan.config, 0.0), ""))
    assert [line for line in lines if "unknown" in line and "price" not in line] == []
    [note] = [line for line in lines if line.startswith("note: ")]
    assert note.startswith("note: 2 APIs not enabled yet (iam, tpu): `up` enables them.")
    created = [line.strip() for line in lines if line.startswith("  +")]
    assert created == [f"+ create   {resource.title}" for resource in plan.resources]


def test_missing_credentials_are_said_once(plan: Plan) -> None:
    rows = [ResourcePreview(r, Unknown(NO_CREDENTIALS), None) for r in plan.resources]
    price = hourly_price(plan.config, 0.0)
    finding = Finding("credentials", "warning", "cloud", "no Google credentials, so nothing was checked; run …")
    for findings in ([], [finding]):
        lines = format_plan(RunPreview(plan, rows, findings, price, ""))
        assert len([line for line in lines if "no Google credentials" in line]) == 1


def test_no_line_of_the_permissions_is_wider_than_80_columns(plan: Plan) -> None:
    needs = permissions_of_plan(plan.config, LONG_PROJECT)
    lines = _wrapped(format_permissions(needs)).splitlines()
    assert [line for line in lines if len(line) > 80] == []
    words = " ".join(" ".join(lines).split())
    assert all(need.permission in words and need.role in words for need in needs)

"""The machine of `cloud=here` in the place of a pod, and a plan without a cloud."""

from pathlib import Path
from typing import Any, cast

import pytest

from conf.schema.config import Config
from controller.checks.preflight import preflight
from controller.connect import open_context, project_of
from controller.context import Context
from controller.plan.build import Plan, build_plan
from controller.reconcile import Absent, Diff
from controller.resources.machines import ThisMachine, WorkerHygiene
from controller.ssh.fleet import DiskFullError
from tests.composed import config_of

NOBODY = cast(Context, None)
"""Nothing is asked of the context."""


def composed(state: Path, *words: str) -> Config:
    return config_of("+experiment=quickstart", "cloud=here", "cloud.backend=cpu", f"run.state_dir={state}", *words)


def planned(state: Path, *words: str) -> Plan:
    config = composed(state, *words)
    return build_plan(config, project_of(config), state.parent)


def test_a_machine_is_always_ready(tmp_path: Path) -> None:
    node = planned(tmp_path, "cloud.devices=2").node
    assert isinstance(node, ThisMachine)
    found = node.observe(NOBODY, {})
    assert (found.is_ready, found.is_managed, len(found.status.endpoints)) == (True, False, 1)
    assert found.status.uid == node.find(NOBODY).status.uid != ""
    assert (node.diff(found), node.diff(Absent())) == (Diff("none"), Diff("create"))
    assert found.title == "this machine: 2 virtual CPU devices"
    node.destroy(NOBODY)
    node.delete_all(NOBODY)
    assert node.pod_seen(NOBODY).is_usable
    assert "does not stop" in found.cannot_stop


def test_a_plan_has_only_the_environment_and_the_launch(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    kinds = [r.kind for r in plan.resources]
    assert kinds == ["code", "node", "ssh", "tidied", "venv", "worker code", "run config", "verified"]
    assert plan.bucket == str(tmp_path / "here/store")
    assert f"dir: {plan.bucket}/runs/{plan.run_id}\n" in plan.run_yaml
    assert "backend: cpu\n" in plan.run_yaml
    assert [r.title for r in plan.resources if r.kind == "venv"] == ["no venv: the Python that runs Slipway"]


@pytest.mark.parametrize(
    ("words", "venv"),
    [
        (["cloud.python=env", "env.packages=lock"], "packages"),
        (["program=command", "program.command=[a]", "program.setup=[[b]]"], "with the packages of this one"),
        (["env.packages=requirements", "env.requirements=missing.txt"], "no venv"),
    ],
)
def test_the_python_is_slipway_s_own_or_that_of_env(tmp_path: Path, words: list[str], venv: str) -> None:
    (tmp_path / "train.py").touch()
    [title] = [r.title for r in planned(tmp_path / "state", *words).resources if r.kind == "venv"]
    assert venv in title


def test_results_may_be_in_a_bucket(tmp_path: Path) -> None:
    plan = planned(tmp_path, "cloud.results=gs://mine/here/", f"cloud.folder={tmp_path}/kept")
    assert f"dir: gs://mine/here/runs/{plan.run_id}\n" in plan.run_yaml
    assert plan.placeholders.environment({})["SLIPWAY_RUN_URL"] == f"gs://mine/here/runs/{plan.run_id}"
    assert plan.bucket == f"{tmp_path}/kept"


def test_nothing_of_google_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import controller.connect as connect

    def asked(*_: Any) -> Any:
        raise AssertionError("Google was asked for")

    for name in ("default_project", "application_default_credentials", "GoogleClient"):
        monkeypatch.setattr(connect, name, asked)
    config = composed(tmp_path)
    assert not [finding for finding in preflight(config) if finding.severity == "error"]
    with open_context(config) as (context, emulator):
        assert (context.is_billed, emulator, context.project) == (False, None, "here")
        node = planned(tmp_path).node.observe(context, {})
        assert len(node.fleet(context)) == 1


@pytest.mark.parametrize(("here", "advised"), [(True, False), (False, True)])
def test_a_full_disk_is_not_mended_by_a_verb_that_this_machine_lacks(
    monkeypatch: pytest.MonkeyPatch, here: bool, advised: bool
) -> None:
    looks = {"done": [], "not_done": [], "free_gb": 0.5, "active": None}
    hygiene = WorkerHygiene(name="pod", node="node/pod", min_free_gb=3.0, here=here, state=("tidy",))
    monkeypatch.setattr(WorkerHygiene, "ask", lambda *_: [looks])
    with pytest.raises(DiskFullError, match=r"worker 0 has 0\.5 GB free, but 3 GB are required; free some") as told:
        hygiene.apply(NOBODY, {}, Diff("none"))
    assert ("slipway down" in str(told.value)) == advised


def test_the_plan_of_this_machine_knows_that_it_is_one(tmp_path: Path) -> None:
    [hygiene] = [r for r in planned(tmp_path).resources if isinstance(r, WorkerHygiene)]
    assert hygiene.here

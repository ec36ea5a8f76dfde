"""What `plan` prints in 80 columns: every resource with its whole name, every change and finding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from controller.cli import main
from controller.cli.verbs.run.plan import _wrapped, format_permissions, format_plan
from controller.core.finding import Finding
from controller.gcp.credentials import NO_CREDENTIALS
from controller.gcp.prices import hourly_price
from controller.plan.build import Plan, build_plan
from controller.plan.permissions import permissions_of_plan
from controller.plan.preview import ResourcePreview
from controller.reconcile.resource import Absent, Change, Diff, NotEnabled, Unknown
from controller.run.preview import RunPreview

PROJECT = "example.com:a-project-with-a-long-name"
OVERRIDES = (
    "+experiment=gemma2b_gsm8k",
    f"cloud.project={PROJECT}",
    "run.name=gemma2b-of-a-researcher-who-names-runs",
    "tpu.fallback_zones=[us-west4-a,us-west1-c,europe-west4-b,us-south1-a]",
    "network.name=network-of-the-whole-department-for-learning",
)


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Plan:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLIPWAY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "80")
    return build_plan(main.parse(["plan", *OVERRIDES]).options.config()[0], PROJECT, tmp_path)


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
    needs = permissions_of_plan(plan.config, PROJECT)
    lines = _wrapped(format_permissions(needs)).splitlines()
    assert [line for line in lines if len(line) > 80] == []
    words = " ".join(" ".join(lines).split())
    assert all(need.permission in words and need.role in words for need in needs)

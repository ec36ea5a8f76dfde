"""Every experiment can be planned by someone who has set a project and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from controller.checks.preflight import preflight
from controller.cli import main
from controller.config.compose import config_groups
from controller.inputs.code import UnfetchedSnapshot
from controller.plan.build import build_plan
from controller.reconcile.reconciler import topological_order
from tests.conftest import deep

FETCHING = ("gsm8k_local", "lm_3b_v6e8", "nanochat_cpp", "nanochat_d16", "sft_gsm8k")
OTHERS = sorted({*config_groups()["experiment"]} - {*FETCHING})


@pytest.mark.parametrize("name", [*FETCHING, *deep(*OTHERS)])
def test_a_project_is_enough(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPWAY_HOME", str(tmp_path))
    config, findings = main.parse(["plan", f"+experiment={name}", "cloud.project=a-project"]).options.config()
    errors = {found.key for found in [*findings, *preflight(config)] if found.severity == "error"}
    assert errors == ({"budget.max_hours"} if config.program.endless else set()), "what never ends needs a limit, too"
    plan = build_plan(config, "a-project", tmp_path, UnfetchedSnapshot(tmp_path, (), "0" * 40))
    assert topological_order(plan.before_pod), "what is made before the pod needs nothing that is made after it"
    if config.program.kind == "trainer":
        assert "assets://" not in plan.run_yaml, "each is a folder of the bucket"

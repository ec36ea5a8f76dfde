"""Every experiment can be planned; the plans of the guides' programs say what the guide says, where that is right."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from conf.schema.config import Config
from controller.checks.preflight import preflight
from controller.cli import main
from controller.config.compose import config_groups
from controller.inputs.code import UnfetchedSnapshot
from controller.plan.build import Plan, build_plan
from controller.reconcile import topological_order
from tests.conftest import deep

EXPERIMENTS = {
    # accelerator type, zone, workers, runtime version, Python
    "simply_gemma2_2b_gsm8k": ("v5litepod-16", "us-central1-a", 4, "v2-alpha-tpuv5-lite", "3.12"),
    "trm_e1_1_baseline_xla": ("v4-32", "us-central2-b", 4, "tpu-ubuntu2204-base", "3.11"),
    "trm_stable1": ("v4-64", "us-central2-b", 8, "tpu-ubuntu2204-base", "3.11"),
    "nanochat_d16_v5e8": ("v5litepod-8", "us-west4-a", 1, "v2-alpha-tpuv5-lite", "3.11"),
    "nanochat_d16_v6e4": ("v6e-4", "asia-northeast1-b", 1, "v2-alpha-tpuv6e", "3.11"),
    "nash_mhc_original": ("v6e-8", "us-east5-b", 1, "v2-alpha-tpuv6e", "3.11"),
}

FETCHING = ("gsm8k_local", "lm_3b_v6e8", "nanochat_cpp", "nanochat_d16", "sft_gsm8k")
OTHERS = sorted({*config_groups()["experiment"]} - {*FETCHING})


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A git repository in the place of the program's own, which is elsewhere; the words that name it."""
    folder = tmp_path / "program"
    folder.mkdir()
    (folder / "README.md").write_text("a program\n")
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.com", "-C", str(folder)]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    monkeypatch.setenv("SLIPWAY_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    return [f"code.repository.url=file://{folder}", f"code.repository.commit={head}"]


def planned(name: str, *words: str) -> tuple[Config, Plan]:
    words = ("cloud.project=a-project", "budget.max_hours=9", *words)
    config, findings = main.parse(["plan", f"+experiment={name}", *words]).options.config()
    assert [str(finding) for finding in findings if finding.severity == "error"] == []
    assert preflight(config) == findings
    return config, build_plan(config, "a-project", Path.cwd())


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


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_plan_can_be_looked_at_before_the_program_can_be_cloned(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLIPWAY_HOME", str(tmp_path / "home"))
    elsewhere = f"code.repository.url=file://{tmp_path}/nowhere"
    words = [f"+experiment={name}", "cloud.project=a-project", "budget.max_hours=9", elsewhere]
    code = main.run(["plan", *words])
    out, _ = capsys.readouterr()
    assert code == 0, out
    assert f"run      {name}-????????" in out
    assert f"warning: code.repository: file://{tmp_path}/nowhere: cannot clone: fatal: " in out
    assert "warning: program.caution: the original program " in out
    assert "in the bucket (not fetched yet)" in out
    assert re.search(r"^  \? unknown  verify ", out, re.M)
    assert "error:" not in out
    assert main.run([*words, "--yes"]) == 2
    if name == "trm_stable1":
        capsys.readouterr()
        assert main.run(["plan", "--json", *words]) == 0
        assert "in the bucket (not fetched yet)" in capsys.readouterr().out


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_plan_is_whole(name: str, repository: list[str]) -> None:
    config, plan = planned(name, *repository)
    kind, zone, workers, runtime, python = EXPERIMENTS[name]
    found = (config.tpu.accelerator_type, config.tpu.zone, plan.node.spec.workers, plan.node.spec.runtime_version)
    assert found == (kind, zone, workers, runtime)
    assert config.env.python == python
    kinds = {resource.kind for resource in plan.resources}
    assert kinds >= {"services", "bucket", "code", "node", "ssh", "venv", "setup", "run config"}
    network = {"network", "subnet", "router", "nat", "firewall"}
    assert network & kinds == (set() if config.tpu.adopt else network)  # an adopted pod has a network already
    assert plan.snapshot.files == ("README.md",)
    assert not [word for word in plan.argv if "{" in word], plan.argv
    assert config.env.vars.get("WANDB_MODE", "offline") == "offline"
    assert not {"WANDB_API_KEY", "HF_TOKEN"} & set(config.env.vars)


def test_a_sweep_of_such_a_program_says_so_once(repository: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "-m", "+experiment=trm_stable1", "cloud.project=a-project", *repository, "run.seed=0,1"]
    assert main.run(words) == 0
    out = capsys.readouterr().out
    assert out.count("warning: program.caution: the original program stops before the first update") == 1


def variables(plan: Plan) -> dict[str, str]:
    placed: Any = next(resource for resource in plan.resources if resource.kind == "run config")
    return dict(placed.variables)


def test_simply_reads_its_assets_from_the_bucket(repository: list[str]) -> None:
    _, plan = planned("simply_gemma2_2b_gsm8k", *repository)
    folder = f"--experiment_dir=gs://{plan.bucket}/runs/{plan.run_id}"
    config = "--experiment_config=gemma2_2b_gsm8k_2k_rl_16"
    assert plan.argv == ["python", "launch_simply.py", config, folder, "--alsologtostderr"]
    found = variables(plan)
    for name in ("SIMPLY_MODELS", "SIMPLY_DATASETS", "SIMPLY_VOCABS"):
        assert found[name].startswith(f"gs://{plan.bucket}/assets/simply-")
        assert found[name].endswith("/")


def test_trm_asks_on_demand_first_and_no_xla_dist(repository: list[str]) -> None:
    config, plan = planned("trm_e1_1_baseline_xla", *repository)
    assert config.tpu.capacity == ("on_demand", "spot")
    assert plan.argv == ["python", "kellen/src/train_tpu.py", "--config=config.yaml"]
    found = variables(plan)
    assert found["PJRT_DEVICE"] == "TPU"
    assert int(found["TRM_CHIPS"]) == config.topology.chips
    assert found["TRM_DATASET"].startswith(f"gs://{plan.bucket}/assets/sudoku-extreme-1k-aug-1000")
    assert "xla_dist" not in str(config.program)


def test_stable_1_is_adopted(repository: list[str]) -> None:
    config, plan = planned("trm_stable1", *repository)
    assert (config.tpu.adopt, plan.node.name, plan.node.is_managed) == (True, "stable-1", False)
    assert plan.argv[:4] == ["python", "spawn.py", "kellen/experiments/train_tpu.py", "--config-name=baseline"]


def flags(plan: Plan) -> dict[str, str]:
    return dict(word.removeprefix("--").split("=") for word in plan.argv if "=" in word)


@pytest.mark.parametrize(("name", "length"), [("nanochat_d16_v5e8", 1024), ("nanochat_d16_v6e4", 2048)])
def test_nanochat_accumulates_eight_times_on_both_machines(name: str, length: int, repository: list[str]) -> None:
    config, plan = planned(name, *repository)
    assert (int(flags(plan)["max_seq_len"]), int(flags(plan)["device_batch_size"])) == (length, 8)
    assert 524_288 / (8 * length * config.topology.devices) == 8
    assert variables(plan)["NANOCHAT_GCS_CHECKPOINT_BUCKET"] == f"gs://{plan.bucket}/runs/{plan.run_id}/checkpoints"


def test_the_mesh_of_nash_mhc_has_the_devices_of_its_pod(repository: list[str]) -> None:
    config, plan = planned("nash_mhc_original", *repository)
    assert (
        math.prod(int(flags(plan)[f"mesh-{axis}"]) for axis in ("data", "fsdp", "tp")) == config.topology.devices == 8
    )


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_tiny_changes_no_command(name: str) -> None:
    """So that a rehearsal proves the very words that will run on the pod."""
    full, _ = main.parse(["plan", f"+experiment={name}"]).options.config()
    tiny, _ = main.parse(["plan", f"+experiment={name}", "scale=tiny"]).options.config()
    assert tiny.program.command == full.program.command
    assert tiny.env.vars == full.env.vars
    assert (tiny.code.stand_in, tiny.code.repository) == (True, None)


def scripts(name: str) -> list[str]:
    """The Python that a program's setup holds."""
    config, _ = main.parse(["plan", f"+experiment={name}"]).options.config()
    return [argv[2] for argv in config.program.setup if argv[:2] == ("python", "-c")]


@pytest.mark.parametrize("name", ["simply_gemma2_2b_gsm8k", "trm_e1_1_baseline_xla"])
def test_setup_writes_programs_that_compile(name: str, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", scripts(name)[0]], cwd=tmp_path, check=True)
    written = sorted(tmp_path.glob("*.py"))
    assert written
    for path in written:
        compile(path.read_text(), path.name, "exec")


def test_setup_makes_one_whole_config_of_the_studys_two(tmp_path: Path) -> None:
    configs = tmp_path / "kellen" / "configs"
    (configs / "experiments").mkdir(parents=True)
    base = {
        "data": {"dataset_path": "gs://your-bucket-name/data"},
        "training": {"global_batch_size": 1024, "epochs": 50},
    }
    base |= {"checkpoint": {"bucket": "your-bucket-name", "load_from": None}, "logging": {}}
    (configs / "base_sudoku_tpu.yaml").write_text(yaml.safe_dump(base))
    own = {"defaults": ["../base_sudoku_tpu"], "training": {"global_batch_size": 256}}
    (configs / "experiments" / "e1_1_baseline.yaml").write_text(yaml.safe_dump(own))
    config, _ = main.parse(["plan", "+experiment=trm_e1_1_baseline_xla"]).options.config()
    places = {"TRM_DATASET": "gs://b/assets/s", "TRM_RUN_DIR": "gs://b/runs/r"}
    environment = {**os.environ, **config.env.vars, **places}
    subprocess.run(
        [sys.executable, "-c", scripts("trm_e1_1_baseline_xla")[1]], cwd=tmp_path, env=environment, check=True
    )
    made = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert "defaults" not in made
    assert made["training"] == {"global_batch_size": 256, "epochs": 50, "per_worker_batch_size": 16}
    assert made["checkpoint"] == {"bucket": "gs://b", "save_dir": "runs/r/checkpoints", "load_from": "latest"}
    assert (made["data"]["dataset_path"], made["data"]["local_cache_dir"]) == ("gs://b/assets/s", "sudoku")
    assert "your-bucket" not in str(made)

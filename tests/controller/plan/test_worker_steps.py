"""The plan says who builds and fetches an asset, what it takes and costs, and what a pod of samplers is."""

from pathlib import Path

import pytest
import yaml

from conf.formats import POD_VARIABLE
from conf.schema.training.loop import GrpoLoop
from conf.schema.training.run_yaml import RunFile
from controller.inputs.code import CodeSnapshot, UnfetchedSnapshot
from controller.plan.build import Plan, build_plan
from controller.plan.samplers import (
    dearest_pod,
    describe_samplers,
    num_sampler_pods,
    owner_of,
    price_of_pods,
    sampler_configs,
    sampler_plans,
)
from controller.plan.worker_steps import describe_build, describe_fetch
from controller.recovery.responses import GIVE_UP, PodCapabilities, Verdict, VerdictKind, decide
from controller.resources.software import Venv, WorkerCode
from controller.resources.uploads.bucket_assets import PodBuiltAsset, UploadedAsset, remote_argv
from tests.composed import config_of
from tests.controller.checks.plans import plan_of as plan_with
from trainer.distributed.agreement import sampling_facts

GB = 10**9


def plan_of(folder: Path, words: str, *overrides: str) -> Plan:
    """The plan of a run with an asset that these words build, of which some are files of the repository."""
    for name in ("make.py", "data/rows.csv", "secret/keys.csv", "both/a", "both/b"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    given = ["cloud.project=acme", "program=command", "program.command=[a]", f"run.state_dir={folder}/state"]
    config = config_of(*given, f"+assets.models.w={{build: [{words}]}}", *overrides)
    return build_plan(config, "acme", folder, CodeSnapshot(folder, ("both/a", "data/rows.csv", "make.py")))


@pytest.mark.parametrize(
    ("words", "bound"),
    [
        ("python, make.py, data, '{output}'", ""),
        ("sh, -c, 'date > {output}/x'", ""),
        ("python, make.py, 'hf://a/b/x', '--to=gs://b/c', '{output}'", ""),
        ("python, make.py, /dev/null, '{output}'", ""),
        ("sh, -c, 'cp -r ~/.cache/simply/. {output}'", "it names ~/.cache/simply/., a path of this machine"),
        ("python, make.py, '--from=/home/anna/x', '{output}'", "it names /home/anna/x, a path of this machine"),
        ("python, make.py, ../x, '{output}'", "it names ../x, a path of this machine"),
        ("python, make.py, secret, '{output}'", "it reads secret/keys.csv, which is not among the shipped files"),
        ("python, make.py, both, '{output}'", "it reads both/b, which is not among the shipped files"),
        ("slipway, trainer.tokenizer, '{output}'", "trainer.tokenizer is not in the code that program=command ships"),
        ("slipway, get, '{output}'", "`slipway get` is a verb of this machine"),
    ],
)
def test_a_build_runs_elsewhere_unless_it_needs_this_machine(tmp_path: Path, words: str, bound: str) -> None:
    plan = plan_of(tmp_path, words, "env.packages=none")
    [asset] = plan.assets
    assert asset.recipe is not None
    assert asset.recipe.bound == bound
    assert plan.get(UploadedAsset)
    plan = plan_of(tmp_path, words, "+assets.models.w.fetch_on=pod", "env.packages=none")
    assert any(isinstance(r, PodBuiltAsset) for r in plan.resources) == (not bound)


def test_a_module_of_the_trainer_runs_in_the_shipped_code(tmp_path: Path) -> None:
    config = config_of("+experiment=nanochat_d16", "cloud.project=acme", f"run.state_dir={tmp_path}")
    plan = build_plan(config, "acme", tmp_path)
    recipe = next(asset.recipe for asset in plan.assets if asset.recipe)
    assert recipe.bound == ""
    assert remote_argv(recipe)[:4] == ["python", "-m", "trainer.tokenizer", "train"]
    [source] = recipe.sources
    assert (source.kind, source.repository) == ("dataset", "karpathy/fineweb-edu-100b-shuffle")
    on_pod = config_of(
        "+experiment=nanochat_d16", "cloud.project=acme", f"run.state_dir={tmp_path}", "assets.fetch_on=pod"
    )
    plan = build_plan(on_pod, "acme", tmp_path, UnfetchedSnapshot(tmp_path, (), "0" * 40))
    assert {plan.get(WorkerCode).id, plan.get(Venv).id} <= set(plan.get(PodBuiltAsset).depends_on)


SOURCE = "{source: 'hf://acme/open'}"


@pytest.mark.parametrize(
    ("overrides", "size", "expected"),
    [
        ((), GB - 1, "through this machine, about 1 min at 100 Mbit/s"),
        (
            ("budget.usd_per_hour=18",),
            10 * GB,
            "through this machine, about 13 min at 100 Mbit/s; with assets.models.weights.fetch_on=pod by worker 0 of "
            "the pod, about 3 min and $1.45, of which $0.45 for NAT",
        ),
        (("recovery.driver=bastion",), 10 * GB, "through this machine, about 13 min at 100 Mbit/s"),
        (("cloud=here",), 10 * GB, "through this machine, about 13 min at 100 Mbit/s"),
        (("assets.fetch_on=auto",), 1, "through this machine, about 1 min at 100 Mbit/s"),
        (("assets.fetch_on=pod", "+assets.models.weights.fetch_on=vm"), 1, "through this machine, about 1 min at 100 "
         "Mbit/s"),
        (("assets.fetch_on=pod", "budget.usd_per_hour=18", "network.nat=false"), 10 * GB,
         "by worker 0 of the pod, about 3 min and $1.00"),
        (("assets.fetch_on=pod", "cloud=local"), 10 * GB, "by worker 0 of the pod, about 3 min"),
    ],
)  # fmt: skip
def test_the_trade_off_is_told(tmp_path: Path, overrides: tuple[str, ...], size: int, expected: str) -> None:
    plan = plan_with(tmp_path, SOURCE, *overrides)
    assert describe_fetch(plan.config, plan.assets[0], size, 0.0) == expected


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ((), "on this machine"),
        (("assets.fetch_on=pod", "+assets.models.weights.fetch_on=laptop"), "on this machine"),
        (("assets.fetch_on=pod", "budget.usd_per_hour=18"), "on worker 0 of the pod, $18.00 per hour until it is done"),
    ],
)
def test_who_builds_is_told(tmp_path: Path, overrides: tuple[str, ...], said: str) -> None:
    plan = plan_with(tmp_path, "{build: [make, 'hf://a/b', '{output}']}", *overrides)
    assert describe_build(plan.config, plan.assets[0], 0.0) == f"built {said}"


QUICKSTART = "+experiment=quickstart"
PODS = ("loop.sampler.pods=2", "loop.async_depth=1")
SMALL = (*PODS, "loop.sampler.tpu=v5litepod-1")


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.setenv("SLIPWAY_HOME", str(tmp_path))
    faults = "cloud.faults=[{kind: preempted, after_seconds: 1}]"
    words = (*SMALL, "env.vars.MINE=x", "budget.max_hours=3", "tpu.runtime_version=mine", faults)
    return build_plan(config_of(QUICKSTART, *words), "acme", tmp_path)


def test_a_run_without_them_has_none() -> None:
    config = config_of(QUICKSTART)
    assert (num_sampler_pods(config), sampler_configs(config), describe_samplers(config)) == (0, (), "")


def test_each_has_a_name_of_its_own_one_worker_and_nothing_that_outlasts_it(plan: Plan, tmp_path: Path) -> None:
    plans = sampler_plans(plan, tmp_path)
    assert [one.run_id for one in plans] == [f"{plan.run_id}-sampler-{number}" for number in (1, 2)]
    assert [one.node.name for one in plans] == [f"{plan.node.name}-sampler-{number}" for number in (1, 2)]
    for number, one in enumerate(plans, 1):
        config = one.config
        assert (one.node.spec.accelerator_type, one.node.spec.workers) == ("v5litepod-1", 1)
        assert config.env.vars == {**plan.config.env.vars, POD_VARIABLE: str(number)}
        assert (config.cleanup.on_success, config.cleanup.on_failure) == ("delete", "delete")
        assert config.budget == plan.config.budget
        assert config.tpu.runtime_version is None, "that of another type"
        assert config.cloud.kind == "local"
        assert config.cloud.faults == (), "the trainer's would strike twice"
        assert sampler_plans(one, tmp_path) == ()
        assert (owner_of(one), one.bucket) == (plan.run_id, plan.bucket)
        assert one.snapshot.sha256 == plan.snapshot.sha256
    assert owner_of(plan) == plan.run_id


def test_a_sampler_and_the_trainer_agree_on_all_but_the_hardware(plan: Plan, tmp_path: Path) -> None:
    one = sampler_plans(plan, tmp_path)[0]
    own, others = (RunFile.model_validate(yaml.safe_load(text)) for text in (plan.run_yaml, one.run_yaml))
    assert sampling_facts(own) == sampling_facts(others)
    assert (own.dir, own.pod.workers) == (others.dir, 4)
    assert (others.pod.workers, others.pod.devices, others.pod.accelerator_type) == (1, 1, "v5litepod-1")


def test_an_equal_slice_keeps_its_image_and_a_task_is_a_share_of_all_samplers() -> None:
    loop = config_of(QUICKSTART, *SMALL, "loop.prompts_per_step=16").loop
    assert isinstance(loop, GrpoLoop)
    assert loop.prompts_per_task == 8
    words = (*PODS, "tpu.accelerator_type=v5litepod-8", "tpu.runtime_version=mine")
    assert sampler_configs(config_of(QUICKSTART, *words))[0].tpu.runtime_version == "mine"


def test_a_sampler_that_ends_with_an_error_gives_its_pod_back_at_once() -> None:
    """It has been started again on its worker before; and one that found no trainer should not be billed."""
    [config, _] = sampler_configs(config_of(QUICKSTART, *SMALL))
    failed = Verdict(VerdictKind.PROGRAM_ERROR, ("worker 0 exited with code 7",))
    assert decide(failed, [], None, config.recovery, PodCapabilities()).response == GIVE_UP
    assert config.cleanup.on_failure == "delete"


def test_their_price_is_added() -> None:
    config = config_of(QUICKSTART, *SMALL, "cloud=gcp", "cloud.project=acme")
    own = price_of_pods(config_of(QUICKSTART, "cloud=gcp", "cloud.project=acme"), 0.0)
    total = price_of_pods(config, 0.0)
    assert own.tpu is not None
    assert total.tpu == pytest.approx(own.tpu * (16 + 2) / 16)
    assert total.source.endswith(", 2 of samplers included")
    assert dearest_pod(config, 0.0).tpu == own.tpu
    assert describe_samplers(config, " and ") == " and 2 pods of v5litepod-1"

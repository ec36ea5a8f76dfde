"""What a pod of samplers is, beside the trainer's."""

from pathlib import Path

import pytest
import yaml

from conf.formats import POD_VARIABLE
from conf.schema.training.loop import GrpoLoop
from conf.schema.training.run_yaml import RunFile
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
from controller.recovery.policy import GIVE_UP, PodCapabilities, Verdict, VerdictKind, decide
from tests.composed import config_of
from trainer.distributed.agreement import sampling_facts

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

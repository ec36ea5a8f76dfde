"""What each check says of a config that is wrong, and that it is silent of one that is right."""

from __future__ import annotations

import pytest

from conf.schema.config import Config
from conf.schema.infra.topology import find_topology
from conf.schema.training.schedule import PiecewiseSchedule
from controller.checks.preflight import preflight
from controller.checks.training import schedule_ends_late
from controller.config.compose import compose

GCP = ["cloud.project=acme", "program=command", "program.command=[python,train.py]"]
GRPO = ["+experiment=quickstart", "cloud=gcp", "cloud.project=acme", "tpu.capacity=on_demand"]
LM = ["program=trainer", "data=jsonl", "data.path=x", "model=tiny", "loop=lm", "optimizer=adamw", "cloud.project=acme"]
SAMPLER_POD = ["loop.async_depth=2", "loop.sampler.pods=1", "loop.sampler.tpu=v5litepod-1"]
TRC = "cloud.trc={zones: [us-central2-b], free_until: 2026-12-31}"


def config(*overrides: str) -> Config:
    found, problems = compose(overrides)
    assert not problems
    assert found is not None
    return found


def words(*overrides: str) -> list[str]:
    return [f"{finding.check}: {finding.severity} {finding}" for finding in preflight(config(*overrides))]


def test_what_is_right_is_not_commented_on() -> None:
    assert words(*GCP, "cloud.project=my-project-412345", "cloud.bucket=my-project-412345-data") == []
    assert words(*GCP) == []
    assert words(*GRPO) == []
    assert words("+experiment=quickstart") == []


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["loop.sampler.workers=1"], "async_depth: samplers on other workers and replay need 1 or more"),
        (
            ["loop.sampler.workers=1", "loop.async_depth=1", "loop.replay=x"],
            "replay: nothing is sampled; use sampler.workers=0, pods=0",
        ),
        (
            ["loop.sampler.workers=1", "loop.async_depth=1", "loop=dapo", "loop.max_resample_rounds=1"],
            "max_resample_rounds: samplers on other workers draw each rollout once; use 0",
        ),
        (["loop.async_depth=9"], "less than or equal to 8"),
    ],
)
def test_samplers_on_other_workers_need_rollouts_ahead(overrides: list[str], said: str) -> None:
    _, problems = compose([*GRPO, *overrides])
    assert any(said in str(problem) for problem in problems), problems


def test_samplers_that_correct_for_their_age_are_not_commented_on() -> None:
    samplers = ["loop.async_depth=2", "loop.sampler.workers=2", "loop.rollout_correction.rollout_is=token"]
    bounds = ['+env.vars.TPU_PROCESS_BOUNDS="1,1,1"', '+env.vars.TPU_CHIPS_PER_PROCESS_BOUNDS="2,2,1"']
    assert words(*GRPO, *samplers, *bounds) == []


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            [*GCP, "network.nat=false", "tpu.external_ip=false"],
            "way_out: error network.nat: workers without an external",
        ),
        ([*GCP, "network.ssh_source_ranges=[0.0.0.0/0]"], "ssh_open: error network.ssh_source_ranges: 0.0.0.0/0"),
        (
            [*GCP, "network.open_to_world=true"],
            "ssh_open: warning network.open_to_world: SSH is open to the whole internet",
        ),
        (
            [*GCP, "ssh.method=iap", "network.ssh_source_ranges=[]"],
            "ssh_way: error network.ssh_source_ranges: ssh.method",
        ),
        ([*GCP, "ssh.method=external"], "ssh_way: error network.laptop: ssh.method=external, but only IAP"),
        (
            [*GCP, "network.laptop=auto", "tpu.external_ip=false"],
            "ssh_way: warning network.laptop: no worker has an extern",
        ),
        ([*GCP, "ssh.method=external", "tpu.external_ip=false"], "ssh_way: error tpu.external_ip: ssh.method=external"),
        (
            [*GCP, "tpu.zone=us-central1-f"],
            "zone: warning tpu.zone: us-central1-f has no v5e; zones that have it: asia-",
        ),
        (
            [*GCP, "tpu.runtime_version=v6e-ubuntu-2404"],
            "runtime: error tpu.runtime_version: v6e-ubuntu-2404 is an image for v6e",
        ),
        (["program=command", "cloud.project=acme"], "command: error program.command: is empty"),
        ([*GCP, "code.stand_in=true"], "stand_in: error code.stand_in: stand-ins need the emulated cloud"),
        ([*GRPO, "mesh.data=3"], "mesh: error mesh: 3 x 1 x 1 does not match the 16 devices of v5litepod-16"),
        ([*GRPO, "mesh.tensor=16", "mesh.data=1"], "weights_split: error model.num_heads: "),
        (
            [*GRPO, "loop.prompts_per_step=3"],
            "batch_split: error loop.prompts_per_step: 3 prompts cannot be split evenly over 16",
        ),
        (
            ["+experiment=trm_sudoku", "loop.batch_size=500"],
            "batch_split: error loop.batch_size: 500 puzzles cannot be split evenly over 16 devices; use 496 or 512",
        ),
        (
            ["+experiment=trm_sudoku", "model=tiny"],
            "model_kind: error model.kind: loop.kind=puzzle cannot train a decoder; use loop=puzzle with model=trm",
        ),
        (
            [
                *GRPO,
                "model=llama3_1b",
                "model.num_kv_heads=32",
                "model.attention_pattern=G",
                "model.attention_form=maha",
            ],
            "attention_form: error model.attention_form: maha cannot generate, which loop=grpo needs; use loop=lm or ",
        ),
        (
            ["+experiment=nash_mhc_small", "loop.text_samples.interval=5"],
            "attention_form: error model.attention_form: maha cannot generate; set loop.text_samples.interval=null",
        ),
        (
            ["+experiment=nash_mhc_small", "data.packing=documents"],
            "attention_form: error model.attention_form: maha needs one document per row; set data.packing=stream",
        ),
        (
            [*GRPO, "data=jsonl", "data.path=x"],
            "model_kind: error data.kind: loop.kind=grpo cannot read data.kind=jsonl; it needs questions: arithmetic, ",
        ),
        (
            [*LM[:1], "data=arithmetic", *LM[3:]],
            "model_kind: error data.kind: loop.kind=lm cannot read data.kind=arithmetic; it needs text: text, jsonl",
        ),
        ([*LM, "model=trm"], "model_kind: error model.kind: loop.kind=lm cannot train a trm; use loop=puzzle with "),
        ([*GRPO, "loop.micro_batch_size=3"], "batch_split: error loop.micro_batch_size: the "),
        (
            [*GRPO, "loop.async_depth=2", "loop.sampler.workers=4"],
            "sampler_workers: error loop.sampler.workers: 4 would leave none of the 4 workers to train; use at most 3",
        ),
        (
            [*GRPO, "loop.async_depth=2", "loop.sampler.workers=2"],
            "sampler_workers: error loop.sampler.workers: has run on emulated pods only: libtpu joins all VMs",
        ),
        (
            [*GRPO, "loop.async_depth=2", "loop.sampler.workers=2", "mesh.data=16"],
            "mesh: error mesh: 16 x 1 x 1 does not match the 8 devices of v5litepod-16 that train; choose sizes whose",
        ),
        (
            [*GRPO, "loop.async_depth=2", "loop.sampler.pods=1"],
            "sampler_pods: error loop.sampler.tpu: v5litepod-16 has 4 workers, and a pod of samplers has one; set ",
        ),
        (
            [*GRPO, *SAMPLER_POD, "budget.usd_per_hour=2"],
            "sampler_pods: error loop.sampler.tpu: budget.usd_per_hour would count for each pod of another type",
        ),
        (
            [*GRPO, *SAMPLER_POD, "recovery.driver=bastion"],
            "sampler_pods: error loop.sampler.pods: a bastion does not drive pods of samplers; use recovery.driver=la",
        ),
        (
            [*GRPO, *SAMPLER_POD, "tpu.adopt=true", "tpu.name=mine"],
            "sampler_pods: error loop.sampler.pods: samplers need the network that Slipway makes, which tpu.adopt",
        ),
        (
            [*GRPO, *SAMPLER_POD, "tpu=v5litepod_8", "tpu.data_disk_gb=100"],
            "sampler_pods: error loop.sampler.pods: they have no data disk",
        ),
        (
            [*GRPO, *SAMPLER_POD, "tpu.fallback_zones=[us-west4-a]"],
            "sampler_pods: error loop.sampler.pods: samplers reach the trainer within its region only, and tpu.fallba",
        ),
        (
            [*GRPO, *SAMPLER_POD, "loop.sampler.tpu=v4-8"],
            "sampler_pods: error loop.sampler.tpu: us-central1-a has no v4; zones that have it: us-central2-b",
        ),
        (
            [*GRPO, *SAMPLER_POD, f"tpu.name={'p' * 60}"],
            f"sampler_pods: error loop.sampler.pods: the name {'p' * 60}-sampler-1 is longer than 63 characters",
        ),
        (
            [*GRPO, *SAMPLER_POD, "cloud=here"],
            "sampler_pods: error loop.sampler.pods: cloud=here has no pods to rent; use 0",
        ),
        (
            [*GRPO, *SAMPLER_POD],
            "stale_samples: warning loop.rollout_correction: nothing corrects for the age of the samples",
        ),
        (
            [*GRPO, "loop.async_depth=2", "loop.sampler.workers=2"],
            "stale_samples: warning loop.rollout_correction: nothing corrects for the age of the samples",
        ),
        (
            [*LM],
            "data_path: warning data.path: x does not exist on the workers; make it an asset: assets.datasets.mine.",
        ),
        (
            [*GRPO, "data.tokenizer=/home/me/tokenizer.json"],
            "data_path: warning data.tokenizer: /home/me/tokenizer.json does not exist on the workers; make it",
        ),
        (
            [*GRPO, "model.weights=/home/me/gemma"],
            "data_path: warning model.weights: /home/me/gemma does not exist on the workers; make it an asset: "
            "assets.models.mine.path=/home/me/gemma model.weights=assets://mine",
        ),
        ([*GRPO, "model.weights=gemma"], "data_path: warning model.weights: gemma does not exist on the workers"),
        ([*LM, "data.streams=3"], "streams: error data.streams: 3 streams do not divide the 32 rows of a batch evenly"),
        (
            [*GRPO, "optimizer.schedule.final_fraction=0", "optimizer.schedule.horizon_steps=50"],
            "schedule: warning optimizer.schedule.horizon_steps: the learning rate is 0 after 50",
        ),
        (
            [*GRPO, "optimizer.schedule.final_fraction=0.01"],
            "schedule: warning optimizer.schedule.horizon_steps: the learning rate falls to 1% over exactly the 80",
        ),
        (
            [*GRPO, "tpu.capacity=spot", "checkpoint.save_interval=120"],
            "checkpoints: warning checkpoint.save_interval: no checkpoint",
        ),
        (
            ["+experiment=gemma2b_gsm8k", "model.weights=null"],
            "random_weights: warning model.weights: the policy starts from random",
        ),
        ([*GCP, "cloud.project=my-project-id"], "placeholder: error cloud.project: 'my-project' in"),
        ([*GCP, "cloud.bucket=your-bucket-name"], "placeholder: error cloud.bucket: 'your-bucket' in"),
        ([*GCP, 'env.vars={DATA: "gs://my-bucket/data"}'], "placeholder: error env.vars.DATA: 'my-bucket' in"),
        (
            ["program=command", "program.command=[a]", "cloud.project=your-project-id"],
            "placeholder: error cloud.project",
        ),
        ([*GCP, "program.command=[x,--zone,???]"], "placeholder: error program.command: '???' in"),
        (
            [*GCP, 'env.vars={B: "gs://nanochat-training-data-2026/x"}'],
            "placeholder: error env.vars.B: nanochat-training-data-2026 belongs to someone else",
        ),
        ([*GCP, "cloud.bucket=Acme_Data"], "bucket_name: error cloud.bucket: 'Acme_Data' is not a valid bucket name"),
        ([*GCP, "cloud.bucket='gs://acme'"], "bucket_name: error cloud.bucket: 'gs://acme' is not a valid bucket name"),
        (
            [*GCP, "cloud=local", "budget.max_usd=5"],
            "price: error budget.max_usd: cannot be enforced: the emulated cloud",
        ),
        ([*GCP, TRC], "trc_zone: error tpu.zone: us-central1-a is not in the TRC grant (us-central2-b)"),
        (
            [*GCP, "cleanup.idle_minutes=null"],
            "kept_forever: warning cleanup.idle_minutes: null with cleanup.on_failure",
        ),
        (
            [*GCP, "cloud.billing_budget={account: 012345-6789AB-CDEF01, usd: 9, thresholds: [50]}"],
            "thresholds: error cloud.billing_budget.thresholds: must be fractions",
        ),
    ],
)
def test_what_is_wrong_names_its_key(overrides: list[str], said: str) -> None:
    found = words(*overrides)
    assert any(line.startswith(said) for line in found), found


def test_a_learning_rate_of_points_ends_too() -> None:
    found = config(*GRPO)
    assert found.optimizer is not None
    points = PiecewiseSchedule(kind="piecewise", points=((0, 1.0), (59, 0.0)))
    ended = found.optimizer.model_copy(update={"schedule": points})
    [finding] = schedule_ends_late(found.model_copy(update={"optimizer": ended}))
    assert str(finding).startswith("optimizer.schedule.points: the learning rate is 0 after 59 of")


def test_an_incomplete_trainer_is_told_of_each_missing_group() -> None:
    found = words("cloud.project=acme")
    assert [line.split(":")[1] for line in found[:4]] == [
        " error model",
        " error data",
        " error loop",
        " error optimizer",
    ]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["+experiment=nash_mhc_original", "tpu=v6e_1"],
            "devices: error tpu.accelerator_type: the program needs exactly 8 devices (program.devices), and "
            "v6e-1 is v6e, "
            "1 device on 1 VM; types that fit: v6e-8, ",
        ),
        (
            ["+experiment=nash_mhc_original", "tpu=v5litepod_16"],
            "devices: error tpu.accelerator_type: the program needs exactly 8 devices and 1 VM "
            "(program.devices), and v5l",
        ),
        (
            ["+experiment=trm_e1_1_baseline_xla", "tpu=v4_8"],
            "devices: error tpu.accelerator_type: the program needs exactly 16 devices (program.devices), and "
            "v4-8 is v4, "
            "4 devices on 1 VM; types that fit: v4-32, ",
        ),
        (["+experiment=trm_stable1", "tpu=v4_8"], "devices: error tpu.accelerator_type: the program needs exactly 32"),
        (
            ["+experiment=nanochat_d16_v5e8", "tpu=v5litepod_16"],
            "devices: error tpu.accelerator_type: the program needs 1 VM (program.devices), and v5litepod-16 is "
            "v5e, 16 "
            "devices on 4 VMs; types that fit: v5litepod-8, v5litepod-4, v5litepod-1, ",
        ),
        (
            [*GCP, "program.devices={at_least: 32, multiple_of: 3, generations: [v6e]}"],
            "devices: error tpu.accelerator_type: the program needs at least 32 devices and a multiple of 3 "
            "devices and v6e",
        ),
        (
            ["+experiment=lm_3b_v6e8", "tpu=v6e_1"],
            "mesh: error mesh: 2 x 2 x 2 does not match the 1 device of v6e-1; choose sizes whose product is 1, or "
            "mesh.data=-1; or a slice that fits: v6e-8, ",
        ),
        (
            ["+experiment=nash_mhc_original", "tpu.zone=us-central2-b"],
            "zone: warning tpu.zone: us-central2-b has no v6e; zones that have it: asia-",
        ),
        (
            ["+experiment=nash_mhc_original", "tpu.runtime_version=v2-alpha"],
            "runtime: error tpu.runtime_version: v2-alpha is an image for v2, v3, v4, not for v6e; use "
            "v2-alpha-tpuv6e, or",
        ),
        (
            [*GCP, "tpu.runtime_version=v2-alpha-tpuv6e"],
            "runtime: error tpu.runtime_version: v2-alpha-tpuv6e is an image for v6e, not for v5e; use "
            "v2-alpha-tpuv5-lite",
        ),
        (
            [*GCP, "tpu.runtime_version=tpu-ubuntu2204-base"],
            "runtime: warning tpu.runtime_version: tpu-ubuntu2204-base is not the documented image for v5e; use "
            "v2-alpha-",
        ),
    ],
)
def test_the_mistakes_of_the_guides_are_found(overrides: list[str], said: str) -> None:
    found = words(*overrides, "cloud.project=acme")
    assert any(line.startswith(said) for line in found), found


def test_the_image_of_each_generation_is_its_own() -> None:
    for name in ("v2-8", "v3-8", "v4-8", "v5litepod-8", "v5p-8", "v6e-8"):
        documented = find_topology(name).runtime_version
        slice_ = [f"tpu.accelerator_type={name}", f"tpu.runtime_version={documented}"]
        assert not [line for line in words(*GCP, *slice_) if line.startswith("runtime")]


def test_a_generation_of_a_program_must_exist() -> None:
    _, problems = compose([*GCP, "program.devices={generations: [v7]}"])
    assert [str(problem) for problem in problems] == [
        "program.devices.generations: unknown generation 'v7'; choices: v2, v3, v4, v5e, v5p, v6e, tpu7x (got ['v7'])"
    ]

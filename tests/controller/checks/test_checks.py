"""What each check says of a config that is wrong, and that it is silent of one that is right."""

import pytest

from conf.schema.topology import find_topology
from controller.checks.preflight import check_modules, checks_of, page, preflight, resource_rules
from controller.config.compose import compose
from tests.composed import config_of as config
from tests.paths import ROOT

GCP = ["cloud.project=acme", "program=command", "program.command=[python,-V]"]
BASTION = [*GCP, "recovery.driver=bastion"]
GRPO = ["+experiment=quickstart", "cloud=gcp", "cloud.project=acme", "tpu.capacity=on_demand"]
LM = ["program=trainer", "data=jsonl", "data.path=x", "model=tiny", "loop=lm", "optimizer=adamw", "cloud.project=acme"]
SAMPLERS = [*GRPO, "loop.async_depth=2", "loop.sampler.workers=2"]
NASH = "+experiment=nash_mhc_original"
TRC = "cloud.trc={zones: [us-central2-b], free_until: 2026-12-31}"


def words(*overrides: str) -> list[str]:
    return [f"{finding.check}: {finding.severity} {finding}" for finding in preflight(config(*overrides))]


def test_what_is_right_is_not_commented_on() -> None:
    assert words(*GCP, "cloud.project=my-project-412345", "cloud.bucket=my-project-412345-data") == []
    assert words(*GCP) == []
    assert words(*GRPO) == []
    assert words("+experiment=quickstart") == []
    endless = ["+experiment=trm_e1_1_baseline_xla", "cloud.project=acme"]
    for limited in (["budget.max_hours=1"], ["budget.max_usd=9"], ["scale=tiny", "cloud=local"]):
        assert not [line for line in words(*endless, *limited) if line.startswith("endless")]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["loop.sampler.workers=1"], "async_depth: samplers on other workers and replay need 1 or more"),
        (["loop.sampler.workers=1", "loop.async_depth=1", "loop.replay=gs://b/x"], "replay: nothing is sampled; use"),
        (["loop.sampler.workers=1", "loop.async_depth=1", "loop=dapo", "loop.max_resample_rounds=1"], "max_resample_r"),
        (["loop.async_depth=9"], "less than or equal to 8"),
        (["loop.replay=true"], "loop.replay: 'true' is no folder of an earlier run, such as gs://BUCKET/runs/ID"),
        (["run.state_dir=gs://b/state"], "run.state_dir: gs://b/state is no folder of this machine"),
    ],
)
def test_what_samplers_and_folders_cannot_be_is_refused(overrides: list[str], said: str) -> None:
    _, problems = compose([*GRPO, *overrides])
    assert any(said in str(problem) for problem in problems), problems


def test_samplers_that_correct_for_their_age_are_not_commented_on() -> None:
    samplers = ["loop.async_depth=2", "loop.sampler.workers=2", "loop.rollout_correction.rollout_is=token"]
    bounds = ['+env.vars.TPU_PROCESS_BOUNDS="1,1,1"', '+env.vars.TPU_CHIPS_PER_PROCESS_BOUNDS="2,2,1"']
    assert words(*GRPO, *samplers, *bounds) == []


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([*GCP, "network.nat=false", "tpu.external_ip=false"], "way_out: error network.nat: workers without an extern"),
        ([*GCP, "network.ssh_source_ranges=[0.0.0.0/0]"], "ssh_open: error network.ssh_source_ranges: 0.0.0.0/0"),
        ([*GCP, "network.open_to_world=true"], "ssh_open: warning network.open_to_world: SSH is open to the whole"),
        ([*GCP, "ssh.method=iap", "network.ssh_source_ranges=[]"], "ssh_way: error network.ssh_source_ranges: ssh.met"),
        ([*GCP, "ssh.method=external"], "ssh_way: error network.laptop: ssh.method=external, but only IAP"),
        ([*GCP, "network.laptop=auto", "tpu.external_ip=false"], "ssh_way: warning network.laptop: no worker has an"),
        ([*GCP, "ssh.method=external", "tpu.external_ip=false"], "ssh_way: error tpu.external_ip: ssh.method=external"),
        (["program=command", "cloud.project=acme"], "command: error program.command: is empty"),
        ([*GCP, "code.stand_in=true"], "stand_in: error code.stand_in: stand-ins need the emulated cloud"),
        ([*GRPO, "mesh.data=3"], "mesh: error mesh: 3 x 1 x 1 does not match the 16 devices of v5litepod-16"),
        (
            [*GRPO, "optimizer=custom", "optimizer.rule=optax:adamw", "optimizer.options={learning_rate: 1e-3}"],
            "extension: error optimizer.rule: optimizer rule optax:adamw takes a learning_rate, so it is a whole opti",
        ),
        (
            [*GCP, "env.vars.MASTER_ADDR=127.0.0.1"],
            "coordinator: warning env.vars.MASTER_ADDR: 127.0.0.1 is another machine on each of the 4 workers",
        ),
        ([*SAMPLERS, "mesh.data=16"], "mesh: error mesh: 16 x 1 x 1 does not match the 8 devices of v5litepod-16"),
        (
            [*BASTION, "env.secrets.A=file:/etc/hostname"],
            "bastion_secrets: error env.secrets.A: recovery.driver=bastion c",
        ),
        ([*BASTION, "assets.fetch_on=pod"], "bastion_fetch: error assets.fetch_on: pod does not work with recovery."),
        ([*BASTION, "tpu.adopt=true", "tpu.name=mine"], "bastion_adopt: error recovery.driver: bastion needs the plan"),
        ([*GCP, "cloud.bucket=your-bucket-name"], "placeholder: error cloud.bucket: 'your-bucket' in"),
        ([*GCP, 'env.vars={DATA: "gs://my-bucket/data"}'], "placeholder: error env.vars.DATA: 'my-bucket' in"),
        (["program=command", "program.command=[a]", "cloud.project=your-project-id"], "placeholder: error cloud.proje"),
        ([*GCP, "program.command=[x,--zone,???]"], "placeholder: error program.command: '???' in"),
        ([*GCP, "env.vars.R=???"], "placeholder: error env.vars.R: '???' in '???' is a placeholder"),
        ([*GCP, "env.vars={A: a, R: ???}"], "placeholder: error env.vars.R: '???' in '???' is a placeholder"),
        ([*GCP, "cloud.bucket=My_Bucket"], "placeholder: error cloud.bucket: 'My_Bucket' in"),
        ([*LM, "data.path=???"], "placeholder: error data.path: '???' is no value: set one"),
        ([*GRPO, "model.weights=???"], "placeholder: error model.weights: '???' is no value: set one"),
        ([*GCP, 'env.vars={B: "gs://nanochat-training-data-2026/x"}'], "placeholder: error env.vars.B: nanochat-train"),
        ([*GCP, "cloud.bucket='gs://acme'"], "bucket_name: error cloud.bucket: 'gs://acme' is not a valid bucket name"),
        ([*GCP, "cloud=local", "budget.max_usd=5"], "price: error budget.max_usd: cannot be enforced: the emulated"),
        (
            [*GCP, "budget.max_hours=0.001"],
            "too_short: warning budget.max_hours: the run ends 4 seconds after its pod ",
        ),
        (
            [*GCP, "budget.max_usd=0.001"],
            "too_short: warning budget.max_usd: the run ends 1 seconds after its pod is there",
        ),
        (
            [*GCP, "budget.max_usd=1", "budget.usd_per_hour=20"],
            "too_short: warning budget.max_usd: the run ends 180 seconds after its pod is there",
        ),
        (
            [*GCP, "recovery.hang_timeout_seconds=5"],
            "too_short: warning recovery.hang_timeout_seconds: a start is silent for longer than 5 seconds",
        ),
        (
            [*GCP, "budget.max_usd=5", "budget.usd_per_hour=0"],
            "price: error budget.max_usd: is never reached: budget.usd_per_hour is 0",
        ),
        (["+experiment=trm_e1_1_baseline_xla"], "endless: error budget.max_hours: the program never ends (program.end"),
        ([*GCP, TRC], "trc_zone: error tpu.zone: us-central1-a is not in the TRC grant (us-central2-b)"),
        ([*GCP, "cleanup.idle_minutes=null"], "kept_forever: warning cleanup.idle_minutes: null with cleanup.on_failu"),
        (
            [*GCP, "cloud.billing_budget={account: 012345-6789AB-CDEF01, usd: 9, thresholds: [50]}"],
            "thresholds: error cloud.billing_budget.thresholds: must be fractions",
        ),
    ],
)
def test_what_is_wrong_names_its_key(overrides: list[str], said: str) -> None:
    found = words(*overrides)
    assert any(line.startswith(said) for line in found), found


@pytest.mark.parametrize("more", [["budget.max_usd=0.001"], ["budget.max_usd=50", "budget.usd_per_hour=0"]])
def test_a_limit_in_dollars_beside_a_free_grant_is_the_users_affair(more: list[str]) -> None:
    found = words(*GCP, "tpu=v4_8", TRC, *more)
    assert not [line for line in found if line.startswith(("too_short", "price"))]


def test_an_incomplete_trainer_is_told_of_each_missing_group_or_in_one_line_of_all() -> None:
    found = words("cloud.project=acme", "model=tiny")
    assert [line.split(":")[1] for line in found[:3]] == [f" error {group}" for group in ("data", "loop", "optimizer")]
    assert "error program: nothing says what to run" in words("cloud.project=acme")[0]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([NASH, "tpu=v6e_1"], "devices: error tpu.accelerator_type: the program needs exac"),
        ([NASH, "tpu=v5litepod_16"], "devices: error tpu.accelerator_type: the program needs exactly 8 devices and 1"),
        (
            ["+experiment=trm_e1_1_baseline_xla", "tpu=v4_8"],
            "devices: error tpu.accelerator_type: the program needs exactly 16 devices (program.devices), and "
            "v4-8 is v4, 4 devices on 1 VM; types that fit: v4-32, ",
        ),
        (["+experiment=trm_stable1", "tpu=v4_8"], "devices: error tpu.accelerator_type: the program needs exactly 32"),
        (
            ["+experiment=nanochat_d16_v5e8", "tpu=v5litepod_16"],
            "devices: error tpu.accelerator_type: the program needs 1 VM (program.devices), and v5litepod-16 is v5e, "
            "16 devices on 4 VMs; types that fit: v5litepod-8, v5litepod-4, v5litepod-1, ",
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
        ([NASH, "tpu.zone=us-central2-b"], "zone: warning tpu.zone: us-central2-b has no"),
        ([NASH, "tpu.runtime_version=v2-alpha"], "runtime: error tpu.runtime_version: v2-alpha is an image for v2,"),
        ([*GCP, "tpu.runtime_version=v2-alpha-tpuv6e"], "runtime: error tpu.runtime_version: v2-alpha-tpuv6e is an"),
        (
            [NASH, "tpu.plane=tpu_api", "tpu.runtime_version=tpu-ubuntu2204-base"],
            "runtime: error tpu.runtime_version: tpu-ubuntu2204-base is an image for v2, v3, v4, v5e, v5p, not for v6e",
        ),
        ([NASH, "tpu.runtime_version=v6e-ubuntu-2404"], "runtime: warning tpu.runtime_version: v6e-ubuntu-2404 is"),
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


def test_the_page_is_up_to_date() -> None:
    command = "run: python -m controller.checks.preflight > docs/checks.md"
    assert (ROOT / "docs" / "checks.md").read_text() == page(), command


def test_every_id_is_of_one_check() -> None:
    checks = [check.rule for module in check_modules() for check in checks_of(module)]
    names = [rule.id for rule in (*checks, *resource_rules())]
    assert len(names) == len(set(names)) > 60


def test_every_rule_has_a_key_and_a_reason() -> None:
    rules = [check.rule for module in check_modules() for check in checks_of(module)] + resource_rules()
    assert [rule.id for rule in rules if not rule.reason or not all(rule.keys)] == []

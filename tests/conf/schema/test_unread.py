"""Keys without effect: of pods, programs, the controller. Those of training: controller/checks/test_training."""

import pytest

from conf.schema.unread import OF_PODS, unread_keys
from tests.composed import config_of
from tests.paths import ROOT

OWN = ("cloud=local", "program=command", "program.command=[python, train.py]")
EXPERIMENTS = sorted(file.stem for file in (ROOT / "conf" / "experiment").glob("*.yaml"))


@pytest.mark.parametrize(
    ("typed", "key", "why"),
    [
        (("tpu.reservation=mine",), "tpu.reservation", "tpu.capacity is spot; for"),
        (("tpu.provisioner=node", "tpu.valid_until_hours=48"), "tpu.valid_until_hours", "no request is queued"),
        (("tpu=v6e_8", "tpu.plane=tpu_api", "tpu.boot_disk_gb=300"), "tpu.boot_disk_gb", "it is for Compute Engine"),
        (("tpu.adopt=true", "tpu.name=mine", "tpu.valid_until_hours=3"), "tpu.valid_until_hours", "tpu.adopt takes a"),
        (("network=default", "network.cidr=10.1.0.0/20"), "network.cidr", "in a network of mode auto"),
        (("ssh.os_login=true", "ssh.user=kim"), "ssh.user", "ssh.os_login is true"),
        (("cloud.driver_machine=e2-small",), "cloud.driver_machine", "recovery.driver is laptop"),
        (("cleanup.bastion_max_days=1",), "cleanup.bastion_max_days", "recovery.driver is laptop"),
        (("cloud.realism=relaxed", "cloud.caller_roles=[roles/editor]"), "cloud.caller_roles", "cloud.realism is rel"),
        (("notify.events=[end]",), "notify.events", "neither notify.webhook nor notify.notifier says"),
        (
            ("alerts.checkpoint_minutes=5", "alerts.checkpoint_intervals=9"),
            "alerts.checkpoint_intervals",
            "alerts.checkpoint_minutes decides",
        ),
        (
            (
                *(f"alerts.{key}=null" for key in ("slow_fraction", "data_wait_fraction", "slow_worker_fraction")),
                "alerts.sustained_seconds=9",
            ),
            "alerts.sustained_seconds",
            "alerts.slow_fraction, ",
        ),
        (("checkpoint.save_interval=5",), "checkpoint.save_interval", "only the bundled trainer reads it"),
        (("logging.log_interval=5",), "logging.log_interval", "only the bundled trainer reads it"),
        (("run.compile_cache=false",), "run.compile_cache", "only the bundled trainer reads it"),
    ],
)
def test_what_another_key_turns_off_is_told(typed: tuple[str, ...], key: str, why: str) -> None:
    found = dict(unread_keys(config_of(*OWN, *typed)))
    assert found[key].startswith(why)
    assert key not in dict(unread_keys(config_of(*OWN, *typed[:-1])))


@pytest.mark.parametrize(
    "typed",
    [
        ("tpu.capacity=[reserved, spot]", "tpu.reservation=mine"),
        ("tpu.valid_until_hours=48",),
        ("network.cidr=10.1.0.0/20",),
        ("recovery.driver=bastion", "cloud.driver_machine=e2-small", "cleanup.bastion_max_days=1"),
        ("notify.webhook=env:HOOK", "notify.events=[end]"),
        ("checkpoint.max_outage_hours=1", "recovery.preemption_signal=SIGUSR1"),
    ],
)
def test_what_is_read_is_not_told(typed: tuple[str, ...]) -> None:
    assert list(unread_keys(config_of(*OWN, *typed))) == []


def test_the_trainer_reads_no_keys_of_own_programs() -> None:
    found = dict(unread_keys(config_of("+experiment=quickstart", "recovery.exit_on_exception=false")))
    assert list(found) == ["recovery.exit_on_exception"]


def test_without_a_pod_one_line_tells_of_all_that_is_for_pods() -> None:
    own = ("cloud=here", *OWN[1:])
    assert list(unread_keys(config_of(*own, "recovery.max_preemptions=3"))) == []
    [(key, why)] = unread_keys(config_of(*own, "tpu=v6e_8", "cleanup.idle_minutes=5"))
    assert key == "tpu.accelerator_type"
    assert why == "cloud=here is this machine, without a pod; nor have tpu.zone, cleanup.idle_minutes"


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_no_experiment_sets_what_nothing_reads(name: str) -> None:
    for more in ((), ("scale=tiny",), ("cloud=local",)):
        assert list(unread_keys(config_of(f"+experiment={name}", *more))) == []
    assert all(key.startswith(OF_PODS) for key, _ in unread_keys(config_of(f"+experiment={name}", "cloud=here")))

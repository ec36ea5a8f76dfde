"""What this machine or its Python lacks is found before the launch, with what to install."""

from __future__ import annotations

import pytest

from conf.schema.config import Config
from conf.schema.infra.cloud import HereCloud
from controller.checks import machine as checks
from controller.checks.preflight import preflight
from controller.config.this_machine import Devices
from tests.controller.checks.plans import config

JAX = {"jax": "0.10.2", "jaxlib": "0.10.2"}


def composed(*words: str) -> Config:
    return config("+experiment=quickstart", "cloud=here", *words)


def cloud(*words: str) -> HereCloud:
    made = composed(*words).cloud
    assert isinstance(made, HereCloud)
    return made


@pytest.mark.parametrize(
    ("words", "found", "said"),
    [
        (["cloud.backend=gpu"], Devices(gpus=1), ""),
        (["cloud.backend=gpu"], Devices(), "no NVIDIA GPU"),
        (["cloud.backend=tpu"], Devices(gpus=1), "no TPU"),
        (["cloud.backend=gpu", "cloud.devices=[0,2]"], Devices(gpus=2), "has 2 GPUs, numbered from 0, but 0, 2"),
        (["cloud.backend=gpu", "cloud.devices=4"], Devices(told="rocm"), ""),
    ],
)
def test_the_devices_are_those_of_the_machine(words: list[str], found: Devices, said: str) -> None:
    issues = [issue.message for issue in checks.missing_devices(cloud(*words), found)]
    assert len(issues) == bool(said)
    assert said in "".join(issues)


@pytest.mark.parametrize(
    ("backend", "versions", "said"),
    [
        ("cpu", JAX, ""),
        ("cpu", {}, "has no JAX: run `pip install jax`, or set cloud.python=env"),
        ("gpu", {"jax": "0.10.2"}, "has no jaxlib: run `pip install 'jax[cuda13]'`"),
        ("gpu", JAX, "without its plugin for CUDA: run `pip install 'jax[cuda13]'`"),
        ("gpu", JAX | {"jax-cuda12-plugin": "0.10.2"}, ""),
        ("tpu", JAX, "without its libtpu: run `pip install 'jax[tpu]'`"),
        ("tpu", JAX | {"libtpu": "0.0.30"}, ""),
    ],
)
def test_jax_has_its_plugin(backend: str, versions: dict[str, str], said: str) -> None:
    issues = [issue.message for issue in checks.missing_packages(True, backend, versions, {})]
    assert len(issues) == bool(said)
    assert said in "".join(issues)


def test_another_program_may_do_without_jax() -> None:
    assert not [*checks.missing_packages(False, "gpu", {}, {})]
    assert [issue.severity for issue in checks.missing_packages(False, "gpu", JAX, {})] == ["warning"]
    assert not [*checks.missing_packages(True, "tpu", JAX, {"TPU_LIBRARY_PATH": "/lib/libtpu.so"})]


def found(*words: str) -> list[str]:
    return [f"{each.severity} {each}" for each in preflight(composed("cloud.backend=cpu", *words))]


def test_nothing_is_asked_that_is_about_pods() -> None:
    words = ["tpu=v4_64", "tpu.zone=us-east1-d", "network.nat=false", "cleanup.idle_minutes=null"]
    assert found(*words, "cloud.bucket=google") == []


def test_batches_that_do_not_divide_are_found() -> None:
    [said] = found("cloud.devices=3")
    assert said.startswith("error loop.prompts_per_step: 16 prompts cannot be split evenly over 3 devices")


def test_what_has_no_place_here_is_refused() -> None:
    assert found("recovery.driver=bastion") == [
        "error recovery.driver: a bastion is a VM on Google Cloud; with cloud=here set it to laptop"
    ]
    [said] = found("budget.max_usd=5")
    assert said.startswith("error budget.max_usd: cannot be enforced: this machine is free; set budget.usd_per_hour")
    gpu = preflight(composed("cloud.backend=gpu", "cloud.python=env", "env.packages=lock"))
    assert [each.key for each in gpu if each.check == "here_lock"] == ["cloud.python"]

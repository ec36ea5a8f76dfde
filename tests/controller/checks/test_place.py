"""Zones, tiers, adoption and disks, judged without a cloud."""

from __future__ import annotations

import pytest

from controller.checks import place
from controller.config.compose import compose


def findings(*overrides: str) -> list[str]:
    config, problems = compose(["program=command", *overrides])
    assert not problems
    assert config is not None
    return [f"{f.severity} {f}" for check in place.CHECKS for f in check(config)]


@pytest.mark.parametrize(
    ("overrides", "start"),
    [
        (["tpu.zone=us-central1-b"], "warning tpu.zone: us-central1-b has no v5e; known zones: asia-east1-a"),
        (["tpu.zone=us-central1-z"], "warning tpu.zone: us-central1-z has no v5e"),  # the region is known
        (["tpu.fallback_zones=[us-central1-b]"], "warning tpu.fallback_zones: us-central1-b has no v5e"),
        (["tpu.zone=us-moon1-a"], "error tpu.zone: us-moon1-a has no v5e"),
        (["cloud=local", "tpu.zone=us-central1-b"], "error tpu.zone: us-central1-b has no v5e"),
        (["tpu.accelerator_type=tpu7x-8"], "error tpu.accelerator_type: tpu7x is offered through Compute Engine only"),
        (
            ["tpu.capacity=flex_start", "tpu.provisioner=node"],
            "error tpu.provisioner: flex_start is had through a queued resource only",
        ),
        (
            ["tpu.capacity=[on_demand,preemptible]", "tpu.provisioner=queued"],
            "error tpu.capacity: a queued resource has spot, not preemptible",
        ),
        (["tpu.capacity=reserved"], "error tpu.reservation: capacity=reserved needs the name"),
        (["tpu.adopt=true"], "error tpu.name: tpu.adopt=true needs the name of the existing pod"),
        (["tpu.data_disk_gb=100"], "error tpu.data_disk_gb: Google attaches a writable disk to one VM only"),
        (["tpu.runtime_version=tpu-ubuntu2204-base"], "warning tpu.runtime_version: tpu-ubuntu2204-base is not the"),
    ],
)
def test_what_is_found(overrides: list[str], start: str) -> None:
    [found] = findings(*overrides)
    assert found.startswith(start)


@pytest.mark.parametrize(
    "overrides",
    [
        ["tpu.capacity=[on_demand,spot]", "tpu.fallback_zones=[us-east1-b]"],
        ["tpu.capacity=reserved", "tpu.reservation=mine"],
        ["tpu.capacity=preemptible"],
        ["tpu=v6e_8", "tpu.data_disk_gb=100"],
        ["tpu=v4_64", "tpu.adopt=true", "tpu.name=stable-1"],
    ],
)
def test_what_is_right(overrides: list[str]) -> None:
    assert findings(*overrides) == []


@pytest.mark.parametrize(
    ("overrides", "queued"),
    [
        (["tpu.accelerator_type=v3-8"], False),
        (["tpu=v4_8"], True),
        (["tpu=v6e_1"], True),
        (["tpu=v6e_1", "tpu.provisioner=node"], False),
        (["tpu.accelerator_type=v2-8", "tpu.provisioner=queued"], True),
    ],
)
def test_pods_are_queued_for_from_v4_on(overrides: list[str], queued: bool) -> None:
    config, _ = compose(["program=command", *overrides])
    assert config is not None
    assert config.tpu.is_queued("on_demand") is queued
    assert config.tpu.is_queued("flex_start")

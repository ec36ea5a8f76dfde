"""Which provisioner a tier uses."""

from __future__ import annotations

import pytest

from controller.config.compose import compose


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

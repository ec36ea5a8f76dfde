"""Slices as the TPU compiler is asked for them: its names, and the number of devices that it answers with."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from jax.experimental import topologies as of_jax

from conf.schema.infra.topology import find_topology
from trainer.fit import topologies
from trainer.fit.topologies import CompilerError


@pytest.mark.parametrize(
    ("name", "asked", "options"),
    [
        ("v5litepod-1", "v5e:1x1", {"chips_per_host_bounds": (1, 1, 1)}),
        ("v5litepod-4", "v5e:2x2", {}),
        ("v5litepod-8", "v5e:2x4", {}),
        ("v6e-4", "v6e:2x2", {}),
        ("v4-8", "v4:2x2x1", {"chip_config_name": "megacore"}),
    ],
)
def test_a_slice_has_the_name_and_the_chips_that_the_compiler_knows(
    monkeypatch: pytest.MonkeyPatch, name: str, asked: str, options: dict[str, Any]
) -> None:
    """A slice of one host may have no shape in conf/tpu_types.yaml; `1x1` would be one chip."""

    def describe(platform: str, topology_name: str, **given: Any) -> Any:
        assert (platform, topology_name, given) == ("tpu", asked, options)
        chips = math.prod(int(size) for size in topology_name.partition(":")[2].split("x"))
        return SimpleNamespace(devices=list(range(chips)))

    monkeypatch.setattr(of_jax, "get_topology_desc", describe)
    assert len(topologies._slice_devices(find_topology(name))) == find_topology(name).devices
    monkeypatch.setattr(of_jax, "get_topology_desc", lambda **_: SimpleNamespace(devices=[0, 1]))
    with pytest.raises(CompilerError, match=f"reports 2 devices for {name}, JAX {find_topology(name).devices}"):
        topologies._slice_devices(find_topology(name))

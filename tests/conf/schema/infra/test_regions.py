"""The table of regions."""

from __future__ import annotations

import ipaddress
import itertools

import pytest

from conf.schema.infra import regions, topology


def test_every_region_with_tpus_has_a_block_of_its_own_outside_of_googles() -> None:
    table = regions.region_table()
    zones = {zone for generation in topology.tpu_type_table()["generations"].values() for zone in generation["zones"]}
    assert {topology.zone_region(zone) for zone in zones} <= set(table)
    blocks = [ipaddress.ip_network(str(row["subnet"])) for row in table.values()]
    assert not any(a.overlaps(b) for a, b in itertools.combinations(blocks, 2))
    assert not any(block.overlaps(ipaddress.ip_network("10.128.0.0/9")) for block in blocks)


def test_a_multi_region_covers_its_regions() -> None:
    assert regions.is_near("US", "us-west4")
    assert regions.is_near("europe-west4", "europe-west4")
    assert not regions.is_near("eu", "europe-west2")
    assert not regions.is_near("us-central1", "us-central2")


def test_v5e_is_offered_under_its_name_of_the_api() -> None:
    with pytest.raises(topology.UnknownTypeError, match=r"unknown type 'v5e-16'; closest: v5litepod-16$"):
        topology.find_topology("v5e-16")
    with pytest.raises(topology.UnknownTypeError, match="closest: v5litepod-"):
        topology.find_topology("v5e-17")

"""Zones, subnets and bucket: what is refused, in which words; and the table of regions."""

from __future__ import annotations

import ipaddress
import itertools

import pytest

from conf.schema.config import Config
from conf.schema.infra import regions, topology
from controller.checks.regions import CHECKS
from controller.config.compose import compose


def config(*overrides: str, zones: tuple[str, ...] = ()) -> Config:
    found, problems = compose(["cloud=local", "program=command", *overrides])
    assert not problems
    assert found is not None
    return found.model_copy(update={"tpu": found.tpu.model_copy(update={"fallback_zones": zones})})


def words(found: Config) -> list[str]:
    return [f"{finding.severity} {finding}" for check in CHECKS for finding in check(found)]


def test_nothing_is_said_of_what_is_right() -> None:
    assert words(config()) == []
    assert words(config("cloud.bucket_location=us", zones=("us-west4-a",))) == []
    assert words(config("cloud.bucket=mine", zones=("europe-west4-b",))) == []


@pytest.mark.parametrize(
    ("overrides", "zones", "said"),
    [
        (["tpu.zone=moon-base1-a"], (), "error network.cidr: conf/regions.yaml has no block for moon-base1"),
        (
            ["network.cidr=10.9.0.0/20", "cloud.bucket_location=us"],
            ("us-west4-a",),
            "error network.cidr: is one range, and the zones are in 2 regions",
        ),
        ([], ("us-west4-a",), "error cloud.bucket_location: us-central1 does not serve us-west4"),
        (
            ["cloud.bucket_location=us"],
            ("europe-west4-b",),
            "error cloud.bucket_location: us does not serve europe-west4",
        ),
        (["cloud.soft_delete_days=3"], (), "error cloud.soft_delete_days: must be 0 or 7 to 90"),
    ],
)
def test_what_is_wrong_names_its_key(overrides: list[str], zones: tuple[str, ...], said: str) -> None:
    [found] = words(config(*overrides, zones=zones))
    assert found.startswith(said)


def test_every_region_with_tpus_has_a_block_of_its_own_outside_of_googles() -> None:
    table = regions.table()
    zones = {zone for generation in topology.table()["generations"].values() for zone in generation["zones"]}
    assert {topology.region(zone) for zone in zones} <= set(table)
    blocks = [ipaddress.ip_network(str(row["subnet"])) for row in table.values()]
    assert not any(a.overlaps(b) for a, b in itertools.combinations(blocks, 2))
    assert not any(block.overlaps(ipaddress.ip_network("10.128.0.0/9")) for block in blocks)


def test_a_multi_region_covers_its_regions() -> None:
    assert regions.covers("US", "us-west4")
    assert regions.covers("europe-west4", "europe-west4")
    assert not regions.covers("eu", "europe-west2")
    assert not regions.covers("us-central1", "us-central2")

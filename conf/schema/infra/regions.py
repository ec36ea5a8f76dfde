"""What a region is: the facts of `regions.yaml`: the block of its subnet, and which buckets are near."""

from functools import cache
from pathlib import Path

import yaml

import conf
from conf.schema.infra.topology import YamlLoader

TABLE_FILE = Path(conf.__file__).with_name("regions.yaml")


@cache
def region_table() -> dict[str, dict[str, str | None]]:
    """The parsed `regions.yaml`, by region."""
    return yaml.load(TABLE_FILE.read_text(), Loader=YamlLoader)  # noqa: S506 - CSafeLoader is a safe loader


def subnet_range(region: str) -> str | None:
    """The region's own block (CIDR), or None for a region that the table does not hold."""
    return region_table().get(region, {}).get("subnet")


def is_near(location: str, region: str) -> bool:
    """Is a bucket in `location` (a region or a multi-region, in any case) near workers in `region`?"""
    return location.lower() in (region, region_table().get(region, {}).get("multi_region"))

"""Regions: their subnet ranges and nearby bucket locations, from `regions.yaml`."""

from functools import cache
from pathlib import Path

import yaml

import conf
from conf.schema.infra.topology import YamlLoader

TABLE_FILE = Path(conf.__file__).with_name("regions.yaml")


@cache
def region_table() -> dict[str, dict[str, str | None]]:
    """Return the parsed `regions.yaml`, by region."""
    return yaml.load(TABLE_FILE.read_text(), Loader=YamlLoader)  # noqa: S506 - CSafeLoader is a safe loader


def subnet_range(region: str) -> str | None:
    """Return the region's own CIDR range, or None if the table does not list the region."""
    return region_table().get(region, {}).get("subnet")


def is_near(location: str, region: str) -> bool:
    """Return whether a bucket in `location` (a region or multi-region, in any case) is near workers in `region`."""
    return location.lower() in (region, region_table().get(region, {}).get("multi_region"))

"""Google's own lists decide what can be made in a zone."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from conf.schema.config import Config
from controller.checks.offered import PROBES, lacking
from controller.config.compose import compose
from controller.context import Context
from controller.core.finding import Finding


class FakeGoogle:
    """Lists by zone and collection."""

    def __init__(self, **lists: list[str]) -> None:
        self.lists = lists

    def pages(self, api: str, method: str, items: str, *, parent: str) -> Iterator[dict[str, Any]]:
        assert (api, method) == ("tpu", f"projects.locations.{items}.list")
        for name in self.lists.get(items, []):
            yield {"name": f"{parent}/{items}/{name}"}


def config(*overrides: str) -> Config:
    found, problems = compose(["program=command", "tpu=v6e_8", *overrides])
    assert not problems
    assert found is not None
    return found


def asked(config: Config, **lists: list[str]) -> list[Finding]:
    world = cast(Context, SimpleNamespace(project="p", google=FakeGoogle(**lists)))
    return [finding for probe in PROBES for finding in probe(config, world)]


def test_what_is_listed_is_offered_whatever_the_table_says() -> None:
    moved = config("tpu.zone=us-east1-c")  # the table knows no v6e there
    assert asked(moved, acceleratorTypes=["v6e-1", "v6e-8"], runtimeVersions=["v2-alpha-tpuv6e"]) == []


@pytest.mark.parametrize(
    ("lists", "words"),
    [
        (
            {"acceleratorTypes": ["v6e-1", "v6e-4"]},
            "tpu.zone: Google offers no v6e-8 in us-east5-b; nearest there: v6e-4, v6e-1",
        ),
        (
            {"runtimeVersions": ["v2-alpha-tpuv6", "tpu-ubuntu2204-base"]},
            "tpu.runtime_version: Google offers no image v2-alpha-tpuv6e in us-east5-b; nearest there: v2-alpha-tpuv6",
        ),
    ],
)
def test_what_is_not_listed_is_an_error_with_the_nearest(lists: dict[str, list[str]], words: str) -> None:
    [finding] = asked(config(), **lists)
    assert (str(finding), finding.severity) == (words, "error")


def test_every_zone_is_asked_and_an_adopted_pod_is_not() -> None:
    zones = config("tpu.fallback_zones=[us-east5-a]")
    assert [f.key for f in asked(zones, acceleratorTypes=["v6e-1"])] == ["tpu.zone", "tpu.fallback_zones"]
    assert asked(config("tpu.adopt=true", "tpu.name=mine"), acceleratorTypes=["v6e-1"]) == []


def test_an_empty_list_says_nothing() -> None:
    assert not lacking("v6e-8", frozenset())

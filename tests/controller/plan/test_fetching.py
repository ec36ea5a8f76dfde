"""The plan says who fetches a source, how long it takes and what it costs."""

from __future__ import annotations

from pathlib import Path

import pytest

from controller.plan.fetching import describe_fetch, fetcher_of
from tests.controller.checks.plans import plan_of

GB = 10**9
SOURCE = "{source: 'hf://acme/open'}"


@pytest.mark.parametrize(
    ("overrides", "size", "expected"),
    [
        ((), GB - 1, "laptop"),
        ((), GB, "vm"),
        (("assets.fetch_on=laptop",), GB, "laptop"),
        (("assets.fetch_on=vm",), 1, "vm"),
        (("assets.fetch_on=pod",), 1, "pod"),
        (("tpu.adopt=true", "tpu.name=mine"), GB, "laptop"),
        (("cloud=here",), GB, "laptop"),
    ],
)
def test_who_fetches(tmp_path: Path, overrides: tuple[str, ...], size: int, expected: str) -> None:
    plan = plan_of(tmp_path, SOURCE, *overrides)
    assert fetcher_of(plan.config, plan.assets[0], size) == expected


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), "by an e2-standard-2 in us-central1-a, about 5 min and $0.46, of which $0.45 for NAT"),
        (("network.nat=false",), "by an e2-standard-2 in us-central1-a, about 5 min and $0.01"),
        (("assets.fetch_on=laptop",), "through this machine, about 13 min at 100 Mbit/s"),
        (("assets.fetch_on=pod", "budget.usd_per_hour=18"), "by worker 0 of the pod, about 3 min and $1.45, of which "),
        (("cloud=local",), "by an e2-standard-2 in us-central1-a, about 5 min"),
    ],
)
def test_the_trade_off_is_told(tmp_path: Path, overrides: tuple[str, ...], expected: str) -> None:
    plan = plan_of(tmp_path, SOURCE, *overrides)
    assert describe_fetch(plan.config, plan.assets[0], 10 * GB, 0.0).startswith(expected)


def test_sources_of_buckets_and_other_files_stay_where_they_are(tmp_path: Path) -> None:
    for asset in ("{source: 'gs://mine/x'}", "{build: [make, '{output}']}"):
        plan = plan_of(tmp_path, asset, "assets.fetch_on=vm")
        assert fetcher_of(plan.config, plan.assets[0], 10 * GB) == "laptop"

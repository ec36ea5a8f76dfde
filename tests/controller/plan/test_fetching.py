"""The plan says who fetches a source, how long it takes and what it costs."""

from __future__ import annotations

from pathlib import Path

import pytest

from controller.plan.fetching import describe_build, describe_fetch, fetcher_of
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


def test_sources_of_buckets_stay_where_they_are(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "{source: 'gs://mine/x'}", "assets.fetch_on=vm")
    assert fetcher_of(plan.config, plan.assets[0], 10 * GB) == "laptop"


@pytest.mark.parametrize(
    ("overrides", "size", "expected"),
    [
        ((), GB, "built on an e2-standard-2 in us-central1-a, after about 5 min for its packages, $0.07 per hour"),
        ((), GB - 10**7, "built on this machine: it reads 990 MB of the Hub, less than 1 GB"),
        (("tpu.adopt=true", "tpu.name=mine"), GB, "built on this machine: there is no network for a VM"),
        (("assets.fetch_on=laptop",), GB, "built on this machine, as fetch_on says"),
        (("env.packages=image",), GB, "built on this machine: env.packages=image is about the image of TPU VMs"),
        (("assets.fetch_on=pod", "budget.usd_per_hour=18"), GB, "built on worker 0 of the pod, $18.00 per hour until"),
    ],
)
def test_who_builds_is_told(tmp_path: Path, overrides: tuple[str, ...], size: int, expected: str) -> None:
    plan = plan_of(tmp_path, "{build: [make, 'hf://a/b', '{output}']}", *overrides)
    assert describe_build(plan.config, plan.assets[0], size, "", 0.0).startswith(expected)

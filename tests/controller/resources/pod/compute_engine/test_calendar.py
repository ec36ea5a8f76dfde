"""Calendar reservations on the emulated cloud, which judges requests by Google's discovery document."""

from __future__ import annotations

from typing import Any

import pytest

from controller.gcp.errors import GoogleError
from controller.resources.pod.compute_engine.calendar import DAY, parse_offers
from controller.resources.pod.planes import PLANES
from tests.controller.resources.conftest import EmulatedProject

HERE = "us-east5-b"
WORDS = ("tpu=v6e_8", "tpu.accelerator_type=v6e-16", f"tpu.zone={HERE}", "tpu.fallback_zones=[us-east5-a]")


def offers(project: EmulatedProject, days: float = 2.0, *words: str) -> Any:
    config = project.config(*WORDS, "cloud.bucket_location=us", *words)
    return [*PLANES["compute_engine"].calendar_offers(config, project.context, days)]


def test_where_and_when_there_is_capacity(project: EmulatedProject) -> None:
    found = {offer.zone: offer for offer in offers(project)}
    [best] = [offer for offer in found.values() if offer.begin]
    assert best.end - best.begin == pytest.approx(2 * DAY, abs=1)
    assert best.begin > project.context.clock.now()
    for words in (("tpu=tpu7x_16",), ("tpu.accelerator_type=v5p-16", "tpu.zone=us-east5-a")):
        assert offers(project, 2.0, *words)
    project.inject_fault(kind="stockout", zone=best.zone, capacity="reserved", at="request")
    again = {offer.zone: offer for offer in offers(project)}
    assert again[best.zone].why_not == "no capacity: There is no capacity in the requested time window."


def test_what_google_does_not_reserve_it_refuses(project: EmulatedProject) -> None:
    with pytest.raises(GoogleError, match="from 1 to 90 days"):
        offers(project, 91)
    with pytest.raises(GoogleError, match=r"acceleratorCount.*Must be one of \[1, 4, 8"):
        offers(project, 2, "tpu.accelerator_type=v5p-384", "tpu.zone=us-east5-a")
    assert [*PLANES["tpu_api"].calendar_offers(project.config(*WORDS), project.context, 2)] == []


def test_zones_that_the_config_does_not_name_are_left_out_unless_they_are_the_advice() -> None:
    others = {"zones/a-b-x": {"status": "NO_CAPACITY"}, "zones/a-b-c": {"status": "NOT_SUPPORTED", "details": "no"}}
    found: dict[str, Any] = {"otherLocations": others}
    assert [(one.zone, one.why_not) for one in parse_offers(found, ["a-b-c"])] == [("a-b-c", "not supported: no")]
    times = {"startTime": "2026-12-01T00:00:00Z", "endTime": "2026-12-02T00:00:00Z"}
    [best, _] = parse_offers({**found, "location": "zones/a-b-z", **times}, ["a-b-c"])
    assert (best.zone, best.end - best.begin) == ("a-b-z", DAY)

"""Calendar reservations that Google advises: capacity for one to ninety days, from a day in the next months on.

https://cloud.google.com/compute/docs/instances/future-reservations-calendar-mode-overview. Slipway books none: Google
neither cancels nor changes one, and bills it whether it is used or not.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from conf.schema.config import Config
from controller.context import Context
from controller.core.clock import iso_timestamp
from controller.gcp.names import leaf
from controller.gcp.timestamps import parse_timestamp
from controller.resources.pod.compute_engine.requests import API
from controller.resources.pod.plane import CalendarOffer

FAMILIES: Mapping[str, str] = MappingProxyType({
    "v5p": "VM_FAMILY_CLOUD_TPU_POD_SLICE_CT5P",
    "v6e": "VM_FAMILY_CLOUD_TPU_LITE_POD_SLICE_CT6E",
    "tpu7x": "VM_FAMILY_CLOUD_TPU_POD_SLICE_TPU7X",
})  # fmt: skip
DAY = 86400.0
LATEST_START_DAYS = 119.0
"""Google answers for 120 days; a day less, since its clock is another one."""
KEY = "pod"


def advised_reservations(config: Config, context: Context, days: float) -> Iterator[CalendarOffer]:
    """Yield what Google advises for a config's slice in its zones, for so many days. Raises GoogleError."""
    for region in config.regions:
        zones = [zone for zone in config.tpu.all_zones if zone.rpartition("-")[0] == region]
        body = request_body(config, days, context.clock.now())
        answer = context.google.call(API, "advice.calendarMode", project=context.project, region=region, body=body)
        for recommendation in answer.get("recommendations", []):
            for found in recommendation.get("recommendationsPerSpec", {}).values():
                yield from parse_offers(found, zones)


def request_body(config: Config, days: float, now: float) -> dict[str, Any]:
    """Return the body of `advice.calendarMode` for the chips of a config."""
    topology = config.topology
    chips = {
        "vmFamily": FAMILIES[topology.generation],
        "acceleratorCount": str(topology.chips),
        "workloadType": "BATCH",
    }
    duration = f"{days * DAY:.0f}s"
    window = {
        "startTimeNotEarlierThan": iso_timestamp(now),
        "startTimeNotLaterThan": iso_timestamp(now + LATEST_START_DAYS * DAY),
        "minDuration": duration,
        "maxDuration": duration,
    }
    spec = {"targetResources": {"aggregateResources": chips}, "timeRangeSpec": window, "deploymentType": "DENSE"}
    return {"futureResourcesSpecs": {KEY: spec}}


def parse_offers(found: Mapping[str, Any], zones: list[str]) -> Iterator[CalendarOffer]:
    """Yield the zone that Google recommends, which may be none of the config's, then why it recommends no other."""
    if location := found.get("location"):
        times = [parse_timestamp(found.get(name)) for name in ("startTime", "endTime")]
        yield CalendarOffer(leaf(location), begin=times[0], end=times[1])
    for name, about in sorted(found.get("otherLocations", {}).items()):
        if leaf(name) in zones:
            status = about.get("status", "").lower().replace("_", " ")
            yield CalendarOffer(leaf(name), why_not=f"{status}: {about.get('details', '')}")

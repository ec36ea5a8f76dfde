"""Advice on calendar reservations of TPUs.

https://cloud.google.com/compute/docs/instances/future-reservations-calendar-mode-overview
"""

import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar

from controller.localcloud.apis.catalog import zones_of
from controller.localcloud.apis.networks import invalid_field
from controller.localcloud.apis.service import Service
from controller.localcloud.http.call import ApiCall, timestamp
from controller.localcloud.http.errors import ApiError
from controller.localcloud.store import Document

_DAY = 86400
_LONGEST_DAYS, _EARLIEST_DAYS, _LATEST_DAYS = 90, 1, 120
"""Longest reservation, and between how many days from now its start can be asked for."""
_CHIPS = frozenset({1, 4, 8, 16, 32, 64, 128, 256, 512, 1024})
"""Sizes that can be reserved."""
_FAMILIES = {
    "VM_FAMILY_CLOUD_TPU_LITE_POD_SLICE_CT6E": "v6e",
    "VM_FAMILY_CLOUD_TPU_POD_SLICE_CT5P": "v5p",
    "VM_FAMILY_CLOUD_TPU_POD_SLICE_TPU7X": "tpu7x",
}
_SPECS = "futureResourcesSpecs"


@dataclass(eq=False)
class Advice(Service):
    """Method `advice.calendarMode`: the first zone that has the type and is not refused is recommended.

    A fault of kind `stockout` in the tier `reserved` is a zone without capacity.
    """

    methods: ClassVar = {"compute.v1:advice.": "calendarMode"}

    def _calendar_mode(self, call: ApiCall) -> Document:
        specs: Document = call.body.get(_SPECS) or {}
        if len(specs) != 1:
            raise invalid_field(_SPECS, len(specs), "Exactly one specification is allowed.")
        [(key, spec)] = specs.items()
        generation, chips = _resources(spec.get("targetResources") or {})
        denied = _denied_zones(spec.get("locationPolicy") or {}, call.path["region"])
        earliest, latest, longest = _window(spec.get("timeRangeSpec") or {})
        start = max(earliest, time.time() + _EARLIEST_DAYS * _DAY)
        found: Document = {"recommendationId": str(uuid.uuid4()), "recommendationType": "FUTURE_RESERVATION"}
        others: Document = {}
        for zone in self.catalog.zones:
            if zone.rpartition("-")[0] != call.path["region"] or zone in denied:
                continue
            status, details = "", ""
            if zone not in zones_of(self.catalog, generation):
                status, details = "NOT_SUPPORTED", "The resources are not offered in this zone."
            elif start > latest:
                status, details = "CONDITIONS_NOT_MET", "The start must be at least one day from now."
            elif "location" in found:
                status, details = "RECOMMENDED", "Another zone was better."
            else:
                try:
                    self.faults.refuse_creation("request", zone, "reserved", f"{generation}-{chips}", _words)
                except ApiError as error:
                    status, details = "NO_CAPACITY", error.message
            if status:
                others[f"zones/{zone}"] = {"status": status, "details": details}
            else:
                times = {"startTime": timestamp(start), "endTime": timestamp(start + longest)}
                found |= {"location": f"zones/{zone}", **times}
        return {"recommendations": [{"recommendationsPerSpec": {key: {**found, "otherLocations": others}}}]}


def _words(spec: Mapping[str, Any], zone: str, capacity: str, accelerator: str) -> ApiError | None:
    if spec["kind"] != "stockout":
        return None
    return ApiError(503, "There is no capacity in the requested time window.")


def _resources(target: Mapping[str, Any]) -> tuple[str, int]:
    """Return generation and chips of a specification."""
    if ("aggregateResources" in target) == ("specificSkuResources" in target):
        raise invalid_field("targetResources", "", "Exactly one of aggregateResources, specificSkuResources is needed.")
    if "specificSkuResources" in target:
        raise ApiError(501, "The emulated cloud has calendar reservations of TPUs only.")
    asked = target["aggregateResources"]
    family, chips = asked.get("vmFamily", ""), int(asked.get("acceleratorCount", 0))
    if family not in _FAMILIES:
        raise invalid_field("vmFamily", family, "Calendar reservations of it are not offered here.")
    if chips not in _CHIPS:
        raise invalid_field("acceleratorCount", chips, f"Must be one of {sorted(_CHIPS)}.")
    return _FAMILIES[family], chips


def _denied_zones(policy: Mapping[str, Any], region: str) -> frozenset[str]:
    """Return the zones that a policy denies; a zone that it does not name is allowed."""
    denied: set[str] = set()
    for name, about in (policy.get("locations") or {}).items():
        if not re.fullmatch(rf"zones/{region}-[a-z]", name):
            raise invalid_field("locationPolicy.locations", name, f"Must be zones/ZONE, with a zone of {region}.")
        if about.get("preference") == "DENY":
            denied.add(name.removeprefix("zones/"))
    return frozenset(denied)


def _window(spec: Mapping[str, Any]) -> tuple[float, float, float]:
    """Return the earliest and the latest start, in seconds since the epoch, and the longest duration in seconds."""
    lengths = [_seconds(spec, name) for name in ("minDuration", "maxDuration")]
    if not _DAY <= lengths[0] <= lengths[1] <= _LONGEST_DAYS * _DAY:
        raise invalid_field("timeRangeSpec", lengths, f"Durations must be from 1 to {_LONGEST_DAYS} days.")
    starts = [_time(spec, name) for name in ("startTimeNotEarlierThan", "startTimeNotLaterThan")]
    if not starts[0] <= starts[1] <= time.time() + _LATEST_DAYS * _DAY:
        raise invalid_field("timeRangeSpec", starts, f"The start must be at most {_LATEST_DAYS} days from now.")
    return starts[0], starts[1], lengths[1]


def _seconds(spec: Mapping[str, Any], name: str) -> float:
    value = str(spec.get(name, ""))
    if not re.fullmatch(r"\d+(\.\d+)?s", value):
        raise invalid_field(f"timeRangeSpec.{name}", value, "A duration in seconds, such as 86400s, is needed.")
    return float(value.removesuffix("s"))


def _time(spec: Mapping[str, Any], name: str) -> float:
    value = str(spec.get(name, ""))
    try:
        return datetime.fromisoformat(value).timestamp()
    except ValueError:
        raise invalid_field(f"timeRangeSpec.{name}", value, "A time in RFC 3339 is needed.") from None

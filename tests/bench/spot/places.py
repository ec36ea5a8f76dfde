"""A simulated market of many places: each zone, tier and plane has capacity at some times and none at others.

Slipway's planes make the requests; in the place of their provisioners, `SimulatedProvisioner` asks the market.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from controller.context import Context
from controller.gcp.names import LABEL
from controller.resources.pod.plane import Plane
from controller.resources.pod.provisioner import Endpoint, Place, SliceSpec, SliceStatus
from tests.bench.spot.market import EPOCH, Google, Pod, Simulated

TIERS = ("spot", "reserved", "flex_start", "on_demand")
NO_CAPACITY = "ZONE_RESOURCE_POOL_EXHAUSTED"
NEVER = float("inf")
Span = tuple[float, float]


@dataclass(frozen=True)
class TierModel:
    """Mean hours of a tier in one place: how long there is capacity, how long there is none, and between failures.

    A spot slice is lost when the capacity ends. One of another tier is kept, until a host fails.
    """

    capacity: float
    none: float
    failure: float = NEVER


MODEL: Mapping[str, TierModel] = {
    "spot": TierModel(capacity=1.0, none=1.5),
    "reserved": TierModel(capacity=1.0, none=12.0, failure=24.0),
    "flex_start": TierModel(capacity=0.3, none=8.0, failure=24.0),
    "on_demand": TierModel(capacity=0.1, none=12.0, failure=24.0),
}
"""Assumptions, not measurements."""


@dataclass(frozen=True)
class PlaceMarket:
    """One place: spans of time with capacity, and the moments at which a host fails; seconds since the beginning."""

    is_spot: bool
    spans: tuple[Span, ...]
    failures: tuple[float, ...]

    def room_from(self, time: float) -> float:
        """Return the first moment, not before `time`, at which there is capacity."""
        at = max(0, bisect_right(self.spans, (time, NEVER)) - 1)
        return next((max(time, begin) for begin, end in self.spans[at:] if end > time), NEVER)

    def loss_after(self, room: float) -> float:
        """Return when a slice that was granted at `room` is lost."""
        if self.is_spot:
            return next((end for begin, end in self.spans if begin <= room < end), room)
        return next((time for time in self.failures if time > room), NEVER)


Key = tuple[str, str, str]
"""Plane, zone and tier."""


@dataclass(frozen=True)
class PlacesMarket:
    """All places of a day."""

    seconds: float
    places: Mapping[Key, PlaceMarket]


def draw_places(
    seed: int, hours: float, planes: Sequence[str], zones: Sequence[str], *, shared: bool = False
) -> PlacesMarket:
    """Draw a day. A place has the same day whichever others there are.

    `shared`: whether both planes have capacity at the same times; otherwise each has its own.
    """
    end = hours * 3600
    places = {}
    for key in ((plane, zone, tier) for plane in planes for zone in zones for tier in TIERS):
        draw, model = random.Random(f"{seed} {key[1:] if shared else key}"), MODEL[key[2]]
        mean = {True: model.capacity * 3600, False: model.none * 3600}
        has = draw.random() < model.capacity / (model.capacity + model.none)
        spans, time = list[Span](), 0.0
        while time < end:
            until = time + draw.expovariate(1 / mean[has])
            spans += [(time, until)] if has else []
            time, has = until, not has
        failures, time = list[float](), 0.0
        while model.failure != NEVER and (time := time + draw.expovariate(1 / (model.failure * 3600))) < end:
            failures.append(time)
        places[key] = PlaceMarket(key[2] == "spot", tuple(spans), tuple(failures))
    return PlacesMarket(end, places)


@dataclass
class Slice(Pod):
    """A request in one place, and the slice that comes of it."""

    place: Place = field(kw_only=True)
    spec: SliceSpec = field(kw_only=True)


class Places(Google):
    """The bucket of a run, and its requests in all places."""

    def __init__(self, market: PlacesMarket, clock: Simulated, create_seconds: float, delete_seconds: float) -> None:
        super().__init__(market, clock, create_seconds, delete_seconds)  # pyright: ignore[reportArgumentType]
        self.places = market.places

    def ask(self, plane: str, spec: SliceSpec, place: Place) -> None:
        there, now = self.places[plane, place.zone, place.capacity], self.clock.elapsed
        room = there.room_from(now)
        lost = there.loss_after(room)
        self.pods.append(Slice({}, now, room, room + self._create_seconds, lost, place=place, spec=spec))

    def there(self, provisioner: str, zone: str) -> Slice | None:
        """Return the request that a provisioner has made in a zone, unless it was deleted."""
        held = (pod for pod in self.pods if isinstance(pod, Slice) and pod.deleted == NEVER)
        where = (provisioner, zone)
        return next((one for one in held if (one.place.provisioner, one.place.zone) == where), None)

    def end(self, found: Slice) -> None:
        found.deleted = self.clock.elapsed
        self.clock.sleep(self._delete_seconds)


@dataclass(frozen=True)
class SimulatedProvisioner:
    """Implements `Provisioner`. Only Compute Engine says that a request which it keeps has no capacity now."""

    google: Places
    plane: str
    name: str

    def observe(self, context: Context, name: str, zone: str) -> SliceStatus | None:
        found = self.google.there(self.name, zone)
        if found is None:
            return None
        state = found.state(self.google.clock.elapsed).replace("CREATING", "PROVISIONING")
        waits = state == "WAITING_FOR_RESOURCES"
        refused = waits and self.plane == "compute_engine"
        workers = 0 if waits else found.spec.workers
        return SliceStatus(
            spec=found.spec,
            place=found.place,
            state=state,
            name=name,
            pending=state in ("WAITING_FOR_RESOURCES", "PROVISIONING"),
            uid="" if waits else f"{self.google.pods.index(found)}",
            created=EPOCH + found.asked,
            running_since=0.0 if waits else EPOCH + found.ready,
            endpoints=tuple(Endpoint(worker, f"10.0.0.{worker + 2}", None) for worker in range(workers)),
            labels=tuple(LABEL.items()),
            code=NO_CAPACITY if refused else "",
            message="The zone does not have enough resources available" if refused else "",
        )

    def create(self, context: Context, name: str, spec: SliceSpec, place: Place) -> None:
        self.google.ask(self.plane, spec, place)

    def delete(self, context: Context, name: str, zone: str, *, is_recorded: bool = False) -> None:
        if (found := self.google.there(self.name, zone)) is not None:
            self.google.end(found)


class SimulatedPlane:
    """One of Slipway's planes, whose slices come from a simulated market."""

    def __init__(self, name: str, plane: Plane, google: Places) -> None:
        self._plane = plane
        self._ways = {way: SimulatedProvisioner(google, name, way) for way in plane.provisioners(0.0)}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plane, name)

    def provisioners(self, create_seconds: float) -> Mapping[str, SimulatedProvisioner]:
        return self._ways

"""Where a project could have a pod, as Google tells it now: what zones offer, and what the quotas of both planes allow.

Google may offer what `conf/tpu_types.yaml` does not have. A zone that is new is a choice like any other, of unknown
price. A type that is new is none, as nobody has said how many chips and VMs it has: it is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from conf.schema.topology import Topology, find_topology, tpu_type_table, zone_region
from controller.gcp.google_errors import ForbiddenError, GoogleError, ServiceDisabledError
from controller.resources.pod import compute_engine, tpu_api

if TYPE_CHECKING:
    from controller.context import Context

SMALL_SLICE_CHIPS = 16
"""Largest number of chips to suggest, however large the quota."""
TIERS = ("on_demand", "spot")
Names = Mapping[str, frozenset[str] | None]
"""Names that Google lists, by zone; None if it does not tell."""


@dataclass(frozen=True)
class PlacementChoice:
    """A generation in a zone in a tier, of one plane; `chips` is the quota, None if it is unknown."""

    generation: str
    zone: str
    capacity: str
    chips: float | None
    usd_per_chip_hour: float | None
    plane: str = "tpu_api"

    @property
    def accelerator_type(self) -> str:
        """The largest of the small types of the generation that the quota allows."""
        most = min(SMALL_SLICE_CHIPS, SMALL_SLICE_CHIPS if self.chips is None else self.chips)
        types = [t for t in _types_of(self.generation) if self.plane == "tpu_api" or t.machine_type]
        fitting = [t for t in types if t.chips <= most] or [min(types, key=lambda t: t.chips)]
        return max(fitting, key=lambda t: t.chips).accelerator_type

    def __str__(self) -> str:
        chips = "?" if self.chips is None else "no limit" if self.chips == float("inf") else f"{self.chips:.0f}"
        price = f"${self.usd_per_chip_hour:.2f}" if self.usd_per_chip_hour is not None else "?"
        plane = "" if self.plane == "tpu_api" else ", Compute Engine"
        return (
            f"{self.generation:<5} {self.zone:<24} {self.capacity:<10} {chips:>8} chips {price:>8} per chip-hour{plane}"
        )


@dataclass(frozen=True)
class Placements:
    """What there is to choose from.

    Attributes:
        choices: sufficient quota first, then the cheapest; then those whose quota Google does not tell.
        why: why no quota is known.
        unknown: zones by the types and machine types that Google offers and the table does not have.
    """

    choices: list[PlacementChoice]
    why: str = ""
    unknown: dict[str, list[str]] = field(default_factory=dict[str, list[str]])

    @property
    def unknown_words(self) -> str:
        """What Google offers and the table does not have, what is missing, and what to do; "" if there is nothing."""
        if not self.unknown:
            return ""
        listed = ", ".join(f"{name} ({zones[0]}{_more(zones)})" for name, zones in self.unknown.items())
        return (
            f"Google offers what conf/tpu_types.yaml does not have: {listed}. Their chips, VMs, memory, image and "
            "price are unknown, so that they are not among the choices: update Slipway, or add them to that file"
        )


def find_placements(context: Context) -> Placements:
    """Ask Google for the quotas of all places, and for what the zones offer."""
    types, machines = _types_by_zone(context), _machines_by_zone(context)
    found, why = list[PlacementChoice](), list[str]()
    for choices, names, ask in (
        (_of_tpu_api, types, tpu_api.quota_limits),
        (_of_compute_engine, machines, compute_engine.limits_of),
    ):
        limits, problem = _ask(ask, context)
        found += choices(names, limits)
        why += [problem] if problem else []
    is_known = any(choice.chips is not None for choice in found)
    reason = "" if is_known else "; ".join(dict.fromkeys(why)) or "Google's response contains no TPU quota"
    return Placements(sorted(found, key=_sort_key), reason, _unknown(types, machines))


def _sort_key(choice: PlacementChoice) -> tuple[bool, float, float]:
    price = choice.usd_per_chip_hour if choice.usd_per_chip_hour is not None else float("inf")
    return choice.chips is None, -min(choice.chips or SMALL_SLICE_CHIPS, SMALL_SLICE_CHIPS), price


def _types_of(generation: str) -> list[Topology]:
    return [find_topology(name) for name, row in tpu_type_table()["types"].items() if row[0] == generation]


def _ask(ask: Callable[[Context], tpu_api.Limits], context: Context) -> tuple[tpu_api.Limits, str]:
    """Return the limits, and why there are none."""
    try:
        return ask(context), ""
    except ServiceDisabledError as error:
        return {}, f"{error.service} is not enabled yet"
    except GoogleError as error:
        return {}, f"permission denied ({error.message})" if isinstance(error, ForbiddenError) else str(error)


def _of_tpu_api(types: Names, limits: tpu_api.Limits) -> Iterator[PlacementChoice]:
    kinds = {name: row[0] for name, row in tpu_type_table()["types"].items()}
    for generation, facts in tpu_type_table()["generations"].items():
        if not tpu_api.metrics_of(generation):
            continue
        for zone, is_sure in _zones(types, facts["zones"], {name for name, one in kinds.items() if one == generation}):
            for tier in TIERS:
                limit = tpu_api.quota_limit(limits, generation, zone, tier)
                yield from _choices(generation, zone, tier, limit and limit.chips, "tpu_api", is_sure=is_sure)


def _of_compute_engine(machines: Names, limits: tpu_api.Limits) -> Iterator[PlacementChoice]:
    for generation, facts in tpu_type_table()["generations"].items():
        names = set(facts["machine_types"].values()) if facts["image_family"] else set[str]()
        for zone, is_sure in _zones(machines, facts["zones"], names) if names else ():
            for tier in TIERS:
                pool = compute_engine.quota_pool(generation, min(names), tier)
                chips = limits.get((pool, zone_region(zone)))
                yield from _choices(generation, zone, tier, chips, "compute_engine", is_sure=is_sure)


def _choices(
    generation: str, zone: str, tier: str, chips: float | None, plane: str, *, is_sure: bool
) -> Iterator[PlacementChoice]:
    """Yield the choice, if there is quota, or if Google offers it and tells no quota."""
    prices = tpu_type_table()["generations"][generation]["usd_per_chip_hour"].get(zone, (None, None))
    if chips or (chips is None and is_sure):
        yield PlacementChoice(generation, zone, tier, chips, prices[TIERS.index(tier)], plane)


def _zones(listed: Names, known: list[str], wanted: set[str]) -> Iterator[tuple[str, bool]]:
    """Yield the zones that offer one of the names, and whether that is sure; the table's if Google tells none."""
    for zone in sorted({*listed, *known}):
        names = listed.get(zone, frozenset[str]() if listed else None)
        if names is None and zone in known:
            yield zone, not any(listed.values())
        elif names is not None and names & wanted:
            yield zone, True


def _types_by_zone(context: Context) -> Names:
    """Return the accelerator types of the TPU API."""
    where = f"projects/{context.project}/locations"
    known = {zone for facts in tpu_type_table()["generations"].values() if facts["tpu_api"] for zone in facts["zones"]}

    def types_in(zone: str) -> frozenset[str] | None:
        method, parent = "projects.locations.acceleratorTypes.list", f"{where}/{zone}"
        try:
            listed = list(context.google.list_all("tpu", method, "acceleratorTypes", parent=parent))
        except GoogleError:
            return None
        return frozenset(item.get("type", item["name"].rpartition("/")[2]) for item in listed)

    try:
        method, name = "projects.locations.list", where.removesuffix("/locations")
        listed = list(context.google.list_all("tpu", method, "locations", name=name))
    except ServiceDisabledError:
        return {}
    except GoogleError:
        listed = []
    zones = sorted(known | {item.get("locationId", item.get("name", "").rpartition("/")[2]) for item in listed})
    with ThreadPoolExecutor(max_workers=16) as pool:
        found = dict(zip(zones, pool.map(types_in, zones), strict=True))
    if silent := [zone for zone, names in found.items() if names is None]:
        context.events.note("project", f"{len(silent)} of {len(found)} zones do not say which TPUs they have")
    return found


def _machines_by_zone(context: Context) -> Names:
    """Return the machine types of Compute Engine that have TPUs."""
    found: dict[str, set[str]] = {}
    try:
        for zone, item in compute_engine.aggregated(context, "machineTypes", filter=compute_engine.TPU_MACHINES):
            found.setdefault(zone, set()).add(item["name"])
    except GoogleError as error:
        context.events.note("project", f"cannot look at the machine types of Compute Engine: {error}")
        return {}
    return {zone: frozenset(names) for zone, names in found.items()}


def _unknown(types: Names, machines: Names) -> dict[str, list[str]]:
    """Return the zones of what the table does not have, by name."""
    table, found = tpu_type_table(), dict[str, list[str]]()
    ours = {name for facts in table["generations"].values() for name in facts["machine_types"].values()}
    of_gke = set(table["machine_types_for_gke"])
    for listed, known in ((types, table["types"].keys()), (machines, ours)):
        for zone, names in sorted(listed.items()):
            for name in sorted((names or frozenset[str]()) - known):
                if not of_gke & {name, name.partition("-")[0]}:
                    found.setdefault(name, []).append(zone)
    return found


def _more(zones: list[str]) -> str:
    return f" and {len(zones) - 1} more" if len(zones) > 1 else ""

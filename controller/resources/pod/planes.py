"""The planes that slices come from. A new one needs a module of its own and a line here."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from types import MappingProxyType

from conf.schema.config import Config
from conf.schema.topology import zone_region
from controller.context import Context
from controller.core.finding import Issue
from controller.gcp.google_errors import GoogleError, ServiceDisabledError
from controller.resources.pod.compute_engine import ComputeEngine
from controller.resources.pod.plane import Plane, PlaneChecks
from controller.resources.pod.provisioner import Place, Provisioner, ProvisionerName, SliceStatus
from controller.resources.pod.tpu_api import TpuApi

PLANES: Mapping[str, Plane] = MappingProxyType({"tpu_api": TpuApi(), "compute_engine": ComputeEngine()})
"""By their names in `tpu.plane`, in the order in which `tpu.plane=auto` tries them."""


def all_planes() -> Iterable[Plane]:
    return PLANES.values()


def plane_choices() -> tuple[str, ...]:
    """Return the values of tpu.plane."""
    return ("auto", *PLANES)


def provisioners_of(names: Iterable[ProvisionerName], create_seconds: float) -> dict[ProvisionerName, Provisioner]:
    """Return every way to create a slice on the planes of some provisioners; see `Plane.provisioners` for the order."""
    wanted = set(names)
    ways = (plane.provisioners(create_seconds) for plane in all_planes())
    return {name: provisioner for found in ways if wanted & found.keys() for name, provisioner in found.items()}


def planes_for(config: Config) -> tuple[Plane, ...]:
    """Return the planes that a config's pod may come from, in the order in which to try them.

    With tpu.plane=auto these are the planes that have the type and can serve every key. If there is none, they are
    those that have the type, or else all; their checks then say why not. A name that is unknown, which a check refuses,
    is taken for auto.
    """
    if config.tpu.plane in PLANES:
        return (PLANES[config.tpu.plane],)
    having = planes_with_pod(config) or tuple(all_planes())
    return tuple(plane for plane in having if not any(reasons_against(plane, config))) or having


def planes_with_pod(config: Config) -> tuple[Plane, ...]:
    """Return the planes on which a config's pod may exist: with tpu.plane=auto all that have its type.

    A config that has since ruled out a plane has the same pod.
    """
    if config.tpu.plane in PLANES:
        return planes_for(config)
    return tuple(plane for plane in all_planes() if plane.checks.offers(config.topology))


def reasons_against(plane: Plane, config: Config) -> Iterator[Issue]:
    """Yield why a plane cannot serve a config, from the config alone."""
    yield from plane.checks.obstacles(config)
    yield from (issue for issue in plane.checks.image(config) if issue.severity == "error")
    if not tiers_on(plane, config):
        for tier in config.tpu.capacity:
            yield from plane.checks.tier_obstacles(config, tier)


def planes_not_tried(config: Config) -> list[str]:
    """Return why tpu.plane=auto does not try a plane that has the type, in words; nothing of one that lacks it."""
    planes = planes_for(config)
    others = [plane for plane in planes_with_pod(config) if plane not in planes]
    reasons = [next(reasons_against(plane, config)) for plane in others]
    return [f"{plane.title} is not tried: {why.key}: {why.message}" for plane, why in zip(others, reasons, strict=True)]


def tiers_on(plane: Plane, config: Config) -> list[str]:
    """Return those of the config's tiers that a plane has, in order."""
    return [tier for tier in config.tpu.capacity if not any(plane.checks.tier_obstacles(config, tier))]


def places_for(config: Config) -> tuple[Place, ...]:
    """Return where to ask for a config's pod, in order: by zone, then by tier, then by plane."""
    planes = planes_for(config)
    served = [plane for plane in planes if tiers_on(plane, config)]
    return tuple(
        Place(zone, tier, config.network.subnet_name(zone_region(zone)), plane.provisioner_for(config, tier))
        for zone, tier, plane in product(config.tpu.all_zones, config.tpu.capacity, planes)
        if not served or tier in tiers_on(plane, config)
    )


def account_roles(config: Config) -> tuple[str, ...]:
    """Return the roles with which an account can create and delete a config's pod, besides those of cloud.roles."""
    return tuple(role for plane in planes_for(config) for role in plane.account_roles)


def ask_planes(config: Config, ask: Callable[[PlaneChecks], Iterator[Issue]]) -> Iterator[Issue]:
    """Yield what the planes of a config answer. An error of one plane is a warning if another one has none.

    Raises GoogleError if Google did not answer about the only plane.
    """
    planes = planes_for(config)
    found: list[list[Issue]] = []
    for plane in planes:
        try:
            found.append(list(ask(plane.checks)))
        except ServiceDisabledError:
            if len(planes) == 1:
                raise
        except GoogleError as error:
            if len(planes) == 1:
                raise
            found.append([Issue(f"{plane.title} was not checked: {error}", severity="warning")])
    demote = len(found) > 1 and not all(any(issue.severity in (None, "error") for issue in each) for each in found)
    for issue in (issue for each in found for issue in each):
        yield issue._replace(severity="warning") if demote and issue.severity in (None, "error") else issue


def plane_of(provisioner: ProvisionerName) -> Plane:
    """Return the plane that a way to create slices belongs to."""
    return next(plane for plane in all_planes() if provisioner in plane.provisioners(0.0))


def label_places(places: Sequence[Place]) -> list[str]:
    """Return places in words, with their planes if there are several."""
    planes = [plane_of(place.provisioner).title for place in places]
    if len(set(planes)) == 1:
        return [str(place) for place in places]
    pairs = zip(places, planes, strict=True)
    return [f"{place.zone} ({place.capacity}, {plane.removeprefix('the ')})" for place, plane in pairs]


def waits_in_queue(place: Place) -> bool:
    """Return whether a request in that place waits for capacity until it expires or is deleted."""
    return place.provisioner in plane_of(place.provisioner).queues


def project_slices(context: Context) -> Iterator[SliceStatus]:
    """Yield every slice of the project and every request for one, on all planes."""
    for plane in all_planes():
        yield from plane.slices(context)

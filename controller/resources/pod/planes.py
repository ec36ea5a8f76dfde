"""The planes that slices come from. A new one needs its own folder and a line here."""

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

from conf.schema.config import Config
from controller.context import Context
from controller.resources.pod.compute_engine.plane import ComputeEngine
from controller.resources.pod.plane import Plane
from controller.resources.pod.provisioner import Provisioner, ProvisionerName, SliceStatus
from controller.resources.pod.tpu_api.plane import TpuApi

PLANES: Mapping[str, Plane] = MappingProxyType({"tpu_api": TpuApi(), "compute_engine": ComputeEngine()})
"""By their names in `tpu.plane`."""


def provisioners_of(names: Iterable[ProvisionerName], create_seconds: float) -> dict[ProvisionerName, Provisioner]:
    """Return every way to create a slice on the planes of some provisioners; see `Plane.provisioners` for the order."""
    wanted = set(names)
    ways = (plane.provisioners(create_seconds) for plane in PLANES.values())
    return {name: provisioner for found in ways if wanted & found.keys() for name, provisioner in found.items()}


def plane_for(config: Config) -> Plane:
    """Return the plane that a config's pod comes from."""
    return PLANES[config.tpu.chosen_plane]


def plane_of(provisioner: ProvisionerName) -> Plane:
    """Return the plane that a way to create slices belongs to."""
    return next(plane for plane in PLANES.values() if provisioner in plane.provisioners(0.0))


def project_slices(context: Context) -> Iterator[SliceStatus]:
    """Yield every slice of the project and every request for one, on all planes."""
    for plane in PLANES.values():
        yield from plane.slices(context)

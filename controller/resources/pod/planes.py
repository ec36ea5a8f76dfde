"""The planes that slices come from. A new one needs its own folder and a line here."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from controller.context import Context
from controller.resources.pod.plane import Plane
from controller.resources.pod.provisioner import Provisioner, ProvisionerName, SliceStatus
from controller.resources.pod.tpu_api.plane import TpuApi

PLANES: Mapping[str, Plane] = MappingProxyType({"tpu_api": TpuApi()})


def all_provisioners(create_seconds: float) -> dict[ProvisionerName, Provisioner]:
    """Return every way to create a slice; see `Plane.provisioners` for the order."""
    return {
        name: provisioner
        for plane in PLANES.values()
        for name, provisioner in plane.provisioners(create_seconds).items()
    }


def plane_of(provisioner: ProvisionerName) -> Plane:
    """Return the plane that a way to create slices belongs to."""
    return next(plane for plane in PLANES.values() if provisioner in plane.provisioners(0.0))


def project_slices(context: Context) -> Iterator[SliceStatus]:
    """Yield every slice of the project and every request for one, on all planes."""
    for plane in PLANES.values():
        yield from plane.slices(context)

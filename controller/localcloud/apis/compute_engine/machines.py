"""TPU machine types of Compute Engine, and the slices that several of them make.

https://cloud.google.com/compute/docs/tpus. The zones are those of the generation (conf/tpu_types.yaml).
"""

import math
import re
from dataclasses import dataclass

from controller.localcloud.apis.catalog import AcceleratorType, Catalog
from controller.localcloud.http.errors import ApiError

_ZONES = {"tpu7x": frozenset({"us-central1-c"})}
"""Zones of a generation that the TPU API does not have: https://cloud.google.com/tpu/docs/regions-zones."""


@dataclass(frozen=True)
class TpuMachine:
    """Machine type with `chips` TPU chips."""

    name: str
    generation: str
    chips: int
    cpus: int
    memory_gb: int
    family: str
    """Value of the dimension `tpu_family` of its quota."""


_MACHINES = (
    TpuMachine("ct5lp-hightpu-1t", "v5e", 1, 24, 48, "CT5LP"),
    TpuMachine("ct5lp-hightpu-4t", "v5e", 4, 112, 192, "CT5LP"),
    TpuMachine("ct5lp-hightpu-8t", "v5e", 8, 224, 384, "CT5LP"),
    TpuMachine("ct5p-hightpu-4t", "v5p", 4, 208, 448, "CT5P"),
    TpuMachine("ct6e-standard-1t", "v6e", 1, 44, 176, "CT6E"),
    TpuMachine("ct6e-standard-4t", "v6e", 4, 180, 720, "CT6E"),
    TpuMachine("ct6e-standard-8t", "v6e", 8, 180, 1440, "CT6E"),
    TpuMachine("tpu7x-standard-4t", "tpu7x", 4, 224, 960, "TPU7X"),
)
MACHINES = {machine.name: machine for machine in _MACHINES}
FAMILIES = {machine.family: machine.generation for machine in _MACHINES if machine.generation != "v5e"}
_NOT_ALLOWED = frozenset({"v5e"})
"""Generations whose machine types are listed, but which only Google Kubernetes Engine may use."""


def tpu_machine(reference: str) -> TpuMachine | None:
    """Return the TPU machine type that a URL or a name refers to, or None for any other machine type."""
    return MACHINES.get(reference.rpartition("/")[2])


def machines_in_zone(catalog: Catalog, zone: str) -> list[TpuMachine]:
    return [machine for machine in _MACHINES if zone in (catalog.zones_of[machine.generation] or _ZONES.get(
        machine.generation, frozenset()))]  # fmt: skip


def check_allowed(catalog: Catalog, machine: TpuMachine, zone: str) -> None:
    """Raise ApiError 400 unless a VM of this machine type can be made in the zone."""
    if machine not in machines_in_zone(catalog, zone):
        raise ApiError(400, f"Invalid machine type {machine.name} in zone {zone}.")
    if machine.generation in _NOT_ALLOWED:
        raise ApiError(400, f"This user agent is not allowed to use the machine type {machine.name}.")


def hosts_of(machine: TpuMachine, topology: str) -> int:
    """Return how many VMs a topology such as `2x4` has; 0 if it cannot be made of them."""
    if not re.fullmatch(r"\d+(x\d+){1,2}", topology):
        return 0
    chips = math.prod(int(side) for side in topology.split("x"))
    return chips // machine.chips if chips % machine.chips == 0 else 0


def slice_type(catalog: Catalog, machine: TpuMachine, topology: str | None) -> AcceleratorType | None:
    """Return what a slice of this topology is made of, or None if the generation has no such topology.

    Without a topology it is one VM.
    """
    kinds = [kind for kind in catalog.types.values() if kind.generation == machine.generation]
    if topology is None:
        kind = next((kind for kind in kinds if kind.slice_chips == machine.chips), None)
    else:
        kind = next((kind for kind in kinds if kind.topology == topology), None)
    if kind is None or kind.slice_chips % machine.chips:
        return None
    per_chip = kind.devices // kind.chips
    vms = kind.slice_chips // machine.chips
    return AcceleratorType(
        kind.name, kind.generation, vms, machine.chips * per_chip, topology or kind.topology, machine.chips
    )

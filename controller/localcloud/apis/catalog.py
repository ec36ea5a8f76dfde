"""What the cloud offers: zones, accelerator types, runtime versions and machine types, from conf/tpu_types.yaml.

Machine types of Compute Engine and the slices that several of them make: https://cloud.google.com/compute/docs/tpus.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

import conf
from controller.localcloud.http.call import PROJECT
from controller.localcloud.http.errors import ApiError, not_found
from controller.localcloud.store import Document

_CONFIG_TYPE = {"v2": "V2", "v3": "V3", "v4": "V4", "v5e": "V5LITE_POD", "v5p": "V5P", "v6e": "V6E"}


@dataclass(frozen=True)
class AcceleratorType:
    """Accelerator type: `vms` workers, each with `chips` chips that are `devices` JAX devices."""

    name: str
    generation: str
    vms: int
    devices: int
    topology: str | None
    chips: int

    @property
    def slice_chips(self) -> int:
        return self.vms * self.chips

    @property
    def config(self) -> dict[str, str]:
        """Equivalent acceleratorConfig; empty if Google has no name for it."""
        kind = _CONFIG_TYPE.get(self.generation)
        return {"type": kind, "topology": self.topology} if kind and self.topology else {}


@dataclass(frozen=True)
class Catalog:
    """Accelerator types by name, zones by generation, and runtime versions."""

    types: Mapping[str, AcceleratorType]
    zones_of: Mapping[str, frozenset[str]]
    runtime_versions: frozenset[str]

    @property
    def zones(self) -> list[str]:
        return sorted(set().union(*self.zones_of.values()))

    @property
    def regions(self) -> list[str]:
        return sorted({zone.rpartition("-")[0] for zone in self.zones})

    def types_in_zone(self, zone: str) -> list[AcceleratorType]:
        """Return the types that the TPU API offers in a zone; it ends with v6e."""
        offered = [kind for kind in self.types.values() if kind.generation in _CONFIG_TYPE]
        return [kind for kind in offered if zone in self.zones_of[kind.generation]]

    def find_by_config(self, config: Mapping[str, Any]) -> AcceleratorType | None:
        """Return the type that an acceleratorConfig ({type, topology}) names."""
        return next((kind for kind in self.types.values() if kind.config and kind.config == dict(config)), None)


@cache
def load_catalog() -> Catalog:
    """Load the table that ships in the conf package."""
    text = (Path(conf.__file__).parent / "tpu_types.yaml").read_text()
    table = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 (both are safe loaders)
    generations = table["generations"]
    types = {
        name: AcceleratorType(name, generation, vms, chips * generations[generation]["devices_per_chip"], shape, chips)
        for name, (generation, _, vms, chips, shape) in table["types"].items()
    }
    return Catalog(
        types=types,
        zones_of={name: frozenset(facts["zones"]) for name, facts in generations.items()},
        runtime_versions=frozenset(facts["runtime_version"] for facts in generations.values()),
    )


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
_OTHERS = r"(e2|f1|g1|n1|n2|n2d|n4|t2d|c3)-[a-z]+(-\d+)?"
_OTHERS_OF_US_CENTRAL2 = r"(f1|g1|n1|n2|n2d|n4|t2d)-[a-z]+(-\d+)?"
"""Machine types of the zone of v4: https://github.com/keras-team/kinetic/issues/305."""
_CHIPS_OF_SLICES = 4
"""Chips of the machine types that make slices of several VMs."""
HYPERDISK_GENERATIONS = frozenset({"v6e", "tpu7x"})
"""Generations whose VMs have no Persistent Disk."""
_NOT_ALLOWED = frozenset({"v5e"})
"""Generations whose machine types are listed, but which only Google Kubernetes Engine may use."""


def tpu_machine(reference: str) -> TpuMachine | None:
    """Return the TPU machine type that a URL or a name refers to, or None for any other machine type."""
    return MACHINES.get(reference.rpartition("/")[2])


def zones_of(catalog: Catalog, generation: str) -> frozenset[str]:
    """Return the zones where Compute Engine has a generation."""
    return catalog.zones_of[generation] or _ZONES.get(generation, frozenset())


def check_allowed(catalog: Catalog, name: str, zone: str) -> None:
    """Raise ApiError 400 unless a VM of this machine type can be made in the zone."""
    if not _is_offered(catalog, name, zone):  # words: github.com/keras-team/kinetic/issues/305
        raise ApiError(400, f"Invalid machine type {name} in zone {zone}.")
    machine = MACHINES.get(name)
    if machine is not None and machine.generation in _NOT_ALLOWED:
        raise ApiError(400, f"This user agent is not allowed to use the machine type {name}.")


def show_machine(catalog: Catalog, zone: str, name: str, root: str) -> Document:
    """Return a machine type as the API shows it; raise ApiError 404 if the zone does not have it."""
    path = f"projects/{PROJECT}/zones/{zone}/machineTypes/{name}"
    if not _is_offered(catalog, name, zone):
        raise not_found(path)
    shown: Document = {"kind": "compute#machineType", "name": name, "zone": zone, "selfLink": root + path}
    shown["guestCpus"] = cpus_of(name)
    if machine := MACHINES.get(name):
        accelerators = [{"guestAcceleratorType": machine.family.lower(), "guestAcceleratorCount": machine.chips}]
        shown |= {"memoryMb": machine.memory_gb * 1024, "accelerators": accelerators}
    return shown


def cpus_of(name: str) -> int:
    """Return the CPUs that a VM of this machine type sees; a shared core of E2 is two of them."""
    if machine := MACHINES.get(name):
        return machine.cpus
    series, _, rest = name.partition("-")
    size = rest.rpartition("-")[2]
    return int(size) if size.isdigit() else 2 if series == "e2" else 1


def _is_offered(catalog: Catalog, name: str, zone: str) -> bool:
    if machine := MACHINES.get(name):
        return zone in zones_of(catalog, machine.generation)
    return re.fullmatch(_OTHERS_OF_US_CENTRAL2 if zone.startswith("us-central2") else _OTHERS, name) is not None


def topologies(catalog: Catalog) -> set[str]:
    """Return the topologies of slices that Compute Engine can make."""
    return {kind.topology for kind in catalog.types.values() if kind.generation in FAMILIES.values() and kind.topology}


def slice_type(catalog: Catalog, machine: TpuMachine, topology: str | None) -> AcceleratorType | None:
    """Return what a slice of this topology is made of, or None if the generation has no such topology.

    Without a topology it is one VM.
    """
    kinds = [kind for kind in catalog.types.values() if kind.generation == machine.generation]
    if topology is None:
        kind = next((kind for kind in kinds if kind.slice_chips == machine.chips), None)
    else:
        kind = next((kind for kind in kinds if kind.topology == topology), None)
    vms, others = divmod(kind.slice_chips, machine.chips) if kind else (0, 0)
    if kind is None or others or (vms > 1 and machine.chips != _CHIPS_OF_SLICES):
        return None
    devices = machine.chips * (kind.devices // kind.chips)
    return replace(kind, vms=vms, devices=devices, chips=machine.chips)

"""What the cloud offers: zones, accelerator types, runtime versions and machine types, from conf/tpu_types.yaml.

Machine types of Compute Engine and the slices that several of them make: https://cloud.google.com/compute/docs/tpus.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from conf.schema.topology import tpu_type_table
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
    """Accelerator types by name, zones by generation, runtime versions, and machine types of Compute Engine by name.

    Attributes:
        of_tpu_api: the generations that the TPU API has.
        hyperdisk: those whose VMs have no Persistent Disk.
    """

    types: Mapping[str, AcceleratorType]
    zones_of: Mapping[str, frozenset[str]]
    runtime_versions: frozenset[str]
    machines: Mapping[str, "TpuMachine"]
    of_tpu_api: frozenset[str]
    hyperdisk: frozenset[str]

    @property
    def zones(self) -> list[str]:
        return sorted(set().union(*self.zones_of.values()))

    @property
    def regions(self) -> list[str]:
        return sorted({zone.rpartition("-")[0] for zone in self.zones})

    def types_in_zone(self, zone: str) -> list[AcceleratorType]:
        """Return the types that the TPU API offers in a zone."""
        offered = [kind for kind in self.types.values() if kind.generation in self.of_tpu_api]
        return [kind for kind in offered if zone in self.zones_of[kind.generation]]

    @property
    def families(self) -> dict[str, str]:
        """The generation of each family of machine types that a quota is for."""
        return {one.family: one.generation for one in self.machines.values() if one.generation not in _NOT_ALLOWED}

    def find_by_config(self, config: Mapping[str, Any]) -> AcceleratorType | None:
        """Return the type that an acceleratorConfig ({type, topology}) names."""
        return next((kind for kind in self.types.values() if kind.config and kind.config == dict(config)), None)


@dataclass(frozen=True)
class TpuMachine:
    """Machine type with `chips` TPU chips."""

    name: str
    generation: str
    chips: int
    cpus: int
    memory_gb: int

    @property
    def family(self) -> str:
        """Value of the dimension `tpu_family` of its quota."""
        return self.name.partition("-")[0].upper()


_FOR_GKE = {"ct5lp-hightpu-1t": ("v5e", 1), "ct5lp-hightpu-4t": ("v5e", 4), "ct5lp-hightpu-8t": ("v5e", 8)}
"""Generation and chips of the machine types that are listed, but which only Google Kubernetes Engine may use."""
_NOT_ALLOWED = frozenset({"v5e"})
_SIZES = {
    "ct5lp-hightpu-1t": (24, 48), "ct5lp-hightpu-4t": (112, 192), "ct5lp-hightpu-8t": (224, 384),
    "ct5p-hightpu-4t": (208, 448),
    "ct6e-standard-1t": (44, 176), "ct6e-standard-4t": (180, 720), "ct6e-standard-8t": (180, 1440),
}  # fmt: skip
"""CPUs and memory in GB."""
_USUAL_SIZE = (224, 960)
"""Those of tpu7x-standard-4t, and of what is newer."""


@cache
def load_catalog() -> Catalog:
    """Return what the table that ships in the conf package has."""
    table = tpu_type_table()
    generations = table["generations"]
    types = {
        name: AcceleratorType(name, generation, vms, chips * generations[generation]["devices_per_chip"], shape, chips)
        for name, (generation, _, vms, chips, shape) in table["types"].items()
    }
    ours = {name: (gen, chips) for gen, facts in generations.items() for chips, name in facts["machine_types"].items()}
    return Catalog(
        types=types,
        zones_of={name: frozenset(facts["zones"]) for name, facts in generations.items()},
        runtime_versions=frozenset(facts["runtime_version"] for facts in generations.values()),
        machines={
            name: TpuMachine(name, generation, chips, *_SIZES.get(name, _USUAL_SIZE))
            for name, (generation, chips) in {**_FOR_GKE, **ours}.items()
        },
        of_tpu_api=frozenset(name for name, facts in generations.items() if facts["tpu_api"]),
        hyperdisk=frozenset(name for name, facts in generations.items() if facts["disk_type"].startswith("hyperdisk")),
    )


_OTHERS = r"(e2|f1|g1|n1|n2|n2d|n4|t2d|c3)-[a-z]+(-\d+)?"
_OTHERS_OF_US_CENTRAL2 = r"(f1|g1|n1|n2|n2d|n4|t2d)-[a-z]+(-\d+)?"
"""Machine types of the zone of v4: https://github.com/keras-team/kinetic/issues/305."""
_CHIPS_OF_SLICES = 4
"""Chips of the machine types that make slices of several VMs."""


def tpu_machine(reference: str) -> TpuMachine | None:
    """Return the TPU machine type that a URL or a name refers to, or None for any other machine type."""
    return load_catalog().machines.get(reference.rpartition("/")[2])


def check_allowed(catalog: Catalog, name: str, zone: str) -> None:
    """Raise ApiError 400 unless a VM of this machine type can be made in the zone."""
    if not _is_offered(catalog, name, zone):  # words: github.com/keras-team/kinetic/issues/305
        raise ApiError(400, f"Invalid machine type {name} in zone {zone}.")
    machine = catalog.machines.get(name)
    if machine is not None and machine.generation in _NOT_ALLOWED:
        raise ApiError(400, f"This user agent is not allowed to use the machine type {name}.")


def show_machine(catalog: Catalog, zone: str, name: str, root: str) -> Document:
    """Return a machine type as the API shows it; raise ApiError 404 if the zone does not have it."""
    shown = _machine_named(zone, name, root)
    if not _is_offered(catalog, name, zone):
        raise not_found(shown["selfLink"].removeprefix(root))
    shown["guestCpus"] = cpus_of(name)
    if machine := tpu_machine(name):
        accelerators = [{"guestAcceleratorType": machine.family.lower(), "guestAcceleratorCount": machine.chips}]
        shown |= {"memoryMb": machine.memory_gb * 1024, "accelerators": accelerators}
    return shown


def machines_by_zone(
    catalog: Catalog, others: Iterable[tuple[str, str]], root: str, wanted: Callable[[Document], bool]
) -> Document:
    """Return the machine types with TPUs, and others with their zones, as `machineTypes.aggregatedList` shows them."""
    found = [(zone, name) for name, one in catalog.machines.items() for zone in catalog.zones_of[one.generation]]
    items: Document = {f"zones/{zone}": {} for zone in catalog.zones}
    for zone, name in sorted({*found, *others}):
        is_known = (zone, name) in found
        shown = show_machine(catalog, zone, name, root) if is_known else _machine_named(zone, name, root)
        if wanted(shown):
            items.setdefault(f"zones/{zone}", {}).setdefault("machineTypes", []).append(shown)
    return {"items": items}


def _machine_named(zone: str, name: str, root: str) -> Document:
    path = f"projects/{PROJECT}/zones/{zone}/machineTypes/{name}"
    return {"kind": "compute#machineType", "name": name, "zone": zone, "selfLink": root + path}


def cpus_of(name: str) -> int:
    """Return the CPUs that a VM of this machine type sees; a shared core of E2 is two of them."""
    if machine := tpu_machine(name):
        return machine.cpus
    series, _, rest = name.partition("-")
    size = rest.rpartition("-")[2]
    return int(size) if size.isdigit() else 2 if series == "e2" else 1


def _is_offered(catalog: Catalog, name: str, zone: str) -> bool:
    if machine := catalog.machines.get(name):
        return zone in catalog.zones_of[machine.generation]
    return re.fullmatch(_OTHERS_OF_US_CENTRAL2 if zone.startswith("us-central2") else _OTHERS, name) is not None


def topologies(catalog: Catalog) -> set[str]:
    """Return the topologies of slices that Compute Engine can make."""
    having = set(catalog.families.values())
    return {kind.topology for kind in catalog.types.values() if kind.generation in having and kind.topology}


def slice_type(catalog: Catalog, machine: TpuMachine, topology: str | None) -> AcceleratorType | None:
    """Return what a slice of this topology is made of, or None if the generation has no such topology.

    Without a topology it is one VM.
    """
    kinds = [kind for kind in catalog.types.values() if kind.generation == machine.generation]
    alone = [kind for kind in kinds if kind.slice_chips == machine.chips]
    kind = next(iter([kind for kind in kinds if kind.topology == topology] if topology else alone), None)
    vms, others = divmod(kind.slice_chips, machine.chips) if kind else (0, 0)
    if kind is None or others or (vms > 1 and machine.chips != _CHIPS_OF_SLICES):
        return None
    devices = machine.chips * (kind.devices // kind.chips)
    return replace(kind, vms=vms, devices=devices, chips=machine.chips)

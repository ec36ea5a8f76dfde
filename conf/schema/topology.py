"""Accelerator types and regions: the facts of `tpu_types.yaml` and `regions.yaml`; and the slice that a run needs.

Hosts, devices, region, runtime and price all derive from a type; a region has a subnet range and nearby locations of
buckets.
"""

import difflib
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BeforeValidator, Field, field_validator, model_validator

import conf
from conf.schema.base import VOLATILE, Name, Strict, Zone

TABLE_FILE = Path(conf.__file__).with_name("tpu_types.yaml")
YamlLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C loader is ten times faster where libyaml is present
YamlDumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


REQUIRED = ("devices_per_chip", "runtime_version", "zones", "usd_per_chip_hour")
"""What the row of a generation must say; it may say less of the rest."""


class TableError(ValueError):
    """`tpu_types.yaml` is incomplete; the message names the row and the key."""


USUAL = {"v5e": "v5litepod", "v5lite": "v5litepod", "v6": "v6e", "v7": "tpu7x", "v7x": "tpu7x"}
"""What generations of TPUs are called elsewhere, and by the API."""


class UnknownTypeError(ValueError):
    """The table has no such accelerator type; the message suggests the closest ones."""


@dataclass(frozen=True)
class Topology:
    """One row of the table: `v5litepod-16` is 16 chips on 4 VMs, wired 4x4.

    Memory in bytes, compute in FLOP/s, prices in USD per chip-hour.
    """

    accelerator_type: str
    generation: str
    chips: int
    workers: int
    devices: int
    usd_per_chip_hour: MappingProxyType[str, tuple[float | None, float | None]]  # zone: (on demand, spot)
    shape: str | None = None  # None for one chip
    hbm_bytes_per_chip: int | None = None  # None: unknown, as of the next one
    bf16_flops_per_chip: float | None = None
    runtime_version: str = ""
    zones: tuple[str, ...] = ()
    flex_start_zones: tuple[str, ...] = ()
    on_tpu_api: bool = True
    machine_type: str = ""  # of Compute Engine; "" if it has none for this type
    image_family: str = ""  # of Compute Engine

    @property
    def devices_per_worker(self) -> int:
        return self.devices // self.workers

    def usd_per_hour(self, zone: str, *, spot: bool) -> float | None:
        """Return the list price of the whole slice, or None if unknown. See the table's header for its date."""
        price = self.usd_per_chip_hour.get(zone, (None, None))[1 if spot else 0]
        return None if price is None else price * self.chips


def read_table(file: Path) -> Any:
    """Return what a YAML file of Slipway's own says."""
    return yaml.load(file.read_text(), Loader=YamlLoader)  # noqa: S506 - CSafeLoader is a safe loader


@cache
def tpu_type_table() -> dict[str, Any]:
    """Return the parsed `tpu_types.yaml`, each generation with all its keys. Raises TableError."""
    return read_tpu_types(TABLE_FILE)


def read_tpu_types(file: Path) -> dict[str, Any]:
    """Return a parsed table of TPU types, each generation with all its keys. Raises TableError."""
    table = read_table(file)
    defaults, rows = table["generation_defaults"], table["generations"]
    for name, row in rows.items():
        if missing := [key for key in REQUIRED if key not in row]:
            raise TableError(f"{file.name}: generations.{name} lacks {', '.join(missing)}")
        if unknown := row.keys() - {*REQUIRED, *defaults}:
            known = ", ".join((*REQUIRED, *defaults))
            raise TableError(f"{file.name}: generations.{name} has no {', '.join(sorted(unknown))}; keys: {known}")
    table["generations"] = {name: {**defaults, **row} for name, row in rows.items()}
    for name, row in table["types"].items():
        if row[0] not in rows:
            raise TableError(f"{file.name}: types.{name} is of {row[0]!r}, which generations does not have")
    return table


def usual_type(name: str) -> str:
    """Return a type as the API calls it: v5e is v5litepod there, v6 v6e, v7 tpu7x; SkyPilot's begin with tpu-."""
    plain = re.sub(r"^tpu-(?=v)", "", name.lower())
    plain = re.sub(r"^(v5e|v5p|v5litepod|v6e)(?=\d+$)", r"\1-", plain)
    return re.sub(r"^(v5e|v5lite|v6|v7x?)(?=[-_])", lambda found: USUAL[found[1]], plain)


def find_topology(accelerator_type: str, machine_type: str | None = None) -> Topology:
    """Look up an accelerator type.

    Raises UnknownTypeError if the table has no such type; the message names the nearest ones.

    Args:
        accelerator_type: `v6e-8`.
        machine_type: divides the chips among VMs of this type of Compute Engine; None: as the table does.
    """
    types = tpu_type_table()["types"]
    if accelerator_type not in types:
        wanted = usual_type(accelerator_type)
        begun = [kind for kind in types if kind.startswith(usual_type(f"{accelerator_type}-"))]  # of v5e
        near = [wanted] if wanted in types else begun[:6] or difflib.get_close_matches(wanted, types, n=4, cutoff=0.5)
        if near:
            raise UnknownTypeError(f"unknown type {accelerator_type!r}; closest: {', '.join(near)}")
        sized = [kind for kind in types if accelerator_type.isdigit() and kind.endswith(f"-{accelerator_type}")]
        raise UnknownTypeError(f"unknown type {accelerator_type!r}, and only TPUs can be rented; {_choices(sized)}")
    name, chips, vms, chips_per_vm, shape = types[accelerator_type]
    generation = tpu_type_table()["generations"][name]
    machines: dict[int, str] = generation["machine_types"]
    if machine_type is not None:
        # a slice of several VMs has four chips on each, in every generation
        fits = {name: size for size, name in machines.items() if size == chips or (size == 4 and chips % 4 == 0)}
        if machine_type not in fits:
            choices = ", ".join(fits) or "none"
            raise UnknownTypeError(f"{accelerator_type} has no VMs of type {machine_type!r}; choices: {choices}")
        chips_per_vm = fits[machine_type]
        vms = chips // chips_per_vm
    return Topology(
        accelerator_type=accelerator_type,
        generation=name,
        chips=chips,
        workers=vms,
        devices=chips * generation["devices_per_chip"],
        shape=shape,
        hbm_bytes_per_chip=generation["hbm_bytes_per_chip"],
        bf16_flops_per_chip=generation["bf16_flops_per_chip"],
        runtime_version=generation["runtime_version"],
        zones=tuple(generation["zones"]),
        usd_per_chip_hour=MappingProxyType({z: (p[0], p[1]) for z, p in generation["usd_per_chip_hour"].items()}),
        flex_start_zones=tuple(generation["flex_start_zones"]),
        on_tpu_api=generation["tpu_api"],
        machine_type=machines.get(chips_per_vm, ""),
        image_family=generation["image_family"],
    )


def _choices(sized: list[str]) -> str:
    """Return types to choose from: those of a size, or the smallest and largest of each generation."""
    if sized:
        return f"did you mean {' or '.join(sized)}?"
    rows = tpu_type_table()["types"].items()
    of = [[kind for kind, row in rows if row[0] == name] for name in tpu_type_table()["generations"]]
    return f"choices: {', '.join(f'{kinds[0]} to {kinds[-1]}' for kinds in of if kinds)}"


def known_type(spelling: str) -> str:
    """Return the name of a slice type, from its name or from generation and topology. Raises UnknownTypeError."""
    name = type_of_shape(spelling) if ":" in spelling else spelling
    find_topology(name)
    return name


def type_of_shape(spelling: str) -> str:
    """Return the accelerator type of a generation and a topology: `v6e-8` of `v6e:2x4`.

    Raises UnknownTypeError if the generation does not exist, or has no such topology.
    """
    generation, _, shape = spelling.partition(":")
    rows = [(name, row) for name, row in tpu_type_table()["types"].items() if row[0] == generation]
    if not rows:
        raise UnknownTypeError(
            f"unknown generation {generation!r}; choices: {', '.join(tpu_type_table()['generations'])}"
        )
    shapes = {row[4]: name for name, row in rows if row[4]}
    if shape in shapes:
        return shapes[shape]
    near = difflib.get_close_matches(shape, shapes, n=3, cutoff=0.0)
    choices = f"; closest: {', '.join(near)}" if near else f"; use an accelerator type such as {rows[0][0]}"
    raise UnknownTypeError(f"{generation} has no topology {shape!r}{choices}")


def type_of_machines(machine_type: str, vms: int) -> str:
    """Return the accelerator type that so many VMs of a machine type of Compute Engine make up, or ''."""
    for generation, facts in tpu_type_table()["generations"].items():
        for size, name in facts["machine_types"].items():
            if name == machine_type:
                rows = tpu_type_table()["types"].items()
                return next((kind for kind, row in rows if row[0] == generation and row[1] == size * vms), "")
    return ""


def this_machine(backend: str, devices: int) -> Topology:
    """Return the devices of one machine without a pod as a topology, `gpu-2`."""
    return Topology(
        accelerator_type=f"{backend}-{devices}",
        generation=backend,
        chips=devices,
        workers=1,
        devices=devices,
        usd_per_chip_hour=MappingProxyType({}),
    )


def zone_region(zone: str) -> str:
    """Return the region of a zone: `us-central1` for `us-central1-a`."""
    return zone.rpartition("-")[0]


REGIONS_FILE = Path(conf.__file__).with_name("regions.yaml")


@cache
def region_table() -> dict[str, dict[str, str | None]]:
    """Return the parsed `regions.yaml`, by region."""
    return read_table(REGIONS_FILE)


def subnet_range(region: str) -> str | None:
    """Return the region's own CIDR range, or None if the table does not list the region."""
    return region_table().get(region, {}).get("subnet")


def is_near(location: str, region: str) -> bool:
    """Return whether a bucket in `location` (a region or multi-region, in any case) is near workers in `region`."""
    return location.lower() in (region, region_table().get(region, {}).get("multi_region"))


Tier = Literal["on_demand", "spot", "preemptible", "reserved", "flex_start"]
NODE_GENERATIONS = frozenset({"v2", "v3"})
"""Generations that provisioner=auto creates as plain nodes. Later ones use queued resources."""


def _as_tuple(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class Tpu(Strict):
    """The TPU slice."""

    accelerator_type: str = Field(
        description="Slice type from conf/tpu_types.yaml, e.g. v6e-8, or generation and topology, e.g. v6e:2x4."
    )
    plane: Annotated[str, VOLATILE] = Field(
        description="Google's API that the slice comes from: tpu_api, compute_engine, or auto, which asks every plane "
        "that has the type, in turn, until one has capacity.",
        examples=["auto", "tpu_api", "compute_engine"],
    )
    machine_type: Annotated[str | None, VOLATILE] = Field(
        description="On Compute Engine: type of the slice's VMs, e.g. ct6e-standard-4t. null: the fewest VMs."
    )
    boot_disk_gb: Annotated[int, VOLATILE] = Field(
        ge=100, le=65536, description="On Compute Engine: size in GB of each VM's boot disk."
    )
    max_run_hours: Annotated[float | None, VOLATILE] = Field(
        ge=0.5,
        le=2880,
        description="On Compute Engine: hours after which Google itself deletes the pod, even if every "
        "controller is gone. null: as long as the budget allows, if there is one. flex_start needs one (168 at most).",
    )
    zone: Annotated[Zone, VOLATILE] = Field(description="Zone to try first.")
    fallback_zones: Annotated[tuple[Zone, ...], VOLATILE] = Field(description="Zones to try next, in order.")
    name: Annotated[Name | None, VOLATILE] = Field(description="TPU node name. null: set from cloud, tpu and network.")
    runtime_version: str | None = Field(description="VM image. null: the image Google documents for the generation.")
    capacity: Annotated[tuple[Tier, ...], BeforeValidator(_as_tuple, Tier | tuple[Tier, ...]), VOLATILE] = Field(
        description="Capacity tier, or a list of tiers to try in order. Spot is cheaper but can be preempted."
    )
    provisioner: Annotated[Literal["auto", "node", "queued"], VOLATILE] = Field(
        description="node: create directly. queued: request a queued resource. auto: queued from v4 on."
    )
    valid_until_hours: Annotated[float | None, VOLATILE] = Field(
        gt=0, description="Hours until a queued request expires. null: never."
    )
    reservation: Annotated[str | None, VOLATILE] = Field(
        min_length=1, description="Name of the reservation that capacity=reserved uses."
    )
    adopt: Annotated[bool, VOLATILE] = Field(
        description="Use the existing pod named tpu.name. Slipway never creates, changes or deletes it."
    )
    external_ip: Annotated[bool | None, VOLATILE] = Field(
        description="Give each worker an external IP address. null: only if network.nat=false, ssh.method=external or "
        "network.laptop is set."
    )
    data_disk_gb: Annotated[int | None, VOLATILE] = Field(
        ge=10, le=65536, description="Size in GB of a disk at /mnt/data that survives preemption. null: no disk."
    )
    create_timeout_minutes: Annotated[float, VOLATILE] = Field(
        gt=0, description="Limit for one creation, and for waiting while there is another zone or tier."
    )

    @field_validator("accelerator_type")
    @classmethod
    def _known_type(cls, value: str) -> str:
        try:
            return known_type(value)
        except UnknownTypeError as error:
            raise ValueError(str(error)) from None

    @field_validator("capacity")
    @classmethod
    def _unique_tiers(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value:
            raise ValueError("must list at least one tier")
        if len(set(value)) != len(value):
            raise ValueError("lists a tier twice")
        return value

    @model_validator(mode="after")
    def _known_machine(self) -> Self:
        if self.machine_type is not None:
            try:
                find_topology(self.accelerator_type, self.machine_type)
            except UnknownTypeError as error:
                raise ValueError(f"machine_type: {error}") from None
        return self

    @property
    def plane_of_name(self) -> str:
        """The plane that is a part of the pod's name; '' where the name is as it was when there was one plane."""
        facts = find_topology(self.accelerator_type)
        if self.plane == "auto":
            return "" if facts.on_tpu_api and self.machine_type is None else "compute_engine"
        return "" if self.plane == "tpu_api" and not facts.image_family else self.plane

    @property
    def all_zones(self) -> tuple[str, ...]:
        """Zones where the pod may be, the preferred one first."""
        return tuple(dict.fromkeys((self.zone, *self.fallback_zones)))

    def is_queued(self, tier: str) -> bool:
        """Return whether to queue for this tier: flex_start always, preemptible only with provisioner=queued."""
        if tier == "flex_start":
            return True
        if self.provisioner != "auto":
            return self.provisioner == "queued"
        return tier != "preemptible" and find_topology(self.accelerator_type).generation not in NODE_GENERATIONS

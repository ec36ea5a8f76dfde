"""Accelerator types: the facts of `tpu_types.yaml` as one typed record.

Hosts, devices, region, runtime and price all derive from here.
"""

import difflib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

import conf

TABLE_FILE = Path(conf.__file__).with_name("tpu_types.yaml")
YamlLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C loader is ten times faster where libyaml is present
YamlDumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


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
    shape: str | None  # None for one chip
    hbm_bytes_per_chip: int | None  # None: unknown, as of the next one
    bf16_flops_per_chip: float | None
    runtime_version: str
    zones: tuple[str, ...]
    usd_per_chip_hour: MappingProxyType[str, tuple[float | None, float | None]]  # zone: (on demand, spot)

    @property
    def devices_per_worker(self) -> int:
        return self.devices // self.workers

    def usd_per_hour(self, zone: str, *, spot: bool) -> float | None:
        """Return the list price of the whole slice, or None if unknown. See the table's header for its date."""
        price = self.usd_per_chip_hour.get(zone, (None, None))[1 if spot else 0]
        return None if price is None else price * self.chips


@cache
def tpu_type_table() -> dict[str, Any]:
    """Return the parsed `tpu_types.yaml`."""
    return yaml.load(TABLE_FILE.read_text(), Loader=YamlLoader)  # noqa: S506 - CSafeLoader is a safe loader


def find_topology(accelerator_type: str) -> Topology:
    """Look up an accelerator type. Raises UnknownTypeError with the nearest names."""
    types = tpu_type_table()["types"]
    if accelerator_type not in types:
        wanted = accelerator_type.replace("v5e", "v5litepod")  # v5e is its name everywhere but in the API
        near = [wanted] if wanted in types else difflib.get_close_matches(wanted, types, n=4, cutoff=0.5)
        raise UnknownTypeError(f"unknown type {accelerator_type!r}; closest: {', '.join(near) or 'none'}")
    name, chips, vms, _, shape = types[accelerator_type]
    generation = tpu_type_table()["generations"][name]
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
    )


def this_machine(backend: str, devices: int) -> Topology:
    """Return the devices of one machine without a pod as a topology, `gpu-2`."""
    return Topology(
        accelerator_type=f"{backend}-{devices}",
        generation=backend,
        chips=devices,
        workers=1,
        devices=devices,
        shape=None,
        hbm_bytes_per_chip=None,
        bf16_flops_per_chip=None,
        runtime_version="",
        zones=(),
        usd_per_chip_hour=MappingProxyType({}),
    )


def zone_region(zone: str) -> str:
    """Return the region of a zone: `us-central1` for `us-central1-a`."""
    return zone.rpartition("-")[0]

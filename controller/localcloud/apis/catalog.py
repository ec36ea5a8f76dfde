"""Catalog of the cloud: zones, accelerator types and runtime versions, from conf/tpu_types.yaml."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

import conf

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
    def listed_runtime_versions(self) -> frozenset[str]:
        """Runtime versions that Google lists. Its list lacks the documented image of v5e, which can be used."""
        return self.runtime_versions - {"v2-alpha-tpuv5-lite"}

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
        name: AcceleratorType(
            name, generation, vms, chips_per_vm * generations[generation]["devices_per_chip"], shape, chips_per_vm
        )
        for name, (generation, _chips, vms, chips_per_vm, shape) in table["types"].items()
    }
    return Catalog(
        types=types,
        zones_of={name: frozenset(facts["zones"]) for name, facts in generations.items()},
        runtime_versions=frozenset(facts["runtime_version"] for facts in generations.values()),
    )

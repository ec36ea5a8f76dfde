"""Can the slice be had there, with that image?"""

from __future__ import annotations

from collections.abc import Iterator

from conf.schema import Config
from conf.topology import table
from controller.finding import Finding


def zone_has_type(config: Config) -> Iterator[Finding]:
    """Each generation lives in some zones; the table may be behind Google, so that Google's own list decides."""
    topology = config.topology
    if topology.zones and config.tpu.zone not in topology.zones:
        zones = ", ".join(topology.zones)
        severity = "error" if config.cloud.kind == "local" or not _known_zone(config.tpu.zone) else "warning"
        yield Finding(
            "zone", severity, "tpu.zone", f"{config.tpu.zone} has no {topology.generation}; known zones: {zones}"
        )


def obtainable(config: Config) -> Iterator[Finding]:
    """Google adds new generations through Compute Engine alone."""
    if config.topology.generation == "tpu7x":
        words = (
            "tpu7x is offered through Compute Engine only, which slipway cannot drive yet; choose v6e, v5p, v5e or v4"
        )
        yield Finding("obtainable", "error", "tpu.accelerator_type", words)


def documented_runtime(config: Config) -> Iterator[Finding]:
    """A slice with the image of another generation boots, and JAX finds no TPU on it."""
    documented = config.topology.runtime_version
    if config.tpu.runtime_version not in (None, documented):
        generation = config.topology.generation
        words = f"{config.tpu.runtime_version} is not the image Google documents for {generation} ({documented})"
        yield Finding("runtime", "warning", "tpu.runtime_version", words)


def _known_zone(zone: str) -> bool:

    return any(zone in generation["zones"] for generation in table()["generations"].values())


CHECKS = (
    zone_has_type,
    obtainable,
    documented_runtime,
)

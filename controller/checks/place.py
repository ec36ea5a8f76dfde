"""Can the slice be had there, in that way, with that image?"""

from __future__ import annotations

from collections.abc import Iterator

from conf.schema.config import Config
from conf.schema.infra.regions import subnet_range
from conf.schema.infra.topology import region, table
from controller.core.finding import Finding


def zone_has_type(config: Config) -> Iterator[Finding]:
    """Each generation lives in some zones; the table may be behind Google, so that Google's own list decides."""
    topology = config.topology
    zones = ", ".join(topology.zones)
    for zone in config.tpu.all_zones if topology.zones else ():
        if zone in topology.zones:
            continue
        certain = config.cloud.kind == "local" or not (known_zone(zone) or subnet_range(region(zone)))
        key = "tpu.zone" if zone == config.tpu.zone else "tpu.fallback_zones"
        words = f"{zone} has no {topology.generation}; known zones: {zones}"
        yield Finding("zone", "error" if certain else "warning", key, words)


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


def tier_has_a_way(config: Config) -> Iterator[Finding]:
    """Each tier is had through nodes, queued resources or both."""
    tpu = config.tpu
    if "flex_start" in tpu.capacity and tpu.provisioner == "node":
        words = "flex_start is had through a queued resource only; set it to auto or queued"
        yield Finding("tier", "error", "tpu.provisioner", words)
    if "preemptible" in tpu.capacity and tpu.provisioner == "queued":
        words = "a queued resource has spot, not preemptible (which ends after 24 h); choose spot"
        yield Finding("tier", "error", "tpu.capacity", words)
    if "reserved" in tpu.capacity and tpu.reservation is None and tpu.is_queued("reserved"):
        yield Finding("reservation", "error", "tpu.reservation", "capacity=reserved needs the name of the reservation")


def adopted_has_a_name(config: Config) -> Iterator[Finding]:
    """What is adopted is found by its name."""
    if config.tpu.adopt and config.tpu.name is None:
        yield Finding("adopt", "error", "tpu.name", "tpu.adopt=true needs the name of the existing pod")
    if config.tpu.adopt and config.tpu.data_disk_gb is not None:
        words = "an adopted pod is never changed, so it gets no disk; set it to null"
        yield Finding("adopt", "error", "tpu.data_disk_gb", words)


def disk_is_writable(config: Config) -> Iterator[Finding]:
    """https://cloud.google.com/tpu/docs/setup-persistent-disk: several VMs can only read a disk."""
    if config.tpu.data_disk_gb is not None and config.topology.workers > 1:
        words = (
            f"Google attaches a writable disk to one VM only, and {config.tpu.accelerator_type} has "
            f"{config.topology.workers}; set it to null and write to the bucket"
        )
        yield Finding("data_disk", "error", "tpu.data_disk_gb", words)


def known_zone(zone: str) -> bool:
    """Does any generation of TPU live there, as far as the table knows?"""
    return any(zone in generation["zones"] for generation in table()["generations"].values())


CHECKS = (
    zone_has_type,
    obtainable,
    documented_runtime,
    tier_has_a_way,
    adopted_has_a_name,
    disk_is_writable,
)

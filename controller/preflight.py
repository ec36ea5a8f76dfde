"""Checks between sections of the config, before anything is touched. Each is a small pure function.

What the schema can judge by itself (types, bounds, unknown keys) it judges in `conf/schema.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from conf.schema import Config
from conf.topology import table


@dataclass(frozen=True)
class Finding:
    """`key` is what to change. An error stops `up`; a warning is shown."""

    check: str
    severity: Literal["error", "warning"]
    key: str
    words: str

    def __str__(self) -> str:
        return f"{self.key}: {self.words}"


def preflight(config: Config) -> list[Finding]:
    """Every finding, errors first."""
    found = [finding for check in CHECKS for finding in check(config)]
    return sorted(found, key=lambda f: f.severity)


def mesh_covers_devices(config: Config) -> Iterator[Finding]:
    if config.program.kind != "trainer":
        return
    devices = config.topology.devices
    axes = {"data": config.mesh.data, "fsdp": config.mesh.fsdp, "tensor": config.mesh.tensor}
    product = 1
    for size in axes.values():
        product *= size if size > 0 else 1
    words = " x ".join(str(size) for size in axes.values())
    free = -1 in axes.values()
    if (free and devices % product) or (not free and product != devices):
        fitting = f"choose sizes whose product {'divides' if free else 'is'} {devices}, or mesh.data=-1"
        yield Finding(
            "mesh",
            "error",
            "mesh",
            f"{words} does not make the {devices} devices of {config.tpu.accelerator_type}; {fitting}",
        )


def zone_has_type(config: Config) -> Iterator[Finding]:
    topology = config.topology
    if topology.zones and config.tpu.zone not in topology.zones:
        zones = ", ".join(topology.zones)
        severity = "error" if config.cloud.kind == "local" or not _known_zone(config.tpu.zone) else "warning"
        yield Finding(
            "zone", severity, "tpu.zone", f"{config.tpu.zone} has no {topology.generation}; known zones: {zones}"
        )


def trainer_is_complete(config: Config) -> Iterator[Finding]:
    if config.program.kind != "trainer":
        return
    for group in ("model", "data", "loop", "optimizer"):
        if getattr(config, group) is None:
            yield Finding("complete", "error", group, f"program=trainer needs one; choose {group}=… or +experiment=…")


def command_is_given(config: Config) -> Iterator[Finding]:
    if config.program.kind == "command" and not config.program.command:
        yield Finding("command", "error", "program.command", "is empty; e.g. 'program.command=[python, train.py]'")


def way_out(config: Config) -> Iterator[Finding]:
    if not config.tpu.external_ip and not config.network.nat:
        yield Finding(
            "way_out",
            "error",
            "network.nat",
            "workers without external address need it to install packages; set it to true",
        )


def ssh_is_not_open(config: Config) -> Iterator[Finding]:
    if "0.0.0.0/0" in config.network.ssh_source_ranges:
        yield Finding("ssh_open", "warning", "network.ssh_source_ranges", "0.0.0.0/0 lets the whole world try SSH")


def documented_runtime(config: Config) -> Iterator[Finding]:
    documented = config.topology.runtime_version
    if config.tpu.runtime_version not in (None, documented):
        generation = config.topology.generation
        words = f"{config.tpu.runtime_version} is not the image Google documents for {generation} ({documented})"
        yield Finding("runtime", "warning", "tpu.runtime_version", words)


def obtainable(config: Config) -> Iterator[Finding]:
    if config.topology.generation == "tpu7x":
        words = (
            "tpu7x is offered through Compute Engine only, which slipway cannot drive yet; choose v6e, v5p, v5e or v4"
        )
        yield Finding("obtainable", "error", "tpu.accelerator_type", words)


def _known_zone(zone: str) -> bool:

    return any(zone in generation["zones"] for generation in table()["generations"].values())


CHECKS: tuple[Callable[[Config], Iterator[Finding]], ...] = (
    trainer_is_complete,
    command_is_given,
    mesh_covers_devices,
    zone_has_type,
    obtainable,
    documented_runtime,
    way_out,
    ssh_is_not_open,
)

"""Do the workers reach the internet, and who reaches them?"""

from __future__ import annotations

from collections.abc import Iterator

from conf.schema import Config
from controller.finding import Finding


def way_out(config: Config) -> Iterator[Finding]:
    """A worker without external address reaches the internet through a NAT only; without, installing packages hangs."""
    if not config.tpu.external_ip and not config.network.nat:
        yield Finding(
            "way_out",
            "error",
            "network.nat",
            "workers without external address need it to install packages; set it to true",
        )


def ssh_is_not_open(config: Config) -> Iterator[Finding]:
    """A port 22 that is open to everyone is tried by everyone within minutes."""
    if "0.0.0.0/0" in config.network.ssh_source_ranges:
        yield Finding("ssh_open", "warning", "network.ssh_source_ranges", "0.0.0.0/0 lets the whole world try SSH")


CHECKS = (
    way_out,
    ssh_is_not_open,
)

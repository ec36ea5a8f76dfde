"""Do the workers reach the internet, and who reaches them?"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from conf.schema.config import Config
from conf.schema.infra.network import IAP_RANGE, WORLD
from controller.core.finding import Finding


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
    if WORLD in config.network.ssh_source_ranges and not config.network.open_to_world:
        words = f"{WORLD} lets the whole world try SSH; if you mean it say network.open_to_world=true"
        yield Finding("ssh_open", "error", "network.ssh_source_ranges", words)
    if config.network.open_to_world:
        yield Finding("ssh_open", "warning", "network.open_to_world", "the whole world may try SSH")


def ssh_has_a_way(config: Config) -> Iterator[Finding]:
    """Where nothing admits the way that is asked for, each connection would only be given up after its time."""
    method, network = config.ssh.method, config.network
    through_iap = any(_covers(block, IAP_RANGE) for block in network.ssh_admitted)
    if method == "iap" and not through_iap:
        words = f"ssh.method=iap needs {IAP_RANGE} among them"
        yield Finding("ssh_way", "error", "network.ssh_source_ranges", words)
    if method == "external" and not config.tpu.external_ip:
        yield Finding("ssh_way", "error", "tpu.external_ip", "ssh.method=external needs it to be true")
    others = set(network.ssh_admitted) - {IAP_RANGE}
    if method == "external" and not others and network.laptop is None:
        words = "ssh.method=external, but only IAP is admitted; set it to auto or to this machine's range"
        yield Finding("ssh_way", "error", "network.laptop", words)


def _covers(block: str, source: str) -> bool:
    inner, outer = ipaddress.IPv4Network(source), ipaddress.IPv4Network(block, strict=False)
    return inner.subnet_of(outer)


CHECKS = (
    way_out,
    ssh_is_not_open,
    ssh_has_a_way,
)

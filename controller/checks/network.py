"""Network: workers reach the internet, and only you reach the workers."""

import ipaddress
from collections.abc import Iterator

from conf.schema.config import Config
from conf.schema.infra.cloud import ANYWHERE, IAP_RANGE
from controller.core.finding import Issue, check


@check("way_out", "error", "network.nat")
def workers_reach_internet(config: Config) -> Iterator[Issue]:
    """Without an external address, workers need a NAT to reach the internet; otherwise package installs hang."""
    if not config.external_ip and not config.network.nat:
        yield Issue("workers without an external address need it to install packages; set it to true")


@check("ssh_open", "error", "network.ssh_source_ranges", "network.open_to_world", also="warning")
def ssh_is_not_open(config: Config) -> Iterator[Issue]:
    """A port 22 open to everyone is attacked within minutes."""
    if ANYWHERE in config.network.ssh_source_ranges and not config.network.open_to_world:
        yield Issue(f"{ANYWHERE} opens SSH to the whole internet; to allow it, set network.open_to_world=true")
    if config.network.open_to_world:
        yield Issue("SSH is open to the whole internet", "network.open_to_world", "warning")


@check("ssh_way", "error", "network.ssh_source_ranges", "tpu.external_ip", "network.laptop", also="warning")
def ssh_has_a_route(config: Config) -> Iterator[Issue]:
    """If no rule admits the chosen method, every connection fails, and only after its timeout."""
    method, network = config.ssh.method, config.network
    through_iap = any(_covers(block, IAP_RANGE) for block in network.all_ssh_source_ranges)
    if method == "iap" and not through_iap:
        yield Issue(f"ssh.method=iap needs {IAP_RANGE} in this list")
    if method == "external" and not config.external_ip:
        yield Issue("ssh.method=external needs true or null", "tpu.external_ip")
    elif network.laptop is not None and not config.external_ip:
        message = (
            "no worker has an external address for this machine to reach; set tpu.external_ip=null, or this to null"
        )
        yield Issue(message, "network.laptop", "warning")
    others = set(network.all_ssh_source_ranges) - {IAP_RANGE}
    if method == "external" and not others and network.laptop is None:
        message = "ssh.method=external, but only IAP is admitted; use auto or this machine's range"
        yield Issue(message, "network.laptop")


def _covers(block: str, source: str) -> bool:
    inner, outer = ipaddress.IPv4Network(source), ipaddress.IPv4Network(block, strict=False)
    return inner.subnet_of(outer)

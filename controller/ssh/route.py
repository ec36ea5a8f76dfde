"""Which way leads to the workers of a pod: their external addresses, Google's Identity-Aware Proxy, or their internal
addresses."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from conf.schema.infra.network import IAP_RANGE
from controller.gcp.client import ForbiddenError
from controller.gcp.firewall_rules import admits
from controller.gcp.names import TAG, leaf

if TYPE_CHECKING:
    from conf.schema.config import Config
    from controller.context import Context
    from controller.resources.pod.node import Node
    from controller.ssh.fleet import Fleet
    from controller.ssh.iap import IapTunnel

Route = Literal["external", "iap", "internal"]
Rule = dict[str, Any]
OS_LOGIN_HINT = (
    "OS Login is on here: you need roles/compute.osAdminLogin, and roles/iam.serviceAccountUser on the pod's account"
)


def open_fleet(world: Context, node: Node, config: Config, ssh_config: Path | None) -> Fleet:
    """The SSH connections to a pod, by the way that `ssh.method` says."""
    from controller.ssh.client_key import private_key
    from controller.ssh.fleet import ConnectionParams, Fleet

    way = route_to(world, node, config)
    guests = GuestAttributes(world, node)
    external = way == "external"
    access = ConnectionParams(
        pod=node.name,
        user=world.login(),
        key=private_key(world.keys),
        addresses=[(external and endpoint.external) or endpoint.internal for endpoint in node.status.endpoints],
        host_keys=guests.host_keys,
        ssh_config=ssh_config,
        tunnel=guests.tunnel if way == "iap" else None,
        way={"external": "its external address", "iap": "IAP", "internal": "its internal address"}[way],
        kept=world.state / "known_hosts" / world.project.replace(":", "_") / node.name,
        incarnation=node.status.uid,
        trust_on_first_use=config.ssh.host_keys == "trust_on_first_use",
        auth_hint=OS_LOGIN_HINT if world.uses_os_login else "",
        connect_seconds=config.ssh.connect_timeout_seconds,
        warm_up_seconds=config.ssh.ready_timeout_seconds,
    )
    return Fleet(access, world.clock.sleep)


def route_to(world: Context, node: Node, config: Config) -> Route:
    """What `ssh.method` says; `auto`: the external address if a firewall rule admits this machine, else IAP if one
    admits that, else the internal address."""
    if config.ssh.method != "auto":
        return config.ssh.method
    external = bool(node.status.endpoints) and all(endpoint.external for endpoint in node.status.endpoints)
    return choose_route(_rules(world, node.status.spec.network, config), external=external, laptop=world.find_public_ip)


def choose_route(
    rules: Sequence[Rule], *, external: bool, laptop: Callable[[], str | None], tags: Iterable[str] = (TAG,)
) -> Route:
    """Pure but for `laptop`, which may ask somebody for our address and is called only if that matters."""
    tags = tuple(tags)
    if external and any(_may_contain_us(block) for rule in rules for block in rule.get("sourceRanges", ())):
        ours = laptop()
        if ours is not None and admits_ssh(rules, f"{ours}/32", tags):
            return "external"
    return "iap" if admits_ssh(rules, IAP_RANGE, tags) else "internal"


def admits_ssh(rules: Iterable[Rule], source: str, tags: Iterable[str]) -> bool:
    """Do all rules together let `source` reach port 22? The one of the lowest priority number decides; among equals one
    that denies: https://cloud.google.com/firewall/docs/firewalls#priority_order_for_firewall_rules"""
    for rule in sorted(rules, key=lambda rule: (rule.get("priority", 1000), "denied" not in rule)):
        spoken = rule.get("denied", rule.get("allowed", ()))
        if admits({**rule, "allowed": spoken}, ("tcp:22",), (source,), tags):
            return "denied" not in rule
    return False


def _may_contain_us(block: str) -> bool:
    """Can this machine, seen from the workers, be in that range? Loopback is where the emulated cloud sees it."""
    range_ = ipaddress.ip_network(block, strict=False)
    return block != IAP_RANGE and (range_.is_loopback or not range_.is_private)


def _rules(world: Context, network: str, config: Config) -> list[Rule]:
    """The rules of a network as they are; as the config would have them, where we may not look."""
    try:
        found = list(world.google.pages("compute", "firewalls.list", "items", project=world.project))
    except ForbiddenError:
        ranges = list(config.network.all_ssh_source_ranges)
        return [{"allowed": [{"IPProtocol": "tcp", "ports": ["22"]}], "sourceRanges": ranges, "targetTags": [TAG]}]
    return [rule for rule in found if leaf(rule.get("network", "")) == leaf(network)]


class GuestAttributes:
    """What the workers publish about themselves as guest attributes: SSH host keys, and the names of their VMs.

    https://cloud.google.com/tpu/docs/reference/rest/v2/projects.locations.nodes/getGuestAttributes
    """

    def __init__(self, world: Context, node: Node) -> None:
        self._world, self._node = world, node
        self._names: list[str] = []

    def host_keys(self) -> list[str]:
        """Of each worker, `TYPE KEY` per line, as published now."""
        return [
            "\n".join(f"{item['key']} {item['value']}" for item in items if item.get("namespace") == "hostkeys")
            for items in self._read()
        ]

    def tunnel(self, worker: int, seconds: float) -> IapTunnel:
        """A way to port 22 of a worker through IAP, which knows its VM by the guest attribute `hostname`.

        Raises:
            OSError: as `iap.connect`; also while the worker has not published its name.
        """
        from controller.ssh import iap

        if not self._name(worker):
            self._read()
        if not (name := self._name(worker)):
            raise ConnectionRefusedError("it has not published the name of its VM yet, by which IAP would know it")
        target = iap.IapTarget(self._world.project, self._node.place.zone, name)
        return iap.connect(target, self._world.google.token, seconds, self._world.iap)

    def _name(self, worker: int) -> str:
        return self._names[worker] if worker < len(self._names) else ""

    def _read(self) -> list[list[dict[str, str]]]:
        answer = self._world.google.call(
            "tpu",
            "projects.locations.nodes.getGuestAttributes",
            name=self._node.path(self._world),
            body={"workerIds": [""]},
        )
        found = [w.get("queryValue", {}).get("items", []) for w in answer.get("guestAttributes", [])]
        self._names = [next((i["value"] for i in items if i["key"] == "hostname"), "") for items in found]
        return found

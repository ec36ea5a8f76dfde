"""Find other users of shared resources before a deletion, which is then refused as a whole or done as a whole."""

from collections.abc import Iterator
from typing import Any

from controller.context import Context
from controller.gcp.answers import is_marked, leaf
from controller.gcp.client import PROPAGATION_SECONDS
from controller.gcp.google_errors import ServiceDisabledError
from controller.reconcile import Resource
from controller.resources.accounts import ServiceAccount
from controller.resources.bastion_vm import Bastion
from controller.resources.firewall import Firewall
from controller.resources.pod.node import Node
from controller.resources.pod.planes import project_slices
from controller.resources.vpc import SWITCH_RECORD, Network, PrivateAccess, Router, Subnet

Item = dict[str, Any]


def resources_in_other_regions(context: Context, network: str, known: set[str]) -> list[Resource]:
    """Return resources of earlier plans in the network that this plan does not name: those in other regions.

    `known` holds the ids of the plan's own resources.
    """
    found: list[Resource] = []
    depends_on = (f"{Network.kind}/{network}",)
    for region, item in _regional(context, "subnetworks", network):
        if is_marked(item):
            cidr = item["ipCidrRange"]
            subnet = Subnet(
                name=item["name"], region=region, network=network, block=cidr, cidr=cidr, depends_on=depends_on
            )
            found.append(subnet)
    for region, item in _regional(context, "routers", network):
        if is_marked(item):
            router = Router(name=item["name"], region=region, network=network, subnet="", depends_on=depends_on)
            found.append(router)
    for item in _rules(context, network):
        if not is_marked(item):
            continue
        rule = Firewall(name=item["name"], network=network, allowed=(), source_ranges=(), depends_on=depends_on)
        found.append(rule)
        _, recorded, subnet_name = item["description"].partition(f"{SWITCH_RECORD} ")
        if recorded:
            region = item["name"].removeprefix(f"{network}-allow-internal-")
            found.append(PrivateAccess(name=subnet_name, region=region, rule=rule.name, depends_on=(rule.id,)))
    return [resource for resource in found if resource.id not in known]


def dependents(context: Context, node: Node, doomed: list[Resource]) -> list[str]:
    """Describe the users of resources to be deleted that are not to be deleted themselves."""
    found: list[str] = []
    subnets = {(r.region, r.name) for r in doomed if isinstance(r, Subnet)}
    for network in (r for r in doomed if isinstance(r, Network)):
        found += _in_network(context, network)
    networks = {r.name for r in doomed if isinstance(r, Network)}
    accounts = {r.email(context) for r in doomed if isinstance(r, ServiceAccount)}
    ours = {f"instance {r.name} in {r.zone}" for r in doomed if isinstance(r, Bastion)}
    for title, network, place, account in _machines(context, node):
        if title in ours:
            continue
        if network in networks or place in subnets:
            found.append(f"{title} is in network {network}")
        elif account in accounts:
            found.append(f"{title} runs as {account}")
    return list(dict.fromkeys(found))


def _in_network(context: Context, network: Network) -> Iterator[str]:
    """Describe what is in a network; Slipway's own, which a starting `up` may have just made, is deleted with it."""
    answer = context.google.call("compute", "networks.get", project=context.project, network=network.name)
    for peering in answer.get("peerings", []):
        yield f"network {network.name} is peered with {peering.get('name')}"
    for region, item in _regional(context, "subnetworks", network.name):
        of_google = answer.get("autoCreateSubnetworks", False) and item["name"] == network.name
        if not of_google and not is_marked(item):
            yield f"subnet {item['name']} in {region} is in network {network.name}"
    for region, item in _regional(context, "routers", network.name):
        if not is_marked(item):
            yield f"router {item['name']} in {region} is in network {network.name}"
    for item in _rules(context, network.name):
        if not is_marked(item):
            yield f"firewall rule {item['name']} is in network {network.name}"


def _machines(context: Context, node: Node) -> Iterator[tuple[str, str, tuple[str, str], str]]:
    """Yield every TPU, queued TPU and instance except our pod: title, network, (region, subnet), account."""
    of_pods: set[tuple[str, str]] = set()
    for status in project_slices(context):
        of_pods |= {(status.place.zone, vm) for vm in status.vms}
        if node.may_be(status):
            continue
        place, network = status.place, status.spec.network or "default"
        title = f"TPU {status.name}" if status.uid else f"queued resource {status.name}"
        subnet = (place.region, place.subnetwork or network)
        yield f"{title} in {place.zone}", network, subnet, status.spec.service_account
    for scope, item in aggregated(context, "instances"):
        if (scope, item["name"]) in of_pods:
            continue  # a worker
        account = next((a.get("email", "") for a in item.get("serviceAccounts", [])), "")
        for card in item.get("networkInterfaces", []):
            place = (scope.rpartition("-")[0], leaf(card.get("subnetwork", "")))
            yield f"instance {item['name']} in {scope}", leaf(card.get("network", "")), place, account


def _regional(context: Context, collection: str, network: str) -> Iterator[tuple[str, Item]]:
    for scope, item in aggregated(context, collection):
        if leaf(item.get("network", "")) == network:
            yield scope, item


def aggregated(context: Context, collection: str) -> Iterator[tuple[str, Item]]:
    """Yield every item of a collection with the name of its zone or region; none where Compute Engine is off."""
    for answer in _pages(context, f"{collection}.aggregatedList"):
        for scope, listed in answer.get("items", {}).items():
            for item in listed.get(collection, []):
                yield leaf(scope), item


def _rules(context: Context, network: str) -> Iterator[Item]:
    for answer in _pages(context, "firewalls.list"):
        for item in answer.get("items", []):
            if leaf(item.get("network", "")) == network:
                yield item


def _pages(context: Context, method: str) -> Iterator[dict[str, Any]]:
    """Yield the answers of a list of Compute Engine, none where it is off.

    Where it was just switched on, as by somebody's first `up`, some servers refuse it for minutes.
    """
    parameters: dict[str, Any] = {"project": context.project}
    late = context.clock.deadline(PROPAGATION_SECONDS)
    while True:
        try:
            answer = context.google.call("compute", method, **parameters)
        except ServiceDisabledError:
            if not _is_on(context):
                return
            if late():
                raise
            context.clock.sleep(context.poll_seconds)
            continue
        yield answer
        if not answer.get("nextPageToken"):
            return
        parameters["pageToken"] = answer["nextPageToken"]


def _is_on(context: Context) -> bool:
    name = f"projects/{context.project}/services/compute.googleapis.com"
    return context.google.call("serviceusage", "services.get", name=name).get("state") == "ENABLED"

"""Networks, subnetworks, routers, firewall rules, disks and instances: validation, and references between them."""

import ipaddress
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from controller.localcloud.apis.catalog import Catalog, load_catalog
from controller.localcloud.http.call import DEFAULT_ACCOUNT, PROJECT
from controller.localcloud.http.discovery import load_discovery
from controller.localcloud.http.errors import ApiError, not_found
from controller.localcloud.store import Document, Store

COMPUTE_KIND = "compute"  # kind in the store; names are paths such as `projects/P/global/networks/N`
_DISK_TYPES = ("hyperdisk-balanced", "hyperdisk-ml", "pd-balanced", "pd-extreme", "pd-ssd", "pd-standard")


def prepare_disk(zone: str, body: Mapping[str, Any]) -> Document:
    """Return the disk to store; raise ApiError 400 for an invalid size or type."""
    kind = str(body.get("type") or f"zones/{zone}/diskTypes/pd-standard")
    name = kind.rpartition("/")[2]
    if name not in _DISK_TYPES or ("zones/" in kind and f"zones/{zone}/diskTypes/" not in kind):
        raise invalid_field("type", kind, "The URL is malformed.")
    size = str(body.get("sizeGb", "500"))
    least = 4 if name.startswith("hyperdisk") else 10
    if not least <= int(size) <= 65536:
        raise ApiError(400, f"Disk size: '{size} GB' is not between {least} GB and 65536 GB.")
    return {**body, "sizeGb": size, "type": f"projects/{PROJECT}/zones/{zone}/diskTypes/{name}", "status": "READY"}


def check_attached(store: Store, zone: str, disks: Sequence[Mapping[str, Any]], generation: str, vms: int) -> None:
    """Raise ApiError 400 or 404 unless a node with this many VMs may attach these data disks.

    https://cloud.google.com/tpu/docs/attach-durable-block-storage
    """
    refused = "Cloud TPU received a bad request."
    for attached in disks:
        link = str(attached.get("sourceDisk", ""))
        path = link[link.find("projects/") :]
        if not re.fullmatch(rf"projects/[^/]+/zones/{zone}/disks/[^/]+", path):
            raise ApiError(400, f"{refused} Disk '{link}' is not one of zone {zone}.")
        disk = store.get(COMPUTE_KIND, path)
        if disk is None:
            raise not_found(path)
        kind = disk["type"].rpartition("/")[2]
        if kind.startswith("hyperdisk") != (generation in load_catalog().hyperdisk):
            raise ApiError(400, f"{refused} Disk type {kind} cannot be attached to {generation}")
        writes = attached.get("mode", "READ_WRITE") != "READ_ONLY"
        if writes and vms > 1:
            words = "A disk can be attached to a TPU slice of several VMs in READ_ONLY mode only"
            raise ApiError(400, f"{refused} {words}")
        if writes and users_of_disk(store, path):
            raise ApiError(400, f"{refused} Disk {path} is in use by another node.")


def users_of_disk(store: Store, path: str) -> list[str]:
    def uses(disks: Iterable[Mapping[str, Any]], key: str) -> bool:
        return any(str(disk.get(key, "")).endswith(path) for disk in disks)

    nodes = [name for name, node in store.items("node") if uses(node.get("dataDisks", ()), "sourceDisk")]
    return nodes + [name for name, item in store.items(COMPUTE_KIND) if uses(item.get("disks", ()), "source")]


def check_sources(store: Store, disks: Sequence[Mapping[str, Any]]) -> None:
    """Raise ApiError 404 or 400 unless the existing disks of an instance exist, and nobody else writes to them."""
    for disk in disks:
        link = str(disk.get("source", ""))
        path = link[link.find("projects/") :]
        if not link:
            continue
        if store.get(COMPUTE_KIND, path) is None:
            raise not_found(path)
        users = users_of_disk(store, path)
        if users and disk.get("mode", "READ_WRITE") != "READ_ONLY":
            message = f"The disk resource '{path}' is already being used by '{users[0]}'"
            raise ApiError(400, message, reason="RESOURCE_IN_USE_BY_ANOTHER_RESOURCE")


FirewallRule = Mapping[str, Any]

LAPTOP_RANGE = "127.0.0.1/32"
IAP_RANGE = "35.235.240.0/20"  # source range of the Identity-Aware Proxy
_TCP = ("tcp", "6", "all")
ANY_PORT = (1024, 65535)  # jax.distributed and gloo pick their own ports


def allows_tcp(rules: Iterable[FirewallRule], *, source: str, ports: tuple[int, int], tags: Iterable[str]) -> bool:
    """Return whether TCP from the network `source` (CIDR) reaches all `ports` (first, last) of a VM with these tags.

    The rule with the lowest priority number decides; among equals a deny rule wins; without a rule, traffic is denied.
    """
    tags = frozenset(tags)
    matching = [
        (rule.get("priority", 1000), "denied" not in rule)
        for rule in rules
        if not rule.get("disabled", False)
        and rule.get("direction", "INGRESS") == "INGRESS"
        and (not rule.get("targetTags") or not tags.isdisjoint(rule["targetTags"]))
        and _matches_source(rule, source, tags)
        and _allows_ports(rule, ports)
    ]
    return min(matching)[1] if matching else False


def _matches_source(rule: FirewallRule, source: str, tags: frozenset[str]) -> bool:
    wanted = ipaddress.IPv4Network(source)
    ranges = [ipaddress.IPv4Network(text, strict=False) for text in rule.get("sourceRanges", ()) if ":" not in text]
    if any(map(wanted.overlaps if "denied" in rule else wanted.subnet_of, ranges)):
        return True
    # Peers of one node carry the same tags; the laptop carries none.
    return source != LAPTOP_RANGE and not tags.isdisjoint(rule.get("sourceTags", ()))


def _allows_ports(rule: FirewallRule, ports: tuple[int, int]) -> bool:
    first, last = ports
    denies = "denied" in rule
    entries = [one for one in rule.get("denied" if denies else "allowed", ()) if one["IPProtocol"].lower() in _TCP]
    texts = [text.partition("-") for entry in entries for text in entry.get("ports") or ["0-65535"]]
    named = [(int(low), int(high or low)) for low, _, high in texts]
    # A denial of any requested port applies; an allow rule must cover all of them.
    return any((start <= last and first <= end) if denies else (start <= first and last <= end) for start, end in named)


def subnetwork_path(region: str, name: str) -> str:
    return f"projects/{PROJECT}/regions/{region}/subnetworks/{name}"


def invalid_field(field: str, value: Any, why: str) -> ApiError:
    """Return error 400 in the wording of Compute."""
    return ApiError(400, f"Invalid value for field 'resource.{field}': '{value}'. {why}")


def check_named(body: Mapping[str, Any]) -> str:
    """Return the name of a resource; raise ApiError 400 without one. Its pattern is in the discovery document."""
    if body.get("name") is None:
        raise invalid_field("name", None, "Must be a match of regex '(?:[a-z](?:[-a-z0-9]{0,61}[a-z0-9])?)'")
    return body["name"]


class Networks:
    """Rules of the network resources; `Compute` serves them over HTTP, nodes refer to them."""

    def __init__(self, store: Store, catalog: Catalog) -> None:
        self._store, self._catalog = store, catalog

    def resolve(self, reference: str, pattern: str) -> str:
        """Return the store name that `reference` (full link, partial path or, for tpu, bare name) points to.

        `pattern` is its path with {} for the name, e.g. `regions/us-east1/subnetworks/{}`. Raises ApiError 404.
        """
        name = reference.rpartition("/")[2]
        path = f"projects/{PROJECT}/{pattern.format(name)}"
        start = reference.find("projects/")
        said = reference[start:] if start >= 0 else f"projects/{PROJECT}/{reference}"
        if ("/" in reference and said != path) or self._store.get(COMPUTE_KIND, path) is None:
            raise not_found(said if "/" in reference else path)
        return path

    def resources_of(self, network: str, plural: str) -> list[tuple[str, Document]]:
        """Return the subnetworks, routers or firewalls of a network, with their paths."""
        items = self._store.items(COMPUTE_KIND)
        return [(path, item) for path, item in items if f"/{plural}/" in path and item.get("network") == network]

    def dependents(self, path: str) -> list[str]:
        """Return the paths of resources that prevent the deletion of a network, subnetwork or disk."""
        automatic = self._existing(path).get("autoCreateSubnetworks", False)
        items = self._store.items(COMPUTE_KIND)
        parts = [other for other, item in items if item.get("network") == path]
        configs = [(name, card) for name, item in items for card in item.get("networkInterfaces", ())]
        configs += [(name, node["networkConfig"]) for name, node in self._store.items("node")]
        configs += [(name, used) for name, used in self._store.items("inUse") if time.time() < used["until"]]
        users = [name for name, config in configs if path in (config["network"], config["subnetwork"])]
        parts = [other for other in parts if not (automatic and "/subnetworks/" in other)]
        return [*parts, *users, *users_of_disk(self._store, path)]

    def keep_in_use(self, name: str, config: Mapping[str, Any], until: float) -> None:
        """Let the network of a deleted TPU node be in use a while longer, as Google does."""
        self._store.put("inUse", name, {key: config[key] for key in ("network", "subnetwork")} | {"until": until})

    def prepare_resource(self, plural: str, place: str, body: Mapping[str, Any], path: str) -> Document:
        """Return the document to store for a new or changed resource; raise ApiError if it is invalid.

        `place` is its region or zone, if any; `path` is its name in the store.
        """
        resource = dict(body)
        if plural == "addresses":
            return resource | {"status": "RESERVED", "addressType": resource.get("addressType", "EXTERNAL")}
        if plural == "disks":
            return prepare_disk(place, resource)
        if plural == "instances":
            return self._prepare_instance(place, resource)
        if plural == "networks":
            resource.setdefault("autoCreateSubnetworks", True)
            resource.setdefault("routingConfig", {"routingMode": "REGIONAL"})
            mtu = int(resource.setdefault("mtu", 1460))
            if not 1300 <= mtu <= 8896:
                raise invalid_field("mtu", mtu, "Must be between 1300 and 8896")
            return resource
        if not resource.get("network"):
            raise invalid_field("network", "", "A network must be specified")
        resource["network"] = self.resolve(resource["network"], "global/networks/{}")
        if plural == "subnetworks":
            self._check_subnetwork(place, resource)
        elif plural == "routers":
            for nat in resource.get("nats", ()):
                check_nat(nat)
            self._check_one_nat_for_all(place, resource, path)
        else:
            check_rule(resource)
        return resource

    def automatic_subnetworks(self, network: str) -> list[tuple[str, Document]]:
        """Return the subnetworks of an auto mode network: a /20 of 10.128.0.0/9 per region, named like the network."""
        name = network.rpartition("/")[2]
        ranges = ipaddress.ip_network("10.128.0.0/9").subnets(new_prefix=20)
        return [
            (subnetwork_path(region, name), {"name": name, "network": network, "ipCidrRange": str(block)})
            for region, block in zip(self._catalog.regions, ranges, strict=False)
        ]

    def attach(self, region: str, network: str | None, subnetwork: str | None) -> tuple[str, str]:
        """Return the full names of the network and subnetwork for a machine in `region`.

        Raises ApiError 404 if one does not exist, 400 for a missing subnetwork or one of another network.
        """
        chosen = self.resolve(subnetwork, f"regions/{region}/subnetworks/{{}}") if subnetwork else ""
        if chosen and not network:  # the subnetwork determines the network
            network = self._existing(chosen)["network"]
        found = self.resolve(network or "default", "global/networks/{}")
        mine = [path for path, _ in self.resources_of(found, "subnetworks") if f"/regions/{region}/" in path]
        if not chosen and self._existing(found).get("autoCreateSubnetworks") and mine:
            chosen = mine[0]
        if not chosen:
            raise ApiError(400, "A subnetwork must be specified if the network is in custom subnet mode.")
        if chosen not in mine:
            raise ApiError(400, f"The subnetwork '{chosen}' is not one of network '{found}'.")
        return found, chosen

    def _existing(self, path: str) -> Document:
        return self._store.get(COMPUTE_KIND, path) or {}

    def _prepare_instance(self, zone: str, instance: Document) -> Document:
        """Return the instance to store, attached to its networks."""
        cards = []
        for number, card in enumerate(instance.get("networkInterfaces") or [{}]):
            network, subnetwork = self.attach(zone.rpartition("-")[0], card.get("network"), card.get("subnetwork"))
            block = ipaddress.ip_network(self._existing(subnetwork)["ipCidrRange"])
            usable = block.num_addresses - 4
            address = card.get("networkIP") or str(block[2 + self._store.next_number("address") % usable])
            place = {"network": network, "subnetwork": subnetwork, "networkIP": address}
            cards.append({**card, **place, "name": f"nic{number}"})
        accounts = [
            {**account, "email": DEFAULT_ACCOUNT} if account.get("email") == "default" else account
            for account in instance.get("serviceAccounts", ())
        ]
        return {**instance, "status": "RUNNING", "networkInterfaces": cards, "serviceAccounts": accounts}

    def _check_one_nat_for_all(self, region: str, router: Document, mine: str) -> None:
        """Reject a second NAT beside one for all subnetworks of a region (https://cloud.google.com/nat/docs/overview)."""
        nats = list(router.get("nats", ()))
        for path, other in self.resources_of(router["network"], "routers"):
            if nats and path != mine and f"/regions/{region}/" in path:
                nats += other.get("nats", ())
        if len(nats) > 1 and any(nat["sourceSubnetworkIpRangesToNat"][:3] == "ALL" for nat in nats):
            message = "Invalid value for field 'resource.nats': a NAT that serves all subnetworks of the network exists"
            raise ApiError(400, f"{message} in region '{region}'; there can be no other beside it.")

    def _check_subnetwork(self, region: str, subnetwork: Document) -> None:
        cidr = subnetwork.get("ipCidrRange", "")
        try:
            block = ipaddress.ip_network(cidr)
        except ValueError as error:
            raise invalid_field("ipCidrRange", cidr, f"Must be a CIDR address range: {error}") from error
        mine = subnetwork_path(region, subnetwork["name"])
        for path, other in self.resources_of(subnetwork["network"], "subnetworks"):
            if path != mine and block.overlaps(ipaddress.ip_network(other["ipCidrRange"])):
                rival = f"'{other['name']}' in region '{path.split('/')[3]}'"
                raise ApiError(400, f"Invalid IPCidrRange: {cidr} conflicts with existing subnetwork {rival}.")


def check_nat(nat: Mapping[str, Any]) -> None:
    """Raise ApiError 400 unless a router's NAT specifies its address allocation and its source ranges."""
    check_named(nat)
    for field in ("natIpAllocateOption", "sourceSubnetworkIpRangesToNat"):
        if nat.get(field) is None:
            known = load_discovery().schemas["compute.v1"]["RouterNat"]["properties"][field]["enum"]
            raise invalid_field(f"nats[].{field}", None, f"Must be one of {', '.join(known)}")


def check_rule(rule: Document) -> None:
    """Raise ApiError 400 unless a firewall rule is complete; fill in Google's defaults."""
    rule.setdefault("direction", "INGRESS")
    rule["priority"] = int(rule.get("priority", 1000))
    rule.setdefault("disabled", False)
    if bool(rule.get("allowed")) == bool(rule.get("denied")):
        raise ApiError(400, "Firewall rule must specify exactly one of 'allowed' and 'denied'.")
    for entry in rule.get("allowed") or rule.get("denied") or ():
        if "IPProtocol" not in entry:
            raise invalid_field("allowed[].IPProtocol", "", "A protocol must be specified")
        for ports in entry.get("ports", ()):
            if not re.fullmatch(r"\d+(-\d+)?", ports):
                raise invalid_field("allowed[].ports", ports, "Must be a port or a range of ports")
    if rule["direction"] == "INGRESS" and not (rule.get("sourceRanges") or rule.get("sourceTags")):
        rule["sourceRanges"] = ["0.0.0.0/0"]
    for cidr in rule.get("sourceRanges", ()):
        try:
            ipaddress.ip_network(cidr, strict=False)
        except ValueError as error:
            raise invalid_field("sourceRanges", cidr, "Must be a CIDR address range") from error

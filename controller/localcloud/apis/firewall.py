"""Pure functions that evaluate firewall rules (https://cloud.google.com/firewall/docs/firewalls)."""

import ipaddress
from collections.abc import Iterable, Mapping
from typing import Any

FirewallRule = Mapping[str, Any]

LAPTOP_RANGE = "127.0.0.1/32"
IAP_RANGE = "35.235.240.0/20"  # source range of the Identity-Aware Proxy
ANY_PORT = (1024, 65535)  # jax.distributed and gloo pick their own ports


def allows_tcp(rules: Iterable[FirewallRule], *, source: str, ports: tuple[int, int], tags: Iterable[str]) -> bool:
    """Return whether TCP from the network `source` (CIDR) reaches all `ports` (first, last) of a VM with these tags.

    The rule with the lowest priority number decides; among equals a deny rule wins; without a rule, traffic is denied.
    """
    tags = frozenset(tags)
    matching = [
        (rule.get("priority", 1000), "denied" not in rule)
        for rule in rules
        if _targets(rule, tags) and _matches_source(rule, source, tags) and _allows_ports(rule, ports)
    ]
    return min(matching)[1] if matching else False


def _targets(rule: FirewallRule, tags: frozenset[str]) -> bool:
    enabled = not rule.get("disabled", False) and rule.get("direction", "INGRESS") == "INGRESS"
    targets = rule.get("targetTags")
    return enabled and (not targets or not tags.isdisjoint(targets))


def _matches_source(rule: FirewallRule, source: str, tags: frozenset[str]) -> bool:
    wanted = ipaddress.ip_network(source)
    for text in rule.get("sourceRanges", ()):
        allowed = ipaddress.ip_network(text, strict=False)
        if isinstance(allowed, ipaddress.IPv4Network) and isinstance(wanted, ipaddress.IPv4Network):
            if wanted.subnet_of(allowed):
                return True
            if "denied" in rule and wanted.overlaps(allowed):
                return True
    # Peers of one node carry the same tags; the laptop carries none.
    return source != LAPTOP_RANGE and not tags.isdisjoint(rule.get("sourceTags", ()))


def _allows_ports(rule: FirewallRule, ports: tuple[int, int]) -> bool:
    first, last = ports
    denies = "denied" in rule
    for entry in rule.get("denied" if denies else "allowed", ()):
        if entry["IPProtocol"].lower() not in ("tcp", "6", "all"):
            continue
        if not entry.get("ports"):
            return True
        for text in entry["ports"]:
            low, _, high = text.partition("-")
            start, end = int(low), int(high or low)
            # A denial of any requested port applies; an allow rule must cover all of them.
            if (start <= last and first <= end) if denies else (start <= first and last <= end):
                return True
    return False

"""Pure functions that decide what firewall rules admit, given the response of `firewalls.list`."""

import ipaddress
from collections.abc import Iterable
from typing import Any

ANY_ADDRESS = "0.0.0.0/0"
Item = dict[str, Any]


def admits(rule: Item, allowed: Iterable[str], sources: Iterable[str], tags: Iterable[str]) -> bool:
    """Return whether one rule admits all of `allowed` from every source to VMs with these tags.

    `allowed` entries read `tcp:22`, `tcp` or `icmp`. Deny rules of higher priority are ignored: they are deliberate.
    """
    targets = set(rule.get("targetTags", ()))
    if rule.get("disabled") or rule.get("direction", "INGRESS") != "INGRESS" or rule.get("targetServiceAccounts"):
        return False
    return (
        (not targets or not targets.isdisjoint(tags))
        and all(any(_protocol_matches(entry, wanted) for entry in rule.get("allowed", ())) for wanted in allowed)
        and all(any(_range_contains(source, block) for block in rule.get("sourceRanges", ())) for source in sources)
    )


def _protocol_matches(entry: Item, wanted: str) -> bool:
    protocol, _, port = wanted.partition(":")
    if entry["IPProtocol"] not in (protocol, "all"):
        return False
    if not entry.get("ports"):
        return True
    ranges = (text.partition("-") for text in entry["ports"])
    first, last = (int(port), int(port)) if port else (1, 65535)
    return any(int(low) <= first and last <= int(high or low) for low, _, high in ranges)


def _range_contains(source: str, block: str) -> bool:
    inner, outer = ipaddress.ip_network(source, strict=False), ipaddress.ip_network(block, strict=False)
    if isinstance(inner, ipaddress.IPv4Network) and isinstance(outer, ipaddress.IPv4Network):
        return inner.subnet_of(outer)
    both = isinstance(inner, ipaddress.IPv6Network) and isinstance(outer, ipaddress.IPv6Network)
    return both and ipaddress.IPv6Network(inner).subnet_of(ipaddress.IPv6Network(outer))

"""Firewall rules: SSH to the workers, and everything between them.

A new VPC admits no traffic at all, and `jax.distributed` needs the workers to reach each other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from controller.resources.compute import MARK, ComputeResource, leaf

if TYPE_CHECKING:
    from controller.world import World


@dataclass(frozen=True, kw_only=True)
class Firewall(ComputeResource):
    """An ingress rule: https://cloud.google.com/compute/docs/reference/rest/v1/firewalls

    `allowed` entries read `tcp:22`, `tcp` (all ports) or `icmp`.
    """

    kind: ClassVar[str] = "firewall"
    collection: ClassVar[str] = "firewalls"
    argument: ClassVar[str] = "firewall"
    fixed: ClassVar[frozenset[str]] = frozenset({"network"})
    network: str
    allowed: tuple[str, ...]
    source_ranges: tuple[str, ...]
    target_tags: tuple[str, ...]
    disabled: bool = False

    def body(self, world: World) -> dict[str, Any]:
        return {
            "network": f"projects/{world.project}/global/networks/{self.network}",
            "direction": "INGRESS",
            "allowed": [_entry(rule) for rule in self.allowed],
            "sourceRanges": list(self.source_ranges),
            "targetTags": list(self.target_tags),
            "disabled": self.disabled,
        }

    def read(self, answer: dict[str, Any]) -> Self:
        return replace(
            self,
            marked=answer.get("description") == MARK,
            network=leaf(answer["network"]),
            allowed=tuple(sorted(_text(entry) for entry in answer.get("allowed", []))),
            source_ranges=tuple(sorted(answer.get("sourceRanges", []))),
            target_tags=tuple(sorted(answer.get("targetTags", []))),
            disabled=answer.get("disabled", False),
        )


def _entry(rule: str) -> dict[str, Any]:
    protocol, _, port = rule.partition(":")
    return {"IPProtocol": protocol, "ports": [port]} if port else {"IPProtocol": protocol}


def _text(entry: dict[str, Any]) -> str:
    ports = entry.get("ports")
    return f"{entry['IPProtocol']}:{','.join(ports)}" if ports else entry["IPProtocol"]

"""Firewall rules for SSH to the workers and for all traffic between them.

A new VPC admits no traffic at all, and `jax.distributed` needs the workers to reach each other.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from controller.context import Context
from controller.core.errors import ConfigError
from controller.core.finding import Finding, Rule
from controller.gcp.client import GoogleError, NotFoundError
from controller.gcp.firewall_rules import ANY_ADDRESS, admits
from controller.gcp.names import is_marked, leaf
from controller.reconcile.resource import Absent, ObservedResources
from controller.resources.network.base import ComputeResource

OPEN_SSH = Rule(
    "open_ssh", ("warning",), ("network.ssh_source_ranges",),
    "A firewall rule that Slipway did not create allows SSH from the whole internet.",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Firewall(ComputeResource):
    """An ingress rule (https://cloud.google.com/compute/docs/reference/rest/v1/firewalls).

    `allowed` entries read `tcp:22`, `tcp` (all ports) or `icmp`. An existing rule that admits as much, such as
    Google's own `default-allow-ssh`, is used as it is.
    """

    kind: ClassVar[str] = "firewall"
    collection: ClassVar[str] = "firewalls"
    argument: ClassVar[str] = "firewall"
    fixed: ClassVar[frozenset[str]] = frozenset({"network"})
    network: str
    allowed: tuple[str, ...]
    source_ranges: tuple[str, ...] | None  # None: InternalRule looks it up
    target_tags: tuple[str, ...]
    disabled: bool = False
    stand_in: str = field(default="", compare=False)
    """When observed: the existing rule that is used instead, which Slipway did not make."""
    open_to_world: bool = field(default=False, compare=False)

    def observe(self, world: Context, have: ObservedResources) -> Absent | Self:
        seen = super().observe(world, have)
        if not isinstance(seen, Absent) and seen.ours:
            return seen
        if (other := self._find_equivalent(world)) is None:
            return seen
        open_to_world = ANY_ADDRESS in other.get("sourceRanges", ())
        return replace(self, marked=False, stand_in=other["name"], open_to_world=open_to_world)

    def findings(self, seen: Any) -> Iterator[Finding]:
        if isinstance(seen, Firewall) and seen.open_to_world:
            words = (
                f"firewall rule {seen.stand_in} of network {seen.network}, not created by Slipway, allows SSH from the "
                f"whole internet; to restrict it: gcloud compute firewall-rules update {seen.stand_in} "
                f"--source-ranges={','.join(self.source_ranges or ())}"
            )
            yield OPEN_SSH.finding(words)

    def _find_equivalent(self, world: Context) -> dict[str, Any] | None:
        """Return a rule made by someone else that admits everything this one would."""
        if not self.source_ranges:
            return None
        for rule in world.google.pages("compute", "firewalls.list", "items", project=world.project):
            if leaf(rule.get("network", "")) != self.network or is_marked(rule):
                continue
            if admits(rule, self.allowed, self.source_ranges, self.target_tags):
                return rule
        return None

    def source_ranges_for(self, world: Context) -> tuple[str, ...]:
        """Return the ranges to admit; some rules must look them up."""
        return self.source_ranges or ()

    def body(self, world: Context) -> dict[str, Any]:
        return {
            "network": f"projects/{world.project}/global/networks/{self.network}",
            "direction": "INGRESS",
            "allowed": [_entry(rule) for rule in self.allowed],
            "sourceRanges": list(self.source_ranges_for(world)),
            "targetTags": list(self.target_tags),
            "disabled": self.disabled,
        }

    def command(self, world: Context) -> str:
        tags = f" --target-tags={','.join(self.target_tags)}" if self.target_tags else ""
        what = f"--allow={','.join(self.allowed)} --source-ranges={','.join(self.source_ranges_for(world))}{tags}"
        where = f"--network={self.network} --project={world.project}"
        return f"gcloud compute firewall-rules create {self.name} {what} {where}"

    def read(self, answer: dict[str, Any]) -> Self:
        return replace(
            self,
            marked=is_marked(answer),
            network=leaf(answer["network"]),
            allowed=tuple(sorted(_text(entry) for entry in answer.get("allowed", []))),
            source_ranges=tuple(sorted(answer.get("sourceRanges", []))),
            target_tags=tuple(sorted(answer.get("targetTags", []))),
            disabled=answer.get("disabled", False),
        )


@dataclass(frozen=True, kw_only=True)
class InternalRule(Firewall):
    """All traffic between the workers of one subnet. Its range is looked up, since an existing subnet has its own."""

    subnet: str = field(compare=False)
    subnet_region: str = field(compare=False)
    covers_subnet: bool = True

    def source_ranges_for(self, world: Context) -> tuple[str, ...]:
        where = {"project": world.project, "region": self.subnet_region, "subnetwork": self.subnet}
        return (world.google.call("compute", "subnetworks.get", **where)["ipCidrRange"],)

    def observe(self, world: Context, have: ObservedResources) -> Absent | Self:
        seen = super().observe(world, have)
        if isinstance(seen, Absent):
            return self if self.id in world.permission_denied else seen
        try:
            covered = set(self.source_ranges_for(world)) <= set(seen.source_ranges or ())
        except NotFoundError:
            covered = False
        return replace(seen, covers_subnet=covered)

    def refused(self, world: Context, error: GoogleError) -> None:
        """Accept an equivalent rule of someone else, but only when we may not create our own."""
        if replace(self, source_ranges=self.source_ranges_for(world))._find_equivalent(world) is None:
            super().refused(world, error)
        world.permission_denied.add(self.id)


@dataclass(frozen=True, kw_only=True)
class LaptopRule(Firewall):
    """SSH from this machine's address. Addresses of other machines stay in the rule: people share a project."""

    covers_laptop: bool = True

    def source_ranges_for(self, world: Context) -> tuple[str, ...]:
        seen = super().observe(world, {})
        before = () if isinstance(seen, Absent) else seen.source_ranges or ()
        return tuple(sorted({*before, _own_range(world)}))

    def observe(self, world: Context, have: ObservedResources) -> Absent | Self:
        seen = super().observe(world, have)
        if isinstance(seen, Absent):
            return seen
        return replace(seen, covers_laptop=f"{world.find_public_ip()}/32" in (seen.source_ranges or ()))


def _own_range(world: Context) -> str:
    address = world.find_public_ip()
    if address is None:
        words = "cannot determine the address of this machine; set it, or set null to use IAP only"
        raise ConfigError(f"network.laptop: {words}")
    return f"{address}/32"


def _entry(rule: str) -> dict[str, Any]:
    protocol, _, port = rule.partition(":")
    return {"IPProtocol": protocol, "ports": [port]} if port else {"IPProtocol": protocol}


def _text(entry: dict[str, Any]) -> str:
    ports = entry.get("ports")
    return f"{entry['IPProtocol']}:{','.join(ports)}" if ports else entry["IPProtocol"]

"""Firewall rules for SSH to the workers and for all traffic between them.

A new VPC admits no traffic at all, and `jax.distributed` needs the workers to reach each other.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from controller.context import Context
from controller.core.errors import ConfigError
from controller.core.finding import Finding, Rule
from controller.gcp.answers import ANY_ADDRESS, admits, is_marked, leaf
from controller.gcp.google_errors import GoogleError, NotFoundError
from controller.reconcile import Absent, ObservedResources
from controller.resources.vpc import ComputeResource

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
    immutable: ClassVar[frozenset[str]] = frozenset({"network"})
    network: str
    allowed: tuple[str, ...]
    source_ranges: tuple[str, ...] | None = None  # None: InternalRule and LaptopRule look it up
    target_tags: tuple[str, ...] = ()
    disabled: bool = False
    stand_in: str = field(default="", compare=False)
    """When observed: the existing rule that is used instead, which Slipway did not make."""
    open_to_world: bool = field(default=False, compare=False)

    def observe(self, context: Context, observed: ObservedResources) -> Absent | Self:
        current = super().observe(context, observed)
        if not isinstance(current, Absent) and current.is_managed:
            return current
        if (other := self._find_equivalent(context)) is None:
            return current
        open_to_world = ANY_ADDRESS in other.get("sourceRanges", ())
        return replace(self, marked=False, stand_in=other["name"], open_to_world=open_to_world)

    def findings(self, current: Any) -> Iterator[Finding]:
        if isinstance(current, Firewall) and current.open_to_world:
            message = (
                f"firewall rule {current.stand_in} of network {current.network}, not created by Slipway, allows SSH "
                f"from the whole internet; to restrict it: gcloud compute firewall-rules update {current.stand_in} "
                f"--source-ranges={','.join(self.source_ranges or ())}"
            )
            yield OPEN_SSH.finding(message)

    def _find_equivalent(self, context: Context) -> dict[str, Any] | None:
        """Return a rule made by someone else that admits everything this one would."""
        if not self.source_ranges:
            return None
        for rule in context.google.list_all("compute", "firewalls.list", "items", project=context.project):
            if leaf(rule.get("network", "")) != self.network or is_marked(rule):
                continue
            if admits(rule, self.allowed, self.source_ranges, self.target_tags):
                return rule
        return None

    def source_ranges_for(self, context: Context) -> tuple[str, ...]:
        """Return the ranges to admit; some rules must look them up."""
        return self.source_ranges or ()

    def body(self, context: Context) -> dict[str, Any]:
        return {
            "network": f"projects/{context.project}/global/networks/{self.network}",
            "direction": "INGRESS",
            "allowed": [_entry(rule) for rule in self.allowed],
            "sourceRanges": list(self.source_ranges_for(context)),
            "targetTags": list(self.target_tags),
            "disabled": self.disabled,
        }

    def command(self, context: Context) -> str:
        tags = f" --target-tags={','.join(self.target_tags)}" if self.target_tags else ""
        what = f"--allow={','.join(self.allowed)} --source-ranges={','.join(self.source_ranges_for(context))}{tags}"
        where = f"--network={self.network} --project={context.project}"
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

    def source_ranges_for(self, context: Context) -> tuple[str, ...]:
        where = {"project": context.project, "region": self.subnet_region, "subnetwork": self.subnet}
        return (context.google.call("compute", "subnetworks.get", **where)["ipCidrRange"],)

    def observe(self, context: Context, observed: ObservedResources) -> Absent | Self:
        current = super().observe(context, observed)
        if isinstance(current, Absent):
            return self if self.id in context.permission_denied else current
        try:
            covered = set(self.source_ranges_for(context)) <= set(current.source_ranges or ())
        except NotFoundError:
            covered = False
        return replace(current, covers_subnet=covered)

    def raise_not_permitted(self, context: Context, error: GoogleError) -> None:
        """Accept an equivalent rule of someone else, but only when we may not create our own."""
        if replace(self, source_ranges=self.source_ranges_for(context))._find_equivalent(context) is None:
            super().raise_not_permitted(context, error)
        context.permission_denied.add(self.id)


@dataclass(frozen=True, kw_only=True)
class LaptopRule(Firewall):
    """SSH from this machine's address. Addresses of other machines stay in the rule: people share a project."""

    covers_laptop: bool = True

    def source_ranges_for(self, context: Context) -> tuple[str, ...]:
        current = super().observe(context, {})
        before = () if isinstance(current, Absent) else current.source_ranges or ()
        if (address := context.find_public_ip()) is None:
            message = "cannot determine the address of this machine; set it, or set null to use IAP only"
            raise ConfigError(f"network.laptop: {message}")
        return tuple(sorted({*before, f"{address}/32"}))

    def observe(self, context: Context, observed: ObservedResources) -> Absent | Self:
        current = super().observe(context, observed)
        if isinstance(current, Absent):
            return current
        return replace(current, covers_laptop=f"{context.find_public_ip()}/32" in (current.source_ranges or ()))


def _entry(rule: str) -> dict[str, Any]:
    protocol, _, port = rule.partition(":")
    return {"IPProtocol": protocol, "ports": [port]} if port else {"IPProtocol": protocol}


def _text(entry: dict[str, Any]) -> str:
    ports = entry.get("ports")
    return f"{entry['IPProtocol']}:{','.join(ports)}" if ports else entry["IPProtocol"]

"""Google's refusals to create a pod, told by code and message, with a hint for each kind.

The patterns match real error messages; the TPU API's error codes do not tell a stock-out from a missing quota. Other
messages about pods of any plane stand below the table.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from conf.schema.config import Config
from controller.context import Context
from controller.core.finding import Issue
from controller.core.text import plural
from controller.gcp.google_errors import POLICY, RATE_LIMITS, ForbiddenError
from controller.reconcile import Diff
from controller.resources.pod.provisioner import Place, SliceSpec, SliceStatus

RefusalKind = Literal[
    "stock_out",  # no capacity now: ask elsewhere, or later
    "internal",  # an error at Google: ask elsewhere, or later, but not for hours
    "propagating",  # a new account or role is not visible everywhere yet: ask again here
    "quota",  # the project has no quota for this tier or zone: ask elsewhere, never here again
    "compute_quota",  # the region has too few addresses or VMs left: the same
    "policy",  # of the organization, on this location or on the whole project: the same
    "permission",  # of this type, zone and tier, or of the whole project: the same
    "type",  # the zone does not have it: the same
    "reservation",  # the same
    "runtime",
    "network",  # it is not there: it was when the plan was carried out, so somebody has deleted it since
    "name_taken",
    "bad_request",
    "unknown",
]
RULES_OUT_PLACE: frozenset[RefusalKind] = frozenset(
    {"quota", "compute_quota", "policy", "permission", "type", "reservation"}
)
"""Refusals that hold for one zone and tier only."""

_TABLE: tuple[tuple[RefusalKind, str, str], ...] = (
    # kind, pattern of codes (empty: any), pattern of messages; the first row that matches decides
    ("policy", "", POLICY.pattern),
    ("stock_out", "|".join(RATE_LIMITS), ""),  # a limit on requests, not on chips: it passes
    ("stock_out", "", r"per minute|rate ?limit|too frequent operations"),
    ("stock_out", "ZONE_RESOURCE_POOL_EXHAUSTED(_WITH_DETAILS)?|STOCKOUT", ""),
    ("compute_quota", "", r"IN_USE_ADDRESSES|(INSTANCES|CPUS(_ALL_REGIONS)?|_TOTAL_GB)\b.* (limit|exceeded)"),
    ("quota", "", r"quota limit .* exceeded|quota '[^']*' (has been )?(exceeded|exhausted)|quota exceeded"),
    ("stock_out", "", r"no more capacity|insufficient (reserved )?capacity|out of capacity|stock-?out"),
    ("stock_out", "", r"does not have enough resources|resource_pool_exhausted|currently unavailable in the"),
    ("stock_out", "", r"while in state PREEMPTED|was preempted|has expired|expired"),
    ("quota", "QUOTA_EXCEEDED|quotaExceeded", ""),
    ("propagating", "", r"service account \S+ (does not exist|was not found|not found)|TPU Service Agent"),
    ("propagating", "", r"of type 'serviceAccount' was not found"),
    ("name_taken", "ALREADY_EXISTS|alreadyExists|CONFLICT|409", r""),
    ("type", "", r"not allowed to use the machine type|machine type .* (does not exist|in zone)"),
    ("permission", "PERMISSION_DENIED|FORBIDDEN|UNAUTHENTICATED|403|401", r""),
    ("runtime", "", r"runtime ?version|/images/\S+ was not found|unsupported version|version .* (is )?not supported"),
    ("type", "", r"accelerator ?type|could not be found in the zonal|requested zone is not supported"),
    ("reservation", "", r"reservation"),
    ("network", "", r"/(sub)?networks/\S+ was not found"),
    ("stock_out", "RESOURCE_EXHAUSTED|UNAVAILABLE|DEADLINE_EXCEEDED", r""),
    ("internal", "INTERNAL(_ERROR)?|UNKNOWN|ABORTED", r""),
    ("bad_request", "INVALID_ARGUMENT|INVALID|badRequest|FAILED_PRECONDITION|NOT_FOUND|OUT_OF_RANGE|400|404", r""),
)  # fmt: skip

HINTS: Mapping[RefusalKind, str] = MappingProxyType({
    "stock_out": "add zones to tpu.fallback_zones or tiers to tpu.capacity, or raise recovery.max_create_attempts",
    "quota": "request quota at https://console.cloud.google.com/iam-admin/quotas, or change tpu.capacity, tpu.zone or "
    "tpu.accelerator_type",
    "internal": "try another tpu.zone, or later; https://status.cloud.google.com shows Google's outages",
    "propagating": "check cloud.service_account",
    "compute_quota": "each worker takes a VM and, with tpu.external_ip, an address of the region: set tpu.external_ip="
    "false, free some, or request quota at https://console.cloud.google.com/iam-admin/quotas",
    "policy": "set tpu.zone or the keys named here, or see https://cloud.google.com/resource-manager/docs/organization-policy",
    "permission": "possible causes: you do not have {role}, cloud.project is the wrong project or has no "
    "billing account, or it has no access to this tpu.zone or tier (for TRC, use those named in its email)",
    "runtime": "set tpu.runtime_version to null (the documented version for the type), or to one listed by `{images}`",
    "type": "set tpu.accelerator_type or tpu.zone; see `{types}`",
    "reservation": "set tpu.reservation to a reservation in that zone, or tpu.capacity to another tier",
    "network": "if somebody else deletes it, set network.name to another network",
    "name_taken": "the name is in use; set tpu.name to another name, or tpu.adopt=true to use the existing pod",
    "bad_request": "Google's message names the field; the keys are under tpu, network and cloud.service_account",
    "unknown": "a retry would not help; check https://status.cloud.google.com for Google's status",
})  # fmt: skip
"""What to do about each kind. `PlaneAdvice` fills in what differs between planes."""


@dataclass(frozen=True)
class PlaneAdvice:
    """What the hints say of one plane.

    Attributes:
        role: with which a user can create pods.
        types: command that lists what a zone offers; `images` that lists the images.
        more: what else to do about a kind of refusal.
        wishes: fields that a request can do without, with the tier that has them and the words of a refusal for them.
    """

    role: str
    types: str
    images: str
    more: Mapping[RefusalKind, str] = field(default_factory=dict[RefusalKind, str], hash=False)
    wishes: Mapping[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]], hash=False)

    def hint(self, kind: RefusalKind) -> str:
        """Return what to do about a refusal of this plane."""
        text = HINTS[kind].format(role=self.role, types=self.types, images=self.images)
        return f"{text}; {self.more[kind]}" if kind in self.more else text

    def refused_wish(self, message: str, spec: SliceSpec, tier: str) -> str:
        """Return the optional field of a request in this tier that its refusal names, or ''."""
        had = ((wish, words) for wish, (of, words) in self.wishes.items() if of == tier and wish not in spec.without)
        return next((wish for wish, words in had if re.search(words, message, re.IGNORECASE)), "")


@dataclass(frozen=True)
class Refusal:
    """Reason why a pod was not created."""

    kind: RefusalKind
    message: str


def classify(code: str, message: str, *, reserved: bool = True) -> RefusalKind:
    """Return the kind of refusal.

    Args:
        code: the canonical code (RESOURCE_EXHAUSTED) of an error response or a failed operation.
        message: Google's text.
        reserved: whether the request named a reservation. Google also answers others "Reservation not found" when it
            has no capacity.
    """
    for kind, codes, words in _TABLE:
        if codes and not re.fullmatch(codes, code, re.IGNORECASE):
            continue
        if words and not re.search(words, message, re.IGNORECASE):
            continue
        return "stock_out" if kind == "reservation" and not reserved else kind
    return "unknown"


def zone_key(config: Config, zone: str) -> str:
    """Return the key that names a zone."""
    return "tpu.zone" if zone == config.tpu.zone else "tpu.fallback_zones"


def no_listing(zone: str, role: str, error: ForbiddenError) -> Issue:
    """Return that the caller, who lacks `role`, may not list TPUs in a zone."""
    return Issue(
        f"no permission to list TPUs in {zone} ({error.message}). Possible causes: your account lacks "
        f"{role} in the project; cloud.project is not the project with the TPUs (for TRC, the one in your "
        "application; `gcloud projects list` lists yours); the zone is not available to you (for TRC, use "
        "the zones in the email)"
    )


def wrong_worker_count(spec: SliceSpec, status: SliceStatus) -> str:
    """Return that a READY slice has another number of workers than its type."""
    return (
        f"conf/tpu_types.yaml lists {plural(spec.workers, 'worker')} for {spec.accelerator_type}, but Google created "
        f"{status.spec.workers}. The pod is incomplete (`slipway down` deletes it) or the table is wrong: report it, "
        "and choose another tpu.accelerator_type in the meantime"
    )


def nothing_to_adopt(name: str, places: Sequence[Place]) -> str:
    """Return that the pod to adopt is in none of the places."""
    zones = dict.fromkeys(place.zone for place in places)
    return (
        f"pod {name} does not exist in {', '.join(zones)}, and tpu.adopt=true requires an existing pod: create "
        "it, change tpu.name or tpu.zone, or set tpu.adopt=false"
    )


def adopted_differs(name: str, diff: Diff) -> str:
    """Return that the pod to adopt has other settings."""
    return (
        f"pod {name} does not match the config ({diff}), and Slipway never changes an adopted pod: change "
        "tpu.accelerator_type or the pod, or set tpu.adopt=false and another tpu.name"
    )


def quota_metrics(context: Context, service: str) -> Iterator[dict[str, Any]]:
    """Yield the quota metrics of an API.

    https://cloud.google.com/service-usage/docs/reference/rest/v1beta1/services.consumerQuotaMetrics/list
    """
    method, parent = "services.consumerQuotaMetrics.list", f"projects/{context.project}/services/{service}"
    return context.google.list_all("serviceusage:v1beta1", method, "metrics", parent=parent, view="FULL", pageSize=500)

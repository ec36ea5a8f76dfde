"""Organization: its policies allow what the plan makes."""

import re
from collections.abc import Iterator, Mapping, Set
from typing import Any, NamedTuple

from conf.schema.config import Config
from conf.schema.topology import zone_region
from controller.config.run_yaml import bucket_name
from controller.context import Context
from controller.core.finding import Issue, check
from controller.gcp.google_errors import POLICY_CURES, ForbiddenError, NotFoundError
from controller.resources.pod.planes import PLANES, planes_for

METHOD = "projects.getEffectiveOrgPolicy"
OUTSIDE_EU = ("europe-west2", "europe-west6")
"""London and Zurich."""
PLAIN_GROUP = re.compile(r"in:[a-z]+(-[a-z]+\d+)?-locations")
"""A continent or a region, which `groups_of` knows; others, such as in:us-low-carbon-locations, are Google's lists."""
IMAGE_PROJECTS = frozenset({"projects/ubuntu-os-accelerator-images"})


class Constraint(NamedTuple):
    """A constraint that would refuse something that the plan makes.

    Attributes:
        name: as https://cloud.google.com/resource-manager/docs/organization-policy/org-policy-constraints lists it.
        key: what to change.
        what: that it refuses, in words.
        cure: what else to do than to ask for an exemption.
        values: that a list must allow, any of them; empty for a constraint that is on or off, or lists others.
        certain: whether Google refuses for sure; what may exist already is not made again.
    """

    name: str
    key: str
    what: str
    cure: str
    certain: bool = True
    values: frozenset[str] = frozenset()


@check(
    "organization",
    "error",
    *("tpu.external_ip", "tpu.zone", "tpu.fallback_zones", "tpu.plane", "network.nat", "cloud.service_account"),
    *("cloud.bucket_location", "cloud.apis", "ssh.host_keys", "ssh.os_login", "recovery.driver"),
    also="warning",
    live=True,
    of_pods=True,
)
def organization_allows_the_plan(config: Config, context: Context) -> Iterator[Issue]:
    """An organization's policy refuses what no permission allows, some of it only once a pod is billed. Those that are
    known to hurt are read; to read them takes orgpolicy.policy.get.
    """
    policies: dict[str, dict[str, Any]] = {}
    for name, key, what, cure, certain, values in () if config.tpu.adopt else constraints_on(config, context):
        if name not in policies:
            asked = {"resource": f"projects/{context.project}", "body": {"constraint": f"constraints/{name}"}}
            policies[name] = context.google.call("cloudresourcemanager", METHOD, **asked)
        if (refused := is_refused(policies[name], values)) is False:
            continue
        show = f"gcloud resource-manager org-policies describe {name} --effective --project={context.project}"
        message = f"your organization's policy {name} {'refuses' if refused else 'may refuse'} {what}: {cure}"
        severity = None if refused and certain else "warning"
        yield Issue(f"{message}, or ask its admin for an exemption (`{show}` shows it)", key, severity)


def constraints_on(config: Config, context: Context) -> Iterator[Constraint]:
    """Yield what may refuse a part of the plan. A refusal is certain of what every new pod has.

    Google makes the VMs of the TPU API in a project of its own, so constraints on VMs may not reach them.
    """
    planes, bastion, cloud = planes_for(config), config.recovery.driver == "bastion", config.cloud
    on_compute, may_be_on_compute = planes == (PLANES["compute_engine"],), PLANES["compute_engine"] in planes
    rows = (
        (config.external_ip, Constraint(
            "compute.vmExternalIpAccess", "tpu.external_ip", "external addresses",
            POLICY_CURES["compute.vmExternalIpAccess"], on_compute)),
        (bastion and not config.network.nat, Constraint(
            "compute.vmExternalIpAccess", "network.nat", "the bastion's external address", "set network.nat=true")),
        (may_be_on_compute, Constraint(
            "compute.requireShieldedVm", "tpu.plane", "VMs without secure boot, as those with TPUs are",
            POLICY_CURES["compute.requireShieldedVm"], on_compute)),
        (may_be_on_compute, Constraint(
            "compute.trustedImageProjects", "tpu.plane", "Google's images for TPUs",
            POLICY_CURES["compute.trustedImageProjects"], on_compute, IMAGE_PROJECTS)),
        (config.network.nat, Constraint(
            "compute.restrictCloudNATUsage", "network.nat", "a new NAT", POLICY_CURES["compute.restrictCloudNATUsage"],
            False)),
        (config.ssh.host_keys != "trust_on_first_use", Constraint(
            "compute.disableGuestAttributesAccess", "ssh.host_keys", "the host keys that workers publish",
            POLICY_CURES["compute.disableGuestAttributesAccess"], on_compute)),
        (config.ssh.os_login is False, Constraint(
            "compute.requireOsLogin", "ssh.os_login", "keys in the metadata of VMs", "set ssh.os_login=true")),
    )  # fmt: skip
    yield from (constraint for applies, constraint in rows if applies)
    for zone in config.tpu.all_zones:
        key, what = "tpu.zone" if zone == config.tpu.zone else "tpu.fallback_zones", f"what is made in {zone}"
        yield Constraint("gcp.resourceLocations", key, what, "choose another zone", on_compute, groups_of(zone))
    bucket, place = bucket_name(config, context.project), cloud.bucket_location or config.region
    if not cloud.bucket and _is_absent(context, "storage", "buckets.get", bucket=bucket):
        cure = "set cloud.bucket to a bucket that exists, or cloud.bucket_location to an allowed place"
        what, groups = f"a new bucket in {place}", groups_of(place)
        yield Constraint("gcp.resourceLocations", "cloud.bucket_location", what, cure, True, groups)
    for account in (cloud.service_account, *([cloud.driver_service_account] if bastion else [])):
        path = f"projects/{context.project}/serviceAccounts/{context.account_email(account)}"
        is_made = "@" not in account and account != "default"  # unless it exists
        if is_made and _is_absent(context, "iam", "projects.serviceAccounts.get", name=path):
            name, what = "iam.disableServiceAccountCreation", f"the new account {account}"
            yield Constraint(name, "cloud.service_account", what, POLICY_CURES[name])
    for api in cloud.apis:
        cure, what = "take it out of cloud.apis if you can do without", f"the API {api}"
        yield Constraint("gcp.restrictServiceUsage", "cloud.apis", what, cure, True, frozenset({api}))


def groups_of(location: str) -> frozenset[str]:
    """Return the values of gcp.resourceLocations that hold for a zone, a region or a multi-region.

    https://cloud.google.com/resource-manager/docs/organization-policy/defining-locations: a region alone does not stand
    for its zones, the group of a region does.
    """
    continent, region = location.partition("-")[0], zone_region(location) if location.count("-") > 1 else location
    groups = {location, region, continent, *(["northamerica"] if continent == "us" else [])}
    if continent == "europe" and region not in OUTSIDE_EU:
        groups.add("eu")
    return frozenset({location, *(f"in:{group}-locations" for group in groups)})


def is_refused(policy: Mapping[str, Any], values: Set[str]) -> bool | None:
    """Return whether an effective policy refuses all of some values; None if its groups do not tell.

    https://cloud.google.com/resource-manager/reference/rest/v1/Policy. An answer without a policy allows everything.
    """
    listed = policy.get("listPolicy", {})
    given = (listed.get(key, ()) for key in ("allowedValues", "deniedValues"))
    allowed, denied = ({value.removeprefix("is:").lower() for value in found} for found in given)
    if policy.get("booleanPolicy", {}).get("enforced") or listed.get("allValues") == "DENY" or denied & values:
        return True
    if allowed & values:
        return False
    groups = [value for value in allowed | denied if value.startswith(("in:", "under:"))]
    return bool(allowed) if all(PLAIN_GROUP.fullmatch(group) for group in groups) else None


def _is_absent(context: Context, api: str, method: str, **names: str) -> bool:
    """Return whether something does not exist for sure; another check reports what the caller may not see."""
    try:
        context.google.call(api, method, **names)
    except (NotFoundError, ForbiddenError) as error:
        return isinstance(error, NotFoundError)
    return False

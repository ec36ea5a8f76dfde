"""Names, network and permissions: Google accepts them, only you reach the workers, and you may do what the plan does.

Names are yours, and workers reach the internet.
"""

import ipaddress
import re
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from typing import Any

from conf.schema.cloud import ANYWHERE, IAP_RANGE, permissions_of_role, predefined_roles
from conf.schema.config import Config
from conf.schema.topology import is_near
from controller.checks.input_files import MISSING
from controller.config.run_yaml import bucket_name
from controller.context import Context
from controller.core.finding import Issue, Severity, check
from controller.gcp.google_errors import ForbiddenError, NotFoundError, ServiceDisabledError
from controller.plan.needed_permissions import (
    ACCOUNT_KIND,
    ALWAYS,
    BILLING_KIND,
    BUCKET_KIND,
    CHANGE,
    MAKE,
    PROJECT_KIND,
    Need,
    permissions_of_plan,
)
from controller.resources.pod.planes import planes_for

PLACEHOLDER = re.compile(
    r"\?\?\?|\b(your|my)[-_](actual[-_])?(project|bucket|zone|key|token|account|name)(?!-\d)|<[A-Z_-]+>", re.I
)
"""`my-project-412345` is none: Google proposes such IDs for new projects."""
TRAINING = ("data.", "model.", "loop.", "optimizer.")
"""Sections whose texts may be prose."""
EXAMPLE_NAMES = ("alpine-aspect-459819-m4", "nanochat-training-data-2026", "trm-scaling-study-kellen")
"""Other people's projects and buckets, from published instructions."""
BUCKET = re.compile(r"[a-z0-9]([-_.a-z0-9]{1,61})[a-z0-9]")


@check("placeholder", "error", "KEY")
def no_placeholders(config: Config) -> Iterator[Issue]:
    """Leftovers from instructions, such as `your-bucket`, `???` and other people's names, fail late and obscurely."""
    for key, text in iter_strings(config.model_dump(mode="json"), ""):
        if key.startswith("env.secrets.") and text.startswith("env:"):
            continue  # the name of a variable, which may be MY_TOKEN
        if key.startswith(TRAINING):
            if text == MISSING:
                yield Issue(f"{MISSING!r} is no value: set one, as {key}=…", key)
        elif found := PLACEHOLDER.search(text):
            yield Issue(f"{found[0]!r} in {text!r} is a placeholder; set the real value", key)
        elif name := next((name for name in EXAMPLE_NAMES if name in text), None):
            yield Issue(f"{name} belongs to someone else; use your own", key)


@check("bucket_name", "error", "cloud.bucket", of_pods=True)
def bucket_name_is_valid(config: Config) -> Iterator[Issue]:
    """Google rejects other bucket names: https://cloud.google.com/storage/docs/buckets#naming."""
    name = config.cloud.bucket
    if name is None or PLACEHOLDER.search(name):
        return
    if not BUCKET.fullmatch(name) or ".." in name or name.startswith("goog") or "google" in name:
        yield Issue(
            f"{name!r} is not a valid bucket name: use 3 to 63 of a-z, 0-9, -, _ and ., with a letter or digit at "
            "both ends, without `google` and without gs://"
        )


@check("bucket_far", "error", "cloud.bucket", live=True, of_pods=True)
def bucket_is_close(config: Config, context: Context) -> Iterator[Issue]:
    """Reads from an existing bucket in another region are slow and billed."""
    name = bucket_name(config, context.project)
    try:
        location = context.google.call("storage", "buckets.get", bucket=name, projection="noAcl").get("location", "")
    except (NotFoundError, ForbiddenError):
        return  # `up` creates it, or `bucket_taken` reports it
    if far := [region for region in config.regions if location and not is_near(location, region)]:
        yield Issue(
            f"{name} is in {location.lower()} and the TPU in {', '.join(far)}, so reads are slow and billed per GB; "
            "use a bucket there (null creates one), or set tpu.zone to the bucket's region"
        )


@check("bucket_taken", "error", "cloud.bucket", live=True, of_pods=True)
def bucket_is_accessible(config: Config, context: Context) -> Iterator[Issue]:
    """Bucket names are global in Google Cloud; a name that is taken looks like a missing permission."""
    name = bucket_name(config, context.project)
    try:
        context.google.call("storage", "buckets.get", bucket=name, projection="noAcl")
    except NotFoundError:
        return
    except ForbiddenError:
        try:
            context.google.call("storage", "objects.list", bucket=name, maxResults=1)
        except ForbiddenError:
            yield Issue(
                f"{name} exists but you have no access; bucket names are global, so it may belong to someone else; "
                f"set another, such as cloud.bucket={name}-2"
            )


def iter_strings(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yield every string in plain data with its dotted key."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, child in value.items():
            yield from iter_strings(child, f"{key}.{name}".lstrip("."))
    elif isinstance(value, list):
        for child in value:
            yield from iter_strings(child, key)


@check("way_out", "error", "network.nat", of_pods=True)
def workers_reach_internet(config: Config) -> Iterator[Issue]:
    """Without an external address, workers need a NAT to reach the internet; otherwise package installs hang."""
    if not config.external_ip and not config.network.nat:
        yield Issue("workers without an external address need it to install packages; set it to true")


@check("role", "warning", "cloud.roles", "cloud.bucket_roles", "cloud.driver_roles", of_pods=True)
def roles_exist(config: Config) -> Iterator[Issue]:
    """Google refuses unknown roles, but late."""
    for key in ("roles", "bucket_roles", "driver_roles"):
        for role in set(getattr(config.cloud, key)) - {*predefined_roles()}:
            near = get_close_matches(role, predefined_roles(), n=1, cutoff=0.93)
            # the beginning of another may be one itself, and so may another with a word more: serviceAccountKeyAdmin
            if near and not near[0].startswith(role) and abs(len(near[0]) - len(role)) < 3:
                yield Issue(f"{role} is probably misspelled; did you mean {near[0]}?", f"cloud.{key}")


@check("ssh_open", "error", "network.ssh_source_ranges", "network.open_to_world", also="warning", of_pods=True)
def ssh_is_not_open(config: Config) -> Iterator[Issue]:
    """A port 22 open to everyone is attacked within minutes."""
    if ANYWHERE in config.network.ssh_source_ranges and not config.network.open_to_world:
        yield Issue(f"{ANYWHERE} opens SSH to the whole internet; to allow it, set network.open_to_world=true")
    if config.network.open_to_world:
        yield Issue("SSH is open to the whole internet", "network.open_to_world", "warning")


@check(
    "ssh_way", "error", "network.ssh_source_ranges", "tpu.external_ip", "network.laptop", also="warning", of_pods=True
)
def ssh_has_a_route(config: Config) -> Iterator[Issue]:
    """If no rule admits the chosen method, every connection fails, and only after its timeout."""
    method, network = config.ssh.method, config.network
    through_iap = any(_covers(block, IAP_RANGE) for block in network.all_ssh_source_ranges)
    if method == "iap" and not through_iap:
        yield Issue(f"ssh.method=iap needs {IAP_RANGE} in this list")
    if method == "external" and not config.external_ip:
        yield Issue("ssh.method=external needs true or null", "tpu.external_ip")
    elif network.laptop is not None and not config.external_ip:
        message = (
            "no worker has an external address for this machine to reach; set tpu.external_ip=null, or this to null"
        )
        yield Issue(message, "network.laptop", "warning")
    others = set(network.all_ssh_source_ranges) - {IAP_RANGE}
    if method == "external" and not others and network.laptop is None:
        message = "ssh.method=external, but only IAP is admitted; use auto or this machine's range"
        yield Issue(message, "network.laptop")


def _covers(block: str, source: str) -> bool:
    inner, outer = ipaddress.IPv4Network(source), ipaddress.IPv4Network(block)
    return inner.subnet_of(outer)


TUNNEL = "iap.tunnelInstances.accessViaIAP"
MAX_TESTED = 100
"""Permissions per request: https://cloud.google.com/resource-manager/reference/rest/v1/projects/testIamPermissions"""
HELD_BY_OWNERS = ("storage.buckets.create", "storage.buckets.delete", "storage.buckets.list")
WHERE = {
    PROJECT_KIND: "in",
    BUCKET_KIND: "on bucket",
    ACCOUNT_KIND: "on service account",
    BILLING_KIND: "on billing account",
}


@check("permissions", "warning", "cloud.project", also="error", live=True, of_pods=True)
def caller_has_permissions(config: Config, context: Context) -> Iterator[Issue]:
    """A missing permission shows when the pod is billed already. `slipway plan --permissions` lists all of them."""
    needs = permissions_of_plan(config, context.project)
    held = held_needs(needs, context)
    groups: dict[tuple[str, str, str, Severity, str], list[Need]] = {}
    several = len(planes_for(config)) > 1  # what one plane needs, the others do not
    for need in needs:
        grade = None if need in held else "warning" if several else severity(need)
        if grade and need.permission == TUNNEL:
            grade = tunnel_severity(config, context)
        if grade:
            groups.setdefault((need.kind, need.name, need.when, grade, need.role), []).append(need)
    for (kind, name, when, grade, role), lacking in groups.items():
        names = ", ".join(need.permission for need in lacking)
        parts = ", ".join(dict.fromkeys(part for need in lacking for part in need.parts))
        reasons = {ALWAYS: f"for: {parts}", MAKE: f"for: {parts} (unless that exists)", CHANGE: f"to change: {parts}"}
        whose = reasons.get(when, "for `down --all`")
        how = f"; {role} has it: `{grant_command(kind, name, role, context)}`" if role else ""
        yield Issue(f"you lack {names} {WHERE[kind]} {name}, {whose}{how}", severity=grade)


def grant_command(kind: str, name: str, role: str, context: Context) -> str:
    """Return the command with which an owner gives the caller a role; a bucket or account may not exist yet."""
    account = context.google.service_account
    member = f"serviceAccount:{account}" if account else "user:$(gcloud config get account)"
    where = f"billing accounts add-iam-policy-binding {name}"
    if kind != BILLING_KIND:
        where = f"projects add-iam-policy-binding {context.project}"
    return f'gcloud {where} --member="{member}" --role={role}'


def severity(need: Need) -> Severity:
    """Return error for what every pod needs and no policy below the project can grant.

    Google's answer about the project is no proof for the others: `actAs` is not needed where the pod exists.
    """
    return "error" if need.permission.startswith("tpu.nodes.") and need.when == ALWAYS else "warning"


def tunnel_severity(config: Config, context: Context) -> Severity | None:
    """Return how bad it is that the project does not let the caller through IAP; None if IAP's own policy does.

    It is an error where IAP is the only way in, unless the project's policy cannot be read, or grants something under a
    condition: Google evaluates those on a connection (https://cloud.google.com/iap/docs/using-tcp-forwarding).
    """
    try:
        for zone in config.tpu.all_zones:
            tunnels = f"projects/{context.project}/iap_tunnel/zones/{zone}"
            body = {"permissions": [TUNNEL]}
            if not context.google.call("iap", "v1.testIamPermissions", resource=tunnels, body=body).get("permissions"):
                break
        else:
            return None
    except ServiceDisabledError:
        pass  # then it has no policies either
    except (ForbiddenError, NotFoundError):
        return "warning"
    options = {"options": {"requestedPolicyVersion": 3}}
    try:
        asked = {"resource": context.project, "body": options}
        bindings = context.google.call("cloudresourcemanager", "projects.getIamPolicy", **asked).get("bindings", [])
    except ForbiddenError:
        return "warning"
    under_condition = [binding["role"] for binding in bindings if binding.get("condition")]
    known = [permissions_of_role(role) for role in under_condition if role in predefined_roles()]
    maybe = len(known) < len(under_condition) or any(TUNNEL in permissions for permissions in known)
    return "warning" if maybe or (config.ssh.method != "iap" and config.external_ip) else "error"


def held_needs(needs: list[Need], context: Context) -> set[Need]:
    """Return those needs that the policies of the project, the bucket and the accounts satisfy, as Google says."""
    asked = [need for need in needs if need.kind != BILLING_KIND]
    in_project = _test_project({need.permission for need in asked}, context)
    held = {need for need in asked if need.permission in in_project}
    for kind in (BUCKET_KIND, ACCOUNT_KIND, BILLING_KIND):
        for name in {need.name for need in needs if need.kind == kind}:
            here = [need for need in needs if (need.kind, need.name) == (kind, name)]
            left = [need.permission for need in here if need not in held]
            if left:
                found = _test_resource(kind, name, left, context)
                if found is None:
                    found = _granted_by_new_bucket(here, held)
                held |= {need for need in here if need.permission in found}
    return held


def _granted_by_new_bucket(here: list[Need], held: set[Need]) -> list[str]:
    """Return what the policy of a bucket that does not exist yet will grant.

    It lets Owners and Editors of the project in, who hold nothing in the project but its creation and deletion. So a
    caller who holds more than that has it from another role, which must be complete.
    """
    others = [need for need in here if need.permission not in HELD_BY_OWNERS]
    return [] if held.intersection(others) else [need.permission for need in others]


def _test_project(permissions: Iterable[str], context: Context) -> set[str]:
    names, held = sorted(permissions), set[str]()
    for start in range(0, len(names), MAX_TESTED):
        body = {"permissions": names[start : start + MAX_TESTED]}
        answer = context.google.call(
            "cloudresourcemanager", "projects.testIamPermissions", resource=context.project, body=body
        )
        held |= set(answer.get("permissions", []))
    return held


def _test_resource(kind: str, name: str, permissions: list[str], context: Context) -> list[str] | None:
    """Return those permissions that the caller holds on a resource; None for a bucket that does not exist."""
    google = context.google
    try:
        if kind == BUCKET_KIND:
            answer = google.call("storage", "buckets.testIamPermissions", bucket=name, permissions=permissions)
        elif kind == ACCOUNT_KIND:
            path = f"projects/{context.project}/serviceAccounts/{context.account_email(name)}"
            answer = google.call(
                "iam", "projects.serviceAccounts.testIamPermissions", resource=path, body={"permissions": permissions}
            )
        else:
            answer = google.call(
                "cloudbilling",
                "billingAccounts.testIamPermissions",
                resource=f"billingAccounts/{name}",
                body={"permissions": permissions},
            )
    except NotFoundError:
        return None if kind == BUCKET_KIND else []
    except ForbiddenError:
        return []
    return answer.get("permissions", [])

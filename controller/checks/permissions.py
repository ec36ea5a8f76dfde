"""Permissions: you have those that the plan uses."""

from collections.abc import Iterable, Iterator

from conf.schema.config import Config
from controller.context import Context
from controller.core.finding import Issue, Severity, check
from controller.gcp.errors import ForbiddenError, NotFoundError
from controller.plan.permissions import (
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

MAX_TESTED = 100
"""Permissions per request: https://cloud.google.com/resource-manager/reference/rest/v1/projects/testIamPermissions"""
HELD_BY_OWNERS = ("storage.buckets.create", "storage.buckets.delete", "storage.buckets.list")
WHERE = {
    PROJECT_KIND: "in",
    BUCKET_KIND: "on bucket",
    ACCOUNT_KIND: "on service account",
    BILLING_KIND: "on billing account",
}


@check("permissions", "warning", "cloud.project", also="error", live=True)
def caller_has_permissions(config: Config, context: Context) -> Iterator[Issue]:
    """A missing permission shows when the pod is billed already. `slipway plan --permissions` lists all of them."""
    needs = permissions_of_plan(config, context.project)
    held = held_needs(needs, context)
    missing = [need for need in needs if need not in held]
    groups: dict[tuple[str, str, str, Severity, str], list[Need]] = {}
    several = len(planes_for(config)) > 1  # what one plane needs, the others do not
    for need in missing:
        grade = "warning" if several else severity(need)
        groups.setdefault((need.kind, need.name, need.when, grade, need.role), []).append(need)
    for (kind, name, when, grade, role), lacking in groups.items():
        names = ", ".join(need.permission for need in lacking)
        parts = ", ".join(dict.fromkeys(part for need in lacking for part in need.parts))
        reasons = {ALWAYS: f"for: {parts}", MAKE: f"for: {parts} (unless that exists)", CHANGE: f"to change: {parts}"}
        whose = reasons.get(when, "for `down --all`")
        yield Issue(f"you lack {names} {WHERE[kind]} {name}, {whose}; {role} has it", severity=grade)


def severity(need: Need) -> Severity:
    """Return error for what every pod needs and no policy below the project can grant.

    Google's answer about the project is no proof for the others: IAP may be granted on a VM that does not exist yet or
    under a condition, and `actAs` is not needed where the pod exists.
    """
    return "error" if need.permission.startswith("tpu.nodes.") and need.when == ALWAYS else "warning"


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

"""Refusals that a fault plants, in Google's words: of organization policies, which it also shows, and of limits.

Policies in the words of Compute Engine and Cloud Storage as users report them; those of the TPU API are not known, and
are guessed. Limits: https://cloud.google.com/compute/docs/api-rate-limits.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from controller.localcloud.http.call import PROJECT, PROJECT_NUMBER, ApiCall
from controller.localcloud.http.errors import ApiError, error_info
from controller.localcloud.store import Document

CONSUMER = f"of service 'compute.googleapis.com' for consumer 'project_number:{PROJECT_NUMBER}'."
RETRY = {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "17.5s"}


def effective_policy(constraint: str, specs: Iterable[Document]) -> Document:
    """Return the policy of a constraint as the project sees it; without a fault, its default allows everything."""
    spec = next((spec for spec in specs if spec["constraint"] == constraint), None)
    if re.match(r"\w+\.(disable|require)", constraint):
        return {"booleanPolicy": {"enforced": True} if spec else {}}
    if spec and constraint == "gcp.resourceLocations":
        return {"listPolicy": {"allowedValues": [f"in:{spec['location']}-locations"]}}
    return {"listPolicy": {"allValues": "DENY" if spec else "ALLOW"}}


def policy_violation(spec: Document, call: ApiCall) -> ApiError | None:
    """Return the refusal of a request that a policy forbids."""
    name, body, project = call.method.name, call.body, f"projects/{PROJECT}"
    constraint = f"constraints/{spec['constraint']}"
    where = call.path.get("zone") or call.path.get("region") or call.path.get("locationsId") or ""
    path = f"{project}/{'zones' if 'zone' in call.path else 'regions'}/{where}/{name.split('.')[-2]}/{body.get('name')}"
    creates = name.endswith((".insert", ".create"))
    match spec["constraint"]:
        case "compute.vmExternalIpAccess" if creates and any(_external(body)):
            remedy = f"Add instance {path} to the constraint to use external IP with it."
            return _refused(call, f"Constraint {constraint} violated for project {PROJECT_NUMBER}. {remedy}")
        case "compute.requireShieldedVm" if name == "instances.insert":
            if not (body.get("shieldedInstanceConfig") or {}).get("enableSecureBoot"):
                why = "Secure Boot is not enabled in the 'shielded_instance_config' field."
                return _refused(call, f"Constraint {constraint} violated for project {project}. {why}")
        case "compute.restrictCloudNATUsage" if name.startswith("routers.") and body.get("nats"):
            message = f"Constraint {constraint} violated for {project}. {project}/regions/{where}/subnetworks/* is not"
            return _refused(call, f"{message} allowed to use Cloud NAT.")
        case "gcp.resourceLocations" if name == "buckets.insert":
            if (location := str(body.get("location", "us")).lower()) != spec["location"]:
                return ApiError(412, f"'{location}' violates constraint '{constraint}'")
        case "gcp.resourceLocations" if creates and where and not where.startswith(spec["location"]):
            kind = "ZONE" if "zone" in call.path or "locationsId" in call.path else "REGION"
            message = f"Location {kind}:{where} violates constraint {constraint} on the resource {path}."
            return _refused(call, message)
        case "iam.disableServiceAccountCreation" if name == "projects.serviceAccounts.create":
            message = "Service account creation is not allowed on this project."
            violations = [{"type": constraint, "subject": project, "description": message}]
            details = [{"@type": "type.googleapis.com/google.rpc.PreconditionFailure", "violations": violations}]
            return ApiError(400, message, status="FAILED_PRECONDITION", details=details)
    return None


def _refused(call: ApiCall, message: str) -> ApiError:
    return ApiError(400, message, status="FAILED_PRECONDITION") if call.method.api == "tpu" else ApiError(412, message)


def _external(body: Mapping[str, Any]) -> Iterator[bool]:
    """Yield for each network interface of VMs or nodes in a body whether it has an external address."""
    nodes = [spec.get("node") or {} for spec in (body.get("tpu") or {}).get("nodeSpec", [])]
    yield from (bool((node.get("networkConfig") or {}).get("enableExternalIps")) for node in (body, *nodes))
    yield from (bool(card.get("accessConfigs")) for card in body.get("networkInterfaces", []))


def rate_limited(spec: Document) -> ApiError:
    """Return the refusal of one request too many."""
    service, domain = "compute.googleapis.com", "googleapis.com"
    limit = {"service": service, "quota_limit": "ReadRequestsPerMinutePerProject", "quota_unit": "1/min/{project}"}
    info = error_info("RATE_LIMIT_EXCEEDED", domain, **limit)
    minute = f"Quota exceeded for quota metric 'Read requests' and limit 'Read requests per minute' {CONSUMER}"
    match spec["form"]:
        case "project":
            return ApiError(403, minute, reason="rateLimitExceeded", details=[info])
        case "user":
            return ApiError(403, "User Rate Limit Exceeded", reason="userRateLimitExceeded")
        case "resource":
            message = "Operation rate exceeded for resource 'x'. Too frequent operations from the source resource."
            details = [error_info("RESOURCE_OPERATION_RATE_EXCEEDED", service)]
            return ApiError(403, message, reason="rateLimitExceeded", details=details)
        case "operations":
            details = [error_info("CONCURRENT_OPERATIONS_QUOTA_EXCEEDED", service, containerType="PROJECT")]
            return ApiError(403, "Rate Limit Exceeded", reason="rateLimitExceeded", details=details)
    return ApiError(429, minute, details=[info, RETRY])

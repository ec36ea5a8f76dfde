"""API errors in the format of Google, and its refusals of a caller in the words of each API."""

from dataclasses import KW_ONLY, dataclass
from typing import Any

from google.rpc import code_pb2

_STATUS = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "ALREADY_EXISTS",
    412: "FAILED_PRECONDITION",
    429: "RESOURCE_EXHAUSTED",
    499: "CANCELLED",
    500: "INTERNAL",
    501: "UNIMPLEMENTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}

# https://cloud.google.com/storage/docs/json_api/v1/status-codes and the Compute error reference.
_REASON = {
    304: "notModified",
    400: "invalid",
    401: "authError",
    403: "forbidden",
    404: "notFound",
    409: "conflict",
    412: "conditionNotMet",
    416: "requestedRangeNotSatisfiable",
    429: "rateLimitExceeded",
    500: "internalError",
    501: "notImplemented",
    503: "backendError",
}


@dataclass(eq=False, repr=False)
class ApiError(Exception):
    """Error response of a request or an operation.

    `code` is the HTTP status, `status` the canonical name (newer APIs), `reason` the short name (compute, storage).
    """

    code: int
    message: str
    _: KW_ONLY
    status: str = ""
    reason: str = ""
    details: Any = None
    retry_after: int | None = None  # seconds
    raw: str | None = None  # what is sent in place of the document: the page of a proxy, or nothing
    is_counted: bool = False  # by a fault, whose count must not be rolled back

    def __post_init__(self) -> None:
        super().__init__(self.message)
        self.status = self.status or _STATUS.get(self.code, "UNKNOWN")
        self.reason = self.reason or _REASON.get(self.code, "invalid")

    def body(self) -> dict[str, Any]:
        """Return the error document, with both the newer (`status`) and the older (`errors`) form."""
        errors = [{"message": self.message, "domain": "global", "reason": self.reason}]
        error = {"code": self.code, "message": self.message, "status": self.status, "errors": errors}
        return {"error": error | ({"details": self.details} if self.details else {})}

    def rpc_status(self) -> dict[str, Any]:
        """Return the google.rpc.Status of a failed operation; `http` and `reason` serve the older APIs."""
        code = getattr(code_pb2, self.status, code_pb2.UNKNOWN)
        return {"code": code, "message": self.message, "http": self.code, "reason": self.reason}


def internal_error(error: BaseException) -> ApiError:
    return ApiError(500, f"Internal error of the emulated cloud: {error!r}; see server.log in its state folder")


def not_found(what: str) -> ApiError:
    """Return error 404 in the wording of Compute ("The resource '...' was not found")."""
    return ApiError(404, f"The resource '{what}' was not found")


def failed_precondition(message: str) -> ApiError:
    return ApiError(400, message, status="FAILED_PRECONDITION")


def not_ready(what: str) -> ApiError:
    """Return error 400 in the wording of Compute, of a resource with an operation in progress."""
    return ApiError(400, f"The resource '{what}' is not ready", reason="resourceNotReady")


def quota_exceeded(name: str, limit: int, region: str, reason: str = "QUOTA_EXCEEDED") -> ApiError:
    """Return error 403 in the wording of Compute; requests and operations name its reason in two ways."""
    where = f"in region {region}" if region else "globally"
    return ApiError(403, f"Quota '{name}' exceeded.  Limit: {float(limit)} {where}.", reason=reason)


def already_exists(what: str) -> ApiError:
    """Return error 409 in the wording of Compute."""
    return ApiError(409, f"The resource '{what}' already exists", reason="alreadyExists")


def permission_denied(api: str, permission: str, resource: str, email: str) -> ApiError:
    """Return error 403 for a caller without a permission on a resource."""
    if permission == "iam.serviceAccounts.actAs":
        return _may_not_act_as(api, resource.rpartition("/")[2], email)
    match api:
        case "compute":
            return ApiError(403, f"Required '{permission}' permission for '{resource}'")
        case "storage":
            who = email or "Anonymous caller"
            kind = "object" if ".objects." in permission else "bucket" if resource.startswith("buckets/") else "project"
            product = "Google Cloud Storage" if kind != "project" else "Google Cloud"
            message = (
                f"{who} does not have {permission} access to the {product} {kind}. "
                f"Permission '{permission}' denied on resource (or it may not exist)."
            )
            return ApiError(403, message)
        case "serviceusage" if permission.startswith("serviceusage.services."):
            verb = permission.rpartition(".")[2]
            details = [error_info("AUTH_PERMISSION_DENIED", "googleapis.com", service="serviceusage.googleapis.com")]
            return ApiError(403, f"Permission denied to {verb} service ({permission})", details=details)
    full = f"//{api}.googleapis.com/{resource}"
    message = f"Permission '{permission}' denied on resource '{full}' (or it may not exist)."
    info = error_info("IAM_PERMISSION_DENIED", f"{api}.googleapis.com", permission=permission, resource=resource)
    return ApiError(403, message, details=[info])


def _may_not_act_as(api: str, account: str, email: str) -> ApiError:
    if api == "compute":
        message = (
            f"The user does not have access to service account '{account}'. User: '{email}'. Ask a project owner to "
            "grant you the iam.serviceAccountUser role on the service account"
        )
        return ApiError(403, message, reason="SERVICE_ACCOUNT_ACCESS_DENIED")
    message = f"Permission 'iam.serviceAccounts.actAs' denied on service account {account} (or it may not exist)."
    info = error_info("IAM_PERMISSION_DENIED", "iam.googleapis.com", permission="iam.serviceAccounts.actAs")
    return ApiError(403, message, details=[info])


def scopes_insufficient(api: str, method: str) -> ApiError:
    """Return error 403 for a token without a scope that the method accepts."""
    about = {"service": f"{api}.googleapis.com", "method": method}
    details = [error_info("ACCESS_TOKEN_SCOPE_INSUFFICIENT", "googleapis.com", **about)]
    words = "Request had insufficient authentication scopes."
    return ApiError(403, words, reason="insufficientPermissions", details=details)


def user_project_denied(api: str, project: str) -> ApiError:
    """Return error 403 for a quota project that the caller may not use."""
    console = f"https://console.developers.google.com/iam-admin/iam?project={project}"
    message = (
        f"Caller does not have required permission to use project {project}. Grant the caller the "
        "roles/serviceusage.serviceUsageConsumer role, or a custom role with the serviceusage.services.use permission, "
        f"by visiting {console} and then retry. Propagation of the new permission may take a few minutes."
    )
    about = {"service": f"{api}.googleapis.com", "consumer": f"projects/{project}"}
    return ApiError(403, message, details=[error_info("USER_PROJECT_DENIED", "googleapis.com", **about)])


def unauthenticated(reason: str = "ACCESS_TOKEN_EXPIRED") -> ApiError:
    """Return error 401 for a token that is unknown or has expired."""
    message = (
        "Request had invalid authentication credentials. Expected OAuth 2 access token, login cookie or other valid "
        "authentication credential. See https://developers.google.com/identity/sign-in/web/devconsole-project."
    )
    return ApiError(401, message, details=[error_info(reason, "googleapis.com")])


def error_info(reason: str, domain: str, **metadata: str) -> dict[str, object]:
    form = "type.googleapis.com/google.rpc.ErrorInfo"
    return {"@type": form, "reason": reason, "domain": domain, "metadata": metadata}

"""API errors in the format of Google."""

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


class ApiError(Exception):
    """Error response of a request or an operation.

    `code` is the HTTP status, `status` the canonical name (newer APIs), `reason` the short name (compute, storage).
    """

    def __init__(
        self,
        code: int,
        message: str,
        *,
        status: str | None = None,
        reason: str | None = None,
        details: Any = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.status = status or _STATUS.get(code, "UNKNOWN")
        self.reason = reason or _REASON.get(code, "invalid")
        self.details = details
        self.retry_after = retry_after  # seconds

    def body(self) -> dict[str, Any]:
        """Return the error document, with both the newer (`status`) and the older (`errors`) form."""
        error: dict[str, Any] = {
            "code": self.code,
            "message": self.message,
            "status": self.status,
            "errors": [{"message": self.message, "domain": "global", "reason": self.reason}],
        }
        if self.details:
            error["details"] = self.details
        return {"error": error}

    def rpc_status(self) -> dict[str, Any]:
        """Return the google.rpc.Status of a failed operation; `http` and `reason` serve the older APIs."""
        return {
            "code": getattr(code_pb2, self.status, code_pb2.UNKNOWN),
            "message": self.message,
            "http": self.code,
            "reason": self.reason,
        }


def not_found(what: str) -> ApiError:
    """Return error 404 in the wording of Compute ("The resource '...' was not found")."""
    return ApiError(404, f"The resource '{what}' was not found")


def already_exists(what: str) -> ApiError:
    """Return error 409 in the wording of Compute."""
    return ApiError(409, f"The resource '{what}' already exists", reason="alreadyExists")

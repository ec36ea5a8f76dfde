"""Google's errors as exceptions."""

import json
import re
from typing import Any

from controller.core.errors import CloudError, ConfigError
from controller.gcp.credentials import GCLOUD_PROJECT, NO_QUOTA_PROJECT

RETRIED_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
UNREACHABLE = "UNREACHABLE"
"""Reason of an error that came from the way to Google, and not from Google."""
PERMANENT_ERROR = re.compile(
    r"quota limit|quota '[^']*' exhausted|no more capacity|does not have enough resources", re.IGNORECASE
)
"""Messages of a 429, or of a 503 of Compute Engine, that no retry will change. The caller decides what to do."""


class GoogleError(CloudError):
    """An HTTP error (400 or above). `reason` is Google's machine-readable code, e.g. RESOURCE_EXHAUSTED."""

    def __init__(self, what: str, status: int, reason: str, message: str, retry_after: float | None = None) -> None:
        self.status, self.reason, self.message, self.retry_after = status, reason, message, retry_after
        super().__init__(f"{what}: {status} {reason}: {message}")

    @property
    def is_transient(self) -> bool:
        """Return whether the same request may succeed in a moment."""
        return self.status in RETRIED_STATUSES and not (
            self.status in (429, 503) and PERMANENT_ERROR.search(self.message)
        )


class NotFoundError(GoogleError):
    """404: the resource does not exist."""


class ConflictError(GoogleError):
    """409 or 412: the resource exists already, or someone else has changed it."""


class ForbiddenError(GoogleError):
    """403: the caller lacks permission."""


class ServiceDisabledError(GoogleError):
    """403: the API `service` is not enabled in the project, or not everywhere yet."""

    @property
    def service(self) -> str:
        found = re.search(r"[\w.-]+\.googleapis\.com", self.message)
        return found[0] if found else "the API"


class NoCredentialsError(ConfigError):
    """No credentials to sign requests with."""


def http_error(what: str, error: Any) -> GoogleError:
    """Return the exception for an `HttpError` of google-api-python-client.

    Raises:
        NoCredentialsError: the request counts against gcloud's own project, where no API can be enabled.
    """
    status = int(error.resp.status)
    try:
        body = json.loads(error.content)["error"]
    except (ValueError, KeyError, TypeError):
        body = {}
    details = body.get("errors") or [{}]
    reason = body.get("status") or details[0].get("reason") or "ERROR"
    kind = {403: ForbiddenError, 404: NotFoundError, 409: ConflictError, 412: ConflictError}.get(status, GoogleError)
    reasons = {detail.get("reason") for detail in [*details, *body.get("details", [])]}
    if status == 403 and reasons & {"SERVICE_DISABLED", "accessNotConfigured"}:
        if GCLOUD_PROJECT in error.content.decode(errors="replace"):
            raise NoCredentialsError(NO_QUOTA_PROJECT.format(what))
        kind = ServiceDisabledError
    return kind(what, status, reason, body.get("message", str(error)), _seconds(error.resp.get("retry-after", "")))


def _seconds(retry_after: str) -> float | None:
    """Parse https://www.rfc-editor.org/rfc/rfc9110#field.retry-after in seconds, the form that Google sends."""
    return float(retry_after) if retry_after.isdigit() else None

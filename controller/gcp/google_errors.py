"""Google's errors as exceptions, read by their reason."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from controller.core.errors import CloudError, ConfigError
from controller.gcp.credentials import GCLOUD_PROJECT, LOG_IN_AGAIN, NO_QUOTA_PROJECT

RETRIED_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
UNREACHABLE = "UNREACHABLE"
"""Reason of an error that came from the way to Google, and not from Google."""
CHECK_NETWORK = "Google cannot be reached: check the network of this machine"
REFUSED_BY_LIBRARY = re.compile(r'Parameter "\w+" value ')
"""Beginning of a TypeError of googleapiclient: no such name, or choice, is in the API's own description."""
PERMANENT_ERROR = re.compile(
    r"quota limit|quota '[^']*' exhausted|no more capacity|does not have enough resources", re.IGNORECASE
)
"""Messages of a 429, or of a 503 of Compute Engine, that no retry will change. The caller decides what to do."""


BUSY = re.compile(
    r"resource_?not_?ready|is not ready|RESOURCE_OPERATION_RATE_EXCEEDED|unable to queue the operation|"
    r"(other|concurrent|conflicting) operation|operation .*(in progress|under way|currently )",
    re.IGNORECASE,
)
"""In a refusal while another operation on a resource is under way. A canonical status may hide Compute's own code."""
IN_USE = re.compile(r"resource_?in_?use|is already being used by", re.IGNORECASE)
"""In a refusal to delete what something else needs."""
EXISTS = frozenset({"ALREADY_EXISTS", "alreadyExists", "conflict"})
"""Reasons of a 409 to a creation, Cloud Storage's last. Others tell of two changes at the same time."""
RATE_LIMITS = frozenset({
    *("rateLimitExceeded", "userRateLimitExceeded", "RATE_LIMIT_EXCEEDED"),
    *("RESOURCE_OPERATION_RATE_EXCEEDED", "CONCURRENT_OPERATIONS_QUOTA_EXCEEDED"),
})  # fmt: skip
"""Reasons of a limit on requests. Compute Engine sends it as 403: https://cloud.google.com/compute/docs/api-rate-limits."""
RATE_WORDS = re.compile(r"limit '[^']*\bper (minute|\d+ seconds)\b", re.IGNORECASE)
RATE_SECONDS = 60.0
"""When such a limit is lifted: at the next full minute."""
POLICY = re.compile(r"constraints?/[\w.]+|org(anization)?('s)? polic", re.IGNORECASE)
"""In the refusal of an organization policy. Compute Engine and Cloud Storage send it as 412 conditionNotMet."""
POLICY_CURES: Mapping[str, str] = MappingProxyType({
    "compute.vmExternalIpAccess": "set tpu.external_ip=false ssh.method=iap network.laptop=null network.nat=true",
    "compute.restrictCloudNATUsage": "set network.nat=false, or network.name to a network that has a NAT",
    "compute.requireShieldedVm": "set tpu.plane=tpu_api where that has the type",
    "compute.trustedImageProjects": "set tpu.plane=tpu_api where that has the type",
    "compute.disableGuestAttributesAccess": "set ssh.host_keys=trust_on_first_use",
    "gcp.resourceLocations": "set tpu.zone and cloud.bucket_location to allowed ones",
    "iam.disableServiceAccountCreation": "set cloud.service_account to the address of an existing account",
})  # fmt: skip
"""What a user can do about a policy; an exception to it is for the administrators of the organization."""


class GoogleError(CloudError):
    """An HTTP error (400 or above). `reason` is Google's machine-readable code, e.g. RESOURCE_EXHAUSTED."""

    def __init__(self, what: str, status: int, reason: str, message: str, retry_after: float | None = None) -> None:
        self.is_policy = POLICY.search(message) is not None
        if self.is_policy:
            cures = [cure for constraint, cure in POLICY_CURES.items() if constraint in message]
            asked = "ask an administrator of the organization for an exception to this policy"
            message = f"{message.rstrip('. ')}; {', or '.join([*cures, asked])}"
        self.status, self.reason, self.message, self.retry_after = status, reason, message, retry_after
        super().__init__(f"{what}: {status} {reason}: {message}")

    @property
    def is_transient(self) -> bool:
        """Return whether the same request may succeed in a moment."""
        if self.status in (403, 429, 503) and PERMANENT_ERROR.search(self.message):
            return False
        return self.status in RETRIED_STATUSES or self.retry_after is not None

    @property
    def is_busy(self) -> bool:
        """Return whether a resource is half made, half changed or half deleted, by whomever; that takes minutes."""
        return self.reason == "ABORTED" or BUSY.search(str(self)) is not None

    @property
    def is_in_use(self) -> bool:
        """Return whether something else needs what was to be deleted, or did until a moment ago."""
        return IN_USE.search(str(self)) is not None

    @property
    def is_not_now(self) -> bool:
        """Return whether a deletion that is refused so may succeed later: its state, or something else, forbids it.

        A queued resource: `code 9 ... is not supported when state is PROVISIONING`. 409 says no more of a deletion.
        """
        by_state = self.status == 409 or self.reason in {"FAILED_PRECONDITION", "failedPrecondition", *RATE_LIMITS}
        return (by_state or self.is_busy or self.is_in_use) and not self.is_policy

    @property
    def is_gone(self) -> bool:
        """Return whether what was asked for is not there: an operation that deletes it may also fail so.

        https://github.com/hashicorp/terraform-provider-google/issues/8422
        """
        return self.status == 404 or (self.status == 0 and self.reason in ("RESOURCE_NOT_FOUND", "NOT_FOUND"))


class NotFoundError(GoogleError):
    """404: the resource does not exist."""


class ConflictError(GoogleError):
    """409, or 412 to a request with a precondition: the resource exists already, or someone else has changed it."""


class ExistsError(ConflictError):
    """409: what was to be created exists already."""


class ForbiddenError(GoogleError):
    """403: the caller lacks permission."""


class RateLimitError(GoogleError):
    """403 or 429: there were too many requests or operations, and the limit is lifted in about a minute."""

    @property
    def is_transient(self) -> bool:
        return True


class ServiceDisabledError(GoogleError):
    """403: the API `service` is not enabled in the project, or not everywhere yet."""

    @property
    def service(self) -> str:
        found = re.search(r"[\w.-]+\.googleapis\.com", self.message)
        return found[0] if found else "the API"


class NoCredentialsError(ConfigError):
    """No credentials to sign requests with."""


OF_THE_LOGIN = {
    "ACCESS_TOKEN_SCOPE_INSUFFICIENT": "{message} Log in with the scope cloud-platform: `gcloud auth "
    "application-default login`; on a VM, `gcloud compute instances set-service-account VM --scopes=cloud-platform`",
    "USER_PROJECT_DENIED": "{message} Or let your requests count against another project: `gcloud auth "
    "application-default set-quota-project PROJECT`",
}
"""What to do about refusals of the login itself, by Google's reason: every request with it meets them."""


def http_error(what: str, error: Any, *, is_conditional: bool = False) -> GoogleError:
    """Return the exception for an `HttpError` of google-api-python-client.

    Google's reason decides before the status does. Raises NoCredentialsError if the login lacks a scope, or its
    requests count against a project that the caller may not use, or against gcloud's own, where no API can be enabled.

    Args:
        what: the request, for the message.
        error: the `HttpError`; its content may be anything, since proxies and token servers answer too.
        is_conditional: the request had a precondition, such as an etag.
    """
    from http.client import responses  # with ssl; most verbs ask nobody

    status, text = int(error.resp.status), error.content.decode(errors="replace")
    body = _error_of(text)
    details = [
        one
        for part in ("errors", "details")
        if isinstance(body.get(part), list)
        for one in body[part]
        if isinstance(one, dict)
    ]
    reasons = [one["reason"] for one in details if isinstance(one.get("reason"), str)]
    reason = next((name for name in (body.get("status"), *reasons) if name and isinstance(name, str)), "ERROR")
    said = body.get("message")
    message = said.strip() if isinstance(said, str) else ""
    message = message or _plain(text) or error.resp.reason or responses.get(status, "no message")
    if unnamed := {name for name in re.findall(r"constraints/[\w.]+", text) if name not in message}:
        message = f"{message.rstrip('. ')} ({', '.join(sorted(unnamed))})"
    delays = (str(one.get("retryDelay")) for one in details)
    delay = next((float(given[:-1]) for given in delays if re.fullmatch(r"\d+(\.\d+)?s", given)), None)
    retry_after = delay if delay is not None else _seconds(error.resp.get("retry-after", ""))
    if status == 403 and (words := next((OF_THE_LOGIN[one] for one in reasons if one in OF_THE_LOGIN), "")):
        raise NoCredentialsError(f"{what}: {words.format(message=message)}")
    if status == 403 and {"SERVICE_DISABLED", "accessNotConfigured"} & {*reasons}:
        if GCLOUD_PROJECT in text:
            raise NoCredentialsError(NO_QUOTA_PROJECT.format(what))
        return ServiceDisabledError(what, status, reason, message, retry_after)
    if status in (403, 429) and not PERMANENT_ERROR.search(message):
        limit = next((name for name in reversed(reasons) if name in RATE_LIMITS), "")
        if (limit and (status == 403 or limit.isupper())) or RATE_WORDS.search(message):
            return RateLimitError(what, status, limit or "RATE_LIMIT_EXCEEDED", message, retry_after or RATE_SECONDS)
    kinds = {403: ForbiddenError, 404: NotFoundError, 409: ExistsError if reason in EXISTS else ConflictError}
    if is_conditional and not POLICY.search(message):
        kinds[412] = ConflictError
    return kinds.get(status, GoogleError)(what, status, reason, message, retry_after)


def _error_of(text: str) -> dict[str, Any]:
    """Return the fields of an error in any of Google's forms, alone or the first of a batch; none of anything else."""
    try:
        body: Any = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    if isinstance(body, list):
        body = body[0] if body else None
    error: Any = body.get("error") if isinstance(body, dict) else None
    if isinstance(error, str):  # https://www.rfc-editor.org/rfc/rfc6749#section-5.2
        return {"status": error, "message": body.get("error_description") or error}
    return error if isinstance(error, dict) else {}


def _plain(text: str) -> str:
    """Return the beginning of what is no error of Google's, without HTML."""
    words = re.sub(r"(?s)<(head|style|script)\b.*?</\1>|<[^>]*>", " ", text).split()
    return " ".join(words)[:300]


def unlisted(method: str, answer: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a list does not show although it may exist, such as `nodes in us-central1-a`.

    TPU and Cloud Storage name it as https://google.aip.dev/217 says; Compute Engine also warns, for the list or for one
    of its scopes. Only NO_RESULTS_ON_PAGE says that there is nothing.
    """
    *_, collection, verb = method.split(".")
    if not verb.lower().endswith("list"):
        return
    scopes = answer.get("items", {}) if verb == "aggregatedList" else {}
    missing = [*answer.get("unreachable", ()), *answer.get("unreachables", ())]
    missing += [scope for scope, listed in scopes.items() if _hides(listed)]
    if _hides(answer):
        told = [fact["value"] for fact in answer["warning"].get("data", ()) if fact.get("key") == "scope"]
        missing += told or [answer["warning"].get("message", "some places")]
    yield from (f"{collection} in {where.rpartition('/')[2]}" for where in missing)


def _hides(answer: Mapping[str, Any]) -> bool:
    return answer.get("warning", {}).get("code", "NO_RESULTS_ON_PAGE") != "NO_RESULTS_ON_PAGE"


def _seconds(retry_after: str) -> float | None:
    """Parse https://www.rfc-editor.org/rfc/rfc9110#field.retry-after in seconds, the form that Google sends."""
    return float(retry_after) if retry_after.isdigit() else None


@contextmanager
def translate_errors(what: str, *, is_conditional: bool = False) -> Iterator[None]:
    """Turn every failure of a request into one of our exceptions; `is_conditional`: it has a precondition."""
    from http.client import HTTPException

    import httplib2
    from google.auth.exceptions import GoogleAuthError, TransportError
    from googleapiclient.errors import HttpError

    try:
        yield
    except HttpError as error:
        raise http_error(what, error, is_conditional=is_conditional) from None
    except GoogleAuthError as error:
        if isinstance(error, TransportError) or error.retryable:  # the token server was not reached, or is overloaded
            raise GoogleError(what, 503, UNREACHABLE, f"{error}; {CHECK_NETWORK}") from None
        raise NoCredentialsError(f"Google rejected the credentials ({error}); {LOG_IN_AGAIN}") from None
    except (OSError, httplib2.HttpLib2Error, HTTPException) as error:
        raise GoogleError(what, 503, UNREACHABLE, f"{error}; {CHECK_NETWORK}") from None
    except TypeError as error:
        if not REFUSED_BY_LIBRARY.match(str(error)):
            raise
        raise GoogleError(what, 400, "INVALID_ARGUMENT", str(error)) from None  # as the service would answer
    except UnicodeDecodeError as error:
        raise GoogleError(what, 502, UNREACHABLE, f"the answer is not Google's ({error}); {CHECK_NETWORK}") from None
    except AttributeError as error:
        if error.name != "strip":
            raise
        # the library's HttpError reads the message of an error as text, whatever it is
        raise GoogleError(what, 502, "ERROR", "the answer is an error without a text") from None

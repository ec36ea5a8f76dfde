"""Google's errors as exceptions, and what repeats requests that Google refuses for now or that do not reach it."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from controller.core.errors import CloudError, ConfigError
from controller.core.this_process import Clock
from controller.gcp.credentials import GCLOUD_PROJECT, NO_QUOTA_PROJECT

RETRIED_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
UNREACHABLE = "UNREACHABLE"
"""Reason of an error that came from the way to Google, and not from Google."""
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
    "compute.vmExternalIpAccess": "set tpu.external_ip=false and network.nat=true",
    "compute.restrictCloudNATUsage": "set network.nat=false",
    "compute.requireShieldedVm": "set tpu.plane=tpu_api where that has the type",
    "compute.disableGuestAttributesAccess": "set ssh.host_keys=trust_on_first_use",
    "gcp.resourceLocations": "set tpu.zone and cloud.bucket_location to allowed ones",
    "iam.disableServiceAccountCreation": "set cloud.service_account to an existing account",
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

    Google's reason decides before the status does.

    Args:
        what: the request, for the message.
        error: the `HttpError`; its content may be anything, since proxies and token servers answer too.
        is_conditional: the request had a precondition, such as an etag.

    Raises:
        NoCredentialsError: the login lacks a scope, or its requests count against a project that the caller may not
            use, or against gcloud's own, where no API can be enabled.
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


ATTEMPTS = 6
FIRST_ATTEMPTS = 4
"""Attempts of a request while Google has never been reached: a machine without a network is told so in seconds."""
TOLD_SECONDS = 20.0
"""Shortest pause between two attempts that is said."""
OUTAGE_SECONDS = 600.0
"""How long a command that has changed nothing yet waits for the bucket to answer."""
OUTAGE_PAUSE_SECONDS = 5.0
"""Between two tries during an outage; each of them is repeated by the client, too."""
T = TypeVar("T")


def wait_out(clock: Clock, act: Callable[[], T], what: str, tell: Callable[[str], object]) -> T:
    """Call a function until Google no longer answers that it cannot serve the request now, and return its value.

    Args:
        clock: measures the wait.
        act: sends requests, each with its own retries.
        what: what does not answer, for messages.
        tell: called once with a message if there is a wait.

    Raises:
        CloudError: there was no other answer within OUTAGE_SECONDS.
        GoogleError: any other error; also if this machine has no network.
    """
    late, is_told = clock.deadline(OUTAGE_SECONDS), False
    while True:
        try:
            return act()
        except GoogleError as error:
            if not error.is_transient or error.reason == UNREACHABLE:
                raise
            answer, minutes = f"{error.status} {error.reason}", f"{OUTAGE_SECONDS / 60:g} minutes"
            if late():
                raise CloudError(
                    f"{what} has answered only {answer} for {minutes} ({error.message}); nothing was changed. Run the "
                    "same command again when it works: https://status.cloud.google.com"
                ) from error
            if not is_told:
                tell(f"{what} answers {answer}; waiting, for at most {minutes}")
                is_told = True
        clock.sleep(OUTAGE_PAUSE_SECONDS)


def outlast(clock: Clock, act: Callable[[], T], what: str, tell: Callable[[str], object], hours: float) -> T:
    """Call a function while a run goes on until the bucket answers, and return its value.

    The function is called again after a request of it has failed, so it must be safe to repeat.

    Args:
        clock: measures the wait.
        act: sends requests, each with its own retries.
        what: what does not answer, for messages.
        tell: called once with a message if there is a wait.
        hours: `checkpoint.max_outage_hours`, how long the program on the workers bridges the outage.

    Raises:
        CloudError: there was no other answer in that time; while this machine has no network, it is not measured.
        GoogleError: any error that waiting does not mend.
    """
    limit, is_told = OutageLimit(clock, what, hours), False
    while True:
        try:
            return act()
        except GoogleError as error:
            if not error.is_transient:
                raise
            limit.check(error)
            if not is_told:
                tell(f"{what} does not answer ({error.message}); the run goes on, waiting")
                is_told = True
        clock.sleep(OUTAGE_PAUSE_SECONDS)


def retry_for_minutes(clock: Clock, act: Callable[[], T]) -> T:
    """Call a function until the bucket answers, for at most OUTAGE_SECONDS, and return its value.

    For what is recorded after a run has ended: nobody waits for it.

    Raises:
        GoogleError: the last one that came.
    """
    late = clock.deadline(OUTAGE_SECONDS)
    while True:
        try:
            return act()
        except GoogleError as error:
            if not error.is_transient or late():
                raise
        clock.sleep(OUTAGE_PAUSE_SECONDS)


class OutageLimit:
    """How long a controller waits for the bucket while its run goes on."""

    def __init__(self, clock: Clock, what: str, hours: float) -> None:
        """Prepare; the time begins at the first `check`. Arguments as of `outlast`."""
        self._clock, self._what, self._hours = clock, what, max(hours, OUTAGE_SECONDS / 3600)
        self._late: Callable[[], bool] | None = None

    def check(self, error: GoogleError) -> None:
        """Raise CloudError if errors have come for too long; without a network it is this machine that is cut off."""
        if error.reason == UNREACHABLE:
            return
        if self._late is None:
            self._late = self._clock.deadline(3600 * self._hours)
        elif self._late():
            raise CloudError(
                f"{self._what} has not answered for {self._hours:g} h, the limit (checkpoint.max_outage_hours): "
                f"{error.message}. Nothing that was saved is lost; run the same command again when the bucket answers"
            ) from error


class Retries:
    """Repeats the requests of one client; threads may share it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._patience = FIRST_ATTEMPTS
        """Attempts while the network is down: all once Google was reached, one after giving up before that."""
        self.is_hurried = False
        """Whether something billed is being ended: an API that has just failed all attempts gets one a request."""
        self._failed: set[str] = set()
        self.tell: Callable[[str], object] = lambda message: None
        """Called before a pause that a user notices."""

    def call(self, act: Callable[..., Any], *arguments: Any, api: str = "") -> Any:
        """Call a function until it succeeds or fails for good. Raises its last error.

        Args:
            act: sends one request.
            arguments: its arguments.
            api: the API that it is sent to.
        """
        from tenacity import Retrying, retry_if_exception

        retrying = Retrying(
            stop=lambda state: self._has_tried_enough(state, api),
            wait=_backoff_seconds,
            retry=retry_if_exception(lambda e: isinstance(e, GoogleError) and e.is_transient),
            sleep=self._clock.sleep,
            before_sleep=self._say,
            reraise=True,
        )
        try:
            answer = retrying(act, *arguments)
        except GoogleError as error:
            if error.reason != UNREACHABLE:
                self._patience = ATTEMPTS
            elif self._patience < ATTEMPTS:
                self._patience = 1
            if error.is_transient:
                self._failed.add(api)
            raise
        finally:
            retrying.iter_state.reset()  # else its closures and it refer to each other: garbage with every request
        self._patience = ATTEMPTS
        self._failed.discard(api)
        return answer

    def _has_tried_enough(self, state: Any, api: str) -> bool:
        """Return whether a request that failed for now is not sent again."""
        if self.is_hurried and api in self._failed:
            return True
        error = state.outcome.exception()
        if error.reason != UNREACHABLE:
            self._patience = ATTEMPTS
        return state.attempt_number >= self._patience or (error.retry_after or 0.0) > OUTAGE_SECONDS

    def _say(self, state: Any) -> None:
        if (seconds := _backoff_seconds(state)) >= TOLD_SECONDS:
            self.tell(
                f"Google asks to wait, and the request is repeated in {seconds:.0f} s: {state.outcome.exception()}"
            )


def _backoff_seconds(state: Any) -> float:
    """Return Retry-After, else 1, 2, 4 ... seconds. https://cloud.google.com/storage/docs/retry-strategy."""
    error = state.outcome.exception()
    return error.retry_after or min(2.0 ** (state.attempt_number - 1), 30.0)

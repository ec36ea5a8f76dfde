"""Google's errors in all their forms, read by reason before status; no form of an answer is a traceback."""

import json
from typing import Any

import httplib2
import pytest
from google.oauth2.credentials import Credentials
from googleapiclient.errors import HttpError

from controller.checks.account.organization import METHOD, groups_of, is_refused
from controller.core.errors import CloudError
from controller.gcp.client import GoogleClient
from controller.gcp.google_errors import (
    RATE_SECONDS,
    ConflictError,
    ExistsError,
    ForbiddenError,
    GoogleError,
    NotFoundError,
    RateLimitError,
    http_error,
    unlisted,
)
from controller.gcp.outages import ATTEMPTS, OUTAGE_SECONDS, Retries
from controller.resources.pod.refusals import RULES_OUT_PLACE, classify
from tests.controller.resources.conftest import EmulatedProject
from tests.fakes.clock import ManualClock

INFO, RETRY = "type.googleapis.com/google.rpc.ErrorInfo", "type.googleapis.com/google.rpc.RetryInfo"


def read(status: int, content: Any, *, is_conditional: bool = False, **headers: str) -> GoogleError:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    response = httplib2.Response({"status": str(status), **headers})
    response.reason = "Said By HTTP"
    return http_error("compute x.insert", HttpError(response, text), is_conditional=is_conditional)


def older(code: int, message: str, reason: str, *details: dict[str, Any], **more: Any) -> dict[str, Any]:
    """What Compute Engine and Cloud Storage send."""
    errors = [{"message": message, "domain": "global", "reason": reason}]
    body = {"code": code, "message": message, "errors": errors, **more}
    return {"error": body | ({"details": details} if details else {})}


def newer(status: int, message: str, canonical: str, *details: dict[str, Any]) -> dict[str, Any]:
    return {"error": {"code": status, "message": message, "status": canonical, "details": details}}


EXTERNAL = "Constraint constraints/compute.vmExternalIpAccess violated for project 1. Add instance i to the constraint"
NAT = "Constraint constraints/compute.restrictCloudNATUsage violated for projects/p. subnetworks/s is not allowed"
SHIELDED = (
    "Constraint constraints/compute.requireShieldedVm violated for project projects/p. Secure Boot is not enabled"
)
PLACE = "'us' violates constraint 'constraints/gcp.resourceLocations'"
CUSTOM = 'Operation denied by custom org policy on resource: ["customConstraints/custom.noTpu"]'
NO_ACCOUNT = {
    "@type": "type.googleapis.com/google.rpc.PreconditionFailure",
    "violations": [{"type": "constraints/iam.disableServiceAccountCreation", "subject": "projects/p"}],
}


@pytest.mark.parametrize("is_conditional", [False, True])
@pytest.mark.parametrize(
    ("status", "content", "words"),
    [
        (412, older(412, EXTERNAL, "conditionNotMet"), "tpu.external_ip=false"),
        (412, older(412, NAT, "conditionNotMet"), "network.nat=false"),
        (412, older(412, PLACE, "conditionNotMet", locationType="header"), "tpu.zone"),
        (412, older(412, SHIELDED, "conditionNotMet"), "requireShieldedVm"),
        (412, older(412, CUSTOM, "conditionNotMet"), "custom.noTpu"),
        (
            400,
            newer(400, "Account creation is not allowed.", "FAILED_PRECONDITION", NO_ACCOUNT),
            "cloud.service_account",
        ),
        (403, newer(403, "Request is disallowed by organization's policy", "PERMISSION_DENIED"), "administrator"),
    ],
)
def test_an_organization_policy_is_a_refusal_in_googles_words_with_a_cure(
    status: int, content: Any, words: str, is_conditional: bool
) -> None:
    """Also of a request with a precondition: a policy may forbid to change metadata as well."""
    error = read(status, content, is_conditional=is_conditional)
    assert error.is_policy
    assert not isinstance(error, ConflictError)
    assert not error.is_transient
    assert content["error"]["message"].rstrip(".") in error.message
    assert words in error.message
    assert "for an exception" in error.message
    assert classify(error.reason, error.message) == "policy" in RULES_OUT_PLACE


@pytest.mark.parametrize(
    ("status", "content", "is_conditional", "kind"),
    [
        (412, older(412, "At least one of the pre-conditions did not hold.", "conditionNotMet"), True, ConflictError),
        (412, older(412, "Supplied fingerprint does not match", "conditionNotMet"), True, ConflictError),
        (412, older(412, "The zone is not ready for this", "conditionNotMet"), False, GoogleError),
        (412, b"", False, GoogleError),
        (409, older(409, "The resource 'x' already exists", "alreadyExists"), False, ExistsError),
        (409, older(409, "you already own it.", "conflict"), False, ExistsError),
        (409, newer(409, "Resource 'x' already exists", "ALREADY_EXISTS"), False, ExistsError),
        (409, newer(409, "There were concurrent policy changes.", "ABORTED"), True, ConflictError),
        (409, older(409, "an operation is in progress", "operationInProgress"), False, ConflictError),
        (404, older(404, "no such x", "notFound"), True, NotFoundError),
    ],
)
def test_only_what_says_so_exists_or_was_changed_by_somebody_else(
    status: int, content: Any, is_conditional: bool, kind: type[GoogleError]
) -> None:
    assert type(read(status, content, is_conditional=is_conditional)) is kind


TOO_OFTEN = {"@type": INFO, "reason": "RESOURCE_OPERATION_RATE_EXCEEDED"}
CONCURRENT = {"@type": INFO, "reason": "CONCURRENT_OPERATIONS_QUOTA_EXCEEDED", "domain": "compute.googleapis.com"}
PER_MINUTE = {"@type": INFO, "reason": "RATE_LIMIT_EXCEEDED", "metadata": {"quota_unit": "1/min/{project}"}}
READS = "Quota exceeded for quota metric 'Read requests' and limit 'Read requests per minute' of service 'x'"
OFTEN = "Operation rate exceeded for resource 'x'. Too frequent operations from the source resource."


@pytest.mark.parametrize(
    ("status", "content", "seconds"),
    [
        (403, older(403, "Rate Limit Exceeded", "rateLimitExceeded"), RATE_SECONDS),
        (403, older(403, "Rate Limit Exceeded", "rateLimitExceeded", status="PERMISSION_DENIED"), RATE_SECONDS),
        (403, older(403, "User Rate Limit Exceeded", "userRateLimitExceeded"), RATE_SECONDS),
        (403, older(403, OFTEN, "rateLimitExceeded", TOO_OFTEN), RATE_SECONDS),
        (403, older(403, OFTEN, "RESOURCE_OPERATION_RATE_EXCEEDED"), RATE_SECONDS),
        (403, older(403, "Rate Limit Exceeded", "rateLimitExceeded", CONCURRENT), RATE_SECONDS),
        (403, older(403, READS, "forbidden"), RATE_SECONDS),
        (403, older(403, READS.replace("minute", "100 seconds"), "other"), RATE_SECONDS),
        (429, newer(429, READS, "RESOURCE_EXHAUSTED", PER_MINUTE), RATE_SECONDS),
        (429, newer(429, READS, "RESOURCE_EXHAUSTED", PER_MINUTE, {"@type": RETRY, "retryDelay": "26.5s"}), 26.5),
        (403, [older(403, "Rate Limit Exceeded", "rateLimitExceeded")], RATE_SECONDS),
    ],
)  # fmt: skip
def test_a_rate_limit_is_waited_for_and_is_never_a_lack_of_permission(
    status: int, content: Any, seconds: float
) -> None:
    error, clock = read(status, content), ManualClock()
    assert type(error) is RateLimitError
    assert classify(error.reason, error.message) == "stock_out"  # of requests: it ends no search
    told: list[str] = []
    answers: list[Any] = [error, error, {"name": "x"}]

    def act() -> Any:
        answer = answers.pop(0)
        if isinstance(answer, GoogleError):
            raise answer
        return answer

    retries = Retries(clock)
    retries.tell = told.append
    assert retries.call(act) == {"name": "x"}
    assert clock.sleeps == [seconds] * 2
    assert [line for line in told if error.message in line] == told != []


@pytest.mark.parametrize(
    ("status", "content", "kind"),
    [
        (403, older(403, "Required 'compute.x' permission for 'y'", "forbidden"), ForbiddenError),
        (403, older(403, "Quota 'CPUS' exceeded.  Limit: 8.0 in region r.", "quotaExceeded"), ForbiddenError),
        (429, newer(429, "Quota limit 'TPUV4' has been exceeded.", "RESOURCE_EXHAUSTED", PER_MINUTE), GoogleError),
        (429, newer(429, "There is no more capacity in the zone", "RESOURCE_EXHAUSTED"), GoogleError),
    ],
)  # fmt: skip
def test_what_no_minute_lifts_is_no_rate_limit(status: int, content: Any, kind: type[GoogleError]) -> None:
    error = read(status, content)
    assert type(error) is kind
    assert not error.is_transient


def test_one_write_per_second_of_an_object_is_repeated_after_a_second() -> None:
    error, clock = read(429, older(429, "The object exceeded the rate limit", "rateLimitExceeded")), ManualClock()

    def act() -> Any:
        raise error

    with pytest.raises(GoogleError):
        Retries(clock).call(act)
    assert clock.sleeps[:3] == [1.0, 2.0, 4.0]


@pytest.mark.parametrize(("delay", "tries"), [("30s", ATTEMPTS), (f"{OUTAGE_SECONDS + 1:.0f}s", 1)])
def test_retry_info_of_any_error_is_obeyed_unless_it_asks_for_too_long(delay: str, tries: int) -> None:
    error, clock = read(409, newer(409, "busy", "ABORTED", {"@type": RETRY, "retryDelay": delay})), ManualClock()
    seen: list[float] = []

    def act() -> Any:
        seen.append(clock.elapsed)
        raise error

    with pytest.raises(ConflictError):
        Retries(clock).call(act)
    assert seen == [30.0 * n for n in range(tries)]


HTML = b"<!DOCTYPE html><html><head><title>x</title></head><style>p{}</style><p>502. <b>That's an error.</b></html>"
ODD: dict[str, tuple[Any, str, str]] = {
    "a string": ({"error": "quota"}, "quota", "quota"),
    "OAuth": ({"error": "invalid_grant", "error_description": "Bad Request"}, "invalid_grant", "Bad Request"),
    "HTML": (HTML, "ERROR", "502. That's an error."),
    "text": (b"upstream connect error", "ERROR", "upstream connect error"),
    "nothing": (b"", "ERROR", "Said By HTTP"),
    "no UTF-8": (b"\xff\xfe", "ERROR", "\ufffd\ufffd"),
    "a batch": ([older(400, "the first", "invalid"), older(400, "the second", "x")], "invalid", "the first"),
    "an empty list": ([], "ERROR", "[]"),
    "a list of strings": (["no"], "ERROR", '["no"]'),
    "a number": (5, "ERROR", "5"),
    "null": (None, "ERROR", "null"),
    "error null": ({"error": None}, "ERROR", '{"error": null}'),
    "error a list": ({"error": ["x"]}, "ERROR", '{"error": ["x"]}'),
    "no message": ({"error": {"code": 400}}, "ERROR", '{"error": {"code": 400}}'),
    "message null": ({"error": {"message": None, "status": 7}}, "ERROR", '{"error": {"message": null, "status": 7}}'),
    "errors of strings": ({"error": {"message": "m", "errors": ["a"], "details": "b"}}, "ERROR", "m"),
    "odd reasons": ({"error": {"message": "m", "errors": [{"reason": 5}], "details": [{"reason": {}}]}}, "ERROR", "m"),
    "an odd delay": ({"error": {"message": "m", "details": [{"retryDelay": 5}, {"retryDelay": "soon"}]}}, "ERROR", "m"),
    "XML": (b"<?xml version='1.0'?><Error><Code>No</Code><Message>why</Message></Error>", "ERROR", "No why"),
}


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 412, 500, 503])
@pytest.mark.parametrize("form", ODD)
def test_a_body_of_any_form_is_a_message(form: str, status: int) -> None:
    content, reason, message = ODD[form]
    error = read(status, content)
    assert (error.status, error.reason, error.message) == (status, reason, message)
    assert str(error) == f"compute x.insert: {status} {reason}: {message}"


class Answering:
    """A connection on which every request gets this answer."""

    def __init__(self, status: int, content: bytes) -> None:
        self.answer = httplib2.Response({"status": str(status), "content-type": "text/html"}), content

    def request(self, *_: Any, **__: Any) -> tuple[httplib2.Response, bytes]:
        return self.answer


@pytest.mark.parametrize(
    ("status", "content", "words"),
    [
        (200, b"<html>Log in to the hotel's network</html>", "the answer is not Google's"),
        (200, b"\xff\xfe\xfd", "the answer is not Google's"),
        (400, b'{"error": {"message": {"text": "no"}}}', "an error without a text"),
        (400, b'{"error": {"message": 5}}', "an error without a text"),
        (407, b"<html>Proxy Authentication Required</html>", "Proxy Authentication Required"),
    ],
)
def test_an_answer_that_is_not_googles_is_said(status: int, content: bytes, words: str) -> None:
    client = GoogleClient(Credentials(token="x"), ManualClock())
    client.wrap_connection = lambda http, method: Answering(status, content)
    with pytest.raises(GoogleError, match=words):
        client.call("compute", "networks.get", project="p", network="n")


POLICIES = {
    "compute.restrictCloudNATUsage": "network.nat=false",
    "gcp.resourceLocations": "cloud.bucket_location",
    "iam.disableServiceAccountCreation": "cloud.service_account",
}


def shown_policy(project: EmulatedProject, constraint: str) -> dict[str, Any]:
    asked = {"resource": "projects/slipway-local", "body": {"constraint": f"constraints/{constraint}"}}
    return project.context.google.call("cloudresourcemanager", METHOD, **asked)


@pytest.mark.parametrize("constraint", POLICIES)
def test_up_stops_at_a_policy_with_its_name_and_a_cure(project: EmulatedProject, constraint: str) -> None:
    project.inject_fault(kind="policy", constraint=constraint, location="europe-west4")
    assert is_refused(shown_policy(project, constraint), groups_of("us-central1"))
    with pytest.raises(CloudError, match=f"constraints/{constraint}.*{POLICIES[constraint]}"):
        project.create_shared("tpu.external_ip=false", "network.nat=true")


VM = {
    "name": "bastion",
    "machineType": "projects/slipway-local/zones/us-central1-a/machineTypes/e2-small",
    "networkInterfaces": [{"network": "projects/slipway-local/global/networks/default", "accessConfigs": [{}]}],
}


@pytest.mark.parametrize("constraint", ["compute.vmExternalIpAccess", "compute.requireShieldedVm"])
def test_the_emulated_cloud_refuses_a_vm_as_compute_engine_does(project: EmulatedProject, constraint: str) -> None:
    assert not is_refused(shown_policy(project, constraint), frozenset())
    project.inject_fault(kind="policy", constraint=constraint)
    assert is_refused(shown_policy(project, constraint), frozenset())
    where = {"project": "slipway-local", "zone": "us-central1-a"}
    with pytest.raises(GoogleError, match=f"412 .*constraints/{constraint} violated") as caught:
        project.context.google.call("compute", "instances.insert", **where, body=VM)
    assert not isinstance(caught.value, ConflictError)


@pytest.mark.parametrize("form", ["project", "user", "resource", "operations", "retry_info"])
def test_up_waits_for_every_rate_limit(project: EmulatedProject, form: str) -> None:
    """Of reads and writes of every API, and takes none of them for a lack of permission."""
    made = project.context
    made.google.tell_waits(project.notes.append)
    for match in ("GET .*services:batchGet", "GET .*/b/", "POST .*/networks$", "POST .*setIamPolicy", "GET .*routers"):
        project.inject_fault(kind="rate_limit", form=form, match=match, times=2)
    project.create_shared()
    assert project.planned_actions() == {}
    seconds = 17.5 if form == "retry_info" else RATE_SECONDS
    assert project.clock.sleeps.count(seconds) >= 8
    assert [note for note in project.notes if "may not" in note or "cannot see" in note] == []
    assert [note for note in project.notes if "the request is repeated in" in note] != [] or seconds < 20


@pytest.mark.parametrize("body", ["", "<html><h1>Precondition Failed</h1></html>", '{"error": "no"}'])
def test_up_stops_at_a_412_of_any_form(project: EmulatedProject, body: str) -> None:
    """It is nobody's change and no existing thing where no precondition was sent."""
    project.inject_fault(kind="http", status=412, match="POST .*/networks$", body=body)
    with pytest.raises(CloudError, match=r"compute networks\.insert: 412"):
        project.create_shared()


@pytest.mark.parametrize("how", [{"kind": "cut", "at": "answer"}, {"kind": "rate_limit", "form": "operations"}])
def test_a_policy_that_was_written_although_its_answer_was_lost_is_written_once(
    project: EmulatedProject, how: dict[str, Any]
) -> None:
    project.inject_fault(**how, match="[:/](setIamPolicy|iam)$", times=3)
    project.create_shared()
    assert project.planned_actions() == {}


NOT_NOW = "DeleteQueuedResource is not supported when state is {} (must be one of [ACCEPTED WAITING_FOR_RESOURCES])"


@pytest.mark.parametrize(
    ("status", "reason", "message", "busy", "not_now"),
    [
        # https://github.com/googleapis/google-api-python-client/issues/485
        (400, "resourceNotReady", "The resource 'projects/p/zones/z/instances/pod' is not ready", True, True),
        (400, "INVALID_ARGUMENT", "The resource 'projects/p/global/networks/n' is not ready", True, True),
        (409, "ABORTED", "unable to queue the operation", True, True),
        (409, "ERROR", "Unable to queue the operation", True, True),
        (403, "RESOURCE_OPERATION_RATE_EXCEEDED", "too many operations on one resource", True, True),
        (400, "FAILED_PRECONDITION", NOT_NOW.format("PROVISIONING"), False, True),
        (400, "failedPrecondition", "Operation operation-1 is currently deleting a node pool", True, True),
        (0, "FAILED_PRECONDITION", NOT_NOW.format("SUSPENDING"), False, True),
        (400, "resourceInUseByAnotherResource", "The disk is already being used by 'x'", False, True),
        (400, "INVALID_ARGUMENT", "no such field", False, False),
        (403, "PERMISSION_DENIED", "Permission 'tpu.nodes.delete' denied", False, False),
        (412, "conditionNotMet", "Constraint constraints/x violated", False, False),
        (400, "FAILED_PRECONDITION", "Request violates constraint constraints/x", False, False),
        (403, "rateLimitExceeded", "Rate Limit Exceeded", False, True),
        (503, "UNAVAILABLE", "The service is currently unavailable.", False, False),
    ],
)
def test_a_deletion_is_tried_again_if_only_the_moment_is_wrong(
    status: int, reason: str, message: str, busy: bool, not_now: bool
) -> None:
    error = GoogleError("x.delete", status, reason, message)
    assert (error.is_busy, error.is_not_now, error.is_gone) == (busy, not_now, False)


@pytest.mark.parametrize(
    ("status", "reason", "gone"),
    [(404, "notFound", True), (0, "RESOURCE_NOT_FOUND", True), (0, "NOT_FOUND", True), (400, "NOT_FOUND", False)],
)
def test_a_deletion_whose_operation_finds_nothing_is_done(status: int, reason: str, gone: bool) -> None:
    assert GoogleError("compute delete", status, reason, "it was not found").is_gone == gone


def warning(code: str, *scopes: str, message: str = "") -> dict[str, Any]:
    data = [{"key": "scope", "value": scope} for scope in scopes]
    return {"warning": {"code": code, "message": message, **({"data": data} if data else {})}}


EMPTY = warning("NO_RESULTS_ON_PAGE", "zones/a-b-c")


@pytest.mark.parametrize(
    ("method", "answer", "missing"),
    [
        ("projects.locations.nodes.list", {"unreachable": ["projects/p/locations/a-b-c"]}, ["nodes in a-b-c"]),
        ("projects.locations.queuedResources.list", {"queuedResources": [{}], "unreachable": ["a-b-c", "d-e-f"]},
         ["queuedResources in a-b-c", "queuedResources in d-e-f"]),
        ("instances.aggregatedList", {"items": {"zones/a-b-c": {"instances": [{}]}}}, []),
        ("instances.aggregatedList", {"items": {"zones/a-b-c": EMPTY}}, []),
        ("instances.aggregatedList", {"items": {"zones/a-b-c": EMPTY, "zones/d-e-f": warning("UNREACHABLE")}},
         ["instances in d-e-f"]),
        ("routers.aggregatedList", {"items": {"regions/a-b": warning("A_CODE_OF_NEXT_YEAR")}}, ["routers in a-b"]),
        ("disks.aggregatedList", {"unreachables": ["projects/1/zones/a-b-c"], "items": {}}, ["disks in a-b-c"]),
        ("resourcePolicies.list", warning("PARTIAL_SUCCESS", message="some results may be missing"),
         ["resourcePolicies in some results may be missing"]),
        ("instances.list", warning("UNREACHABLE", "zones/a-b-c"), ["instances in a-b-c"]),
        ("instances.list", {**warning("NO_RESULTS_ON_PAGE"), "items": [{"warning": {"code": "UNREACHABLE"}}]}, []),
        ("buckets.list", {"unreachable": ["projects/_/buckets/far"]}, ["buckets in far"]),
        ("instances.get", {"warning": {"code": "UNREACHABLE"}, "items": {}}, []),
    ],
)  # fmt: skip
def test_what_a_list_could_not_show_has_a_name(method: str, answer: dict[str, Any], missing: list[str]) -> None:
    assert list(unlisted(method, answer)) == missing

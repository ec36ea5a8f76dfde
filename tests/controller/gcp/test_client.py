"""What Google refuses for now, or has not answered, is asked for again. Operations, and credential files."""

import json
from collections.abc import Callable
from http.client import IncompleteRead
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from google.auth.compute_engine import Credentials as ComputeCredentials
from google.auth.credentials import Credentials
from google.auth.exceptions import RefreshError, TransportError
from googleapiclient import discovery

from controller.core.errors import CloudError, ConfigError, LeaseLostError
from controller.gcp import credentials
from controller.gcp.answers import OperationFailedError, code_name, poll_compute, wait_compute, wait_rpc
from controller.gcp.client import GoogleClient
from controller.gcp.credentials import SCOPES, absent_file, application_default_credentials, default_project
from controller.gcp.google_errors import UNREACHABLE, ConflictError, GoogleError, NoCredentialsError
from controller.gcp.outages import ATTEMPTS
from controller.lease_store import BucketLeaseStore, Identity
from controller.records.index import publish_row, row_generation
from controller.records.ledger import Ledger
from tests.controller.localcloud.harness import COMPUTE
from tests.controller.resources.conftest import EmulatedProject
from tests.fakes.clock import ManualClock


def test_retry_after_is_kept_to(project: EmulatedProject) -> None:
    network = f"/{COMPUTE}/global/networks"
    project.inject_fault(kind="http", status=429, match=f"GET {network}/{project.tag}$", times=2, retry_after=17)
    project.inject_fault(kind="http", status=503, match=f"POST {network}$", times=1, retry_after=23)
    project.create_shared()
    assert project.planned_actions() == {}
    assert [s for s in project.clock.sleeps if s > 1] == [17.0, 17.0, 23.0]


def test_a_request_that_was_carried_out_although_503_was_answered_is_no_error(project: EmulatedProject) -> None:
    """The network is there when it is sent again: 409, and the next look finds it as wanted."""
    project.cloud.call_and_wait(
        "POST", f"{COMPUTE}/global/networks", {"name": project.tag, "autoCreateSubnetworks": False}
    )
    project.inject_fault(kind="http", status=404, match=f"GET /{COMPUTE}/global/networks/{project.tag}$")
    project.create_shared()
    assert project.planned_actions() == {}


def test_a_name_that_the_description_of_an_api_refuses_is_an_answer(project: EmulatedProject) -> None:
    with pytest.raises(
        GoogleError, match=r'machineTypes.get: 400 INVALID_ARGUMENT: Parameter "machineType" value "E2_"'
    ):
        project.context.google.call("compute", "machineTypes.get", project="p", zone="z", machineType="E2_")


def test_without_it_the_pauses_double_and_it_gives_up_in_the_end(project: EmulatedProject) -> None:
    project.inject_fault(kind="http", status=503, match=f"GET /{COMPUTE}/global/networks/{project.tag}$", times=99)
    with pytest.raises(GoogleError, match=r"compute networks.get: 503"):
        project.create_shared()
    pauses = [s for s in project.clock.sleeps if s >= 1]
    assert (pauses[:4], len(pauses)) == ([1.0, 2.0, 4.0, 8.0], ATTEMPTS - 1)


def test_the_lease_is_confirmed_before_every_try_of_a_change_to_a_pod(project: EmulatedProject) -> None:
    """Not once before the first one: a controller that was paused meanwhile would create a VM that nobody wants."""
    instances = f"{COMPUTE}/zones/us-central1-a/instances"
    project.inject_fault(kind="http", status=503, match=f"POST /{instances}$", times=1)
    confirmed: list[str] = []

    def confirm() -> None:
        confirmed.append("asked")
        if len(confirmed) == 2:
            raise LeaseLostError("anna@host took over")

    google = project.context.google
    google.before_pod_write = confirm
    with pytest.raises(LeaseLostError):
        google.change_pod(
            "compute", "instances.insert", project=project.context.project, zone="us-central1-a", body={"name": "pod"}
        )
    posts = [r for r in project.cloud.request_log() if (r["method"], r["path"]) == ("POST", f"/{instances}")]
    assert [r["status"] for r in posts] == [503]


LOST = {"kind": "cut", "at": "answer", "match": "POST /upload/"}


def test_a_conditional_write_whose_answer_was_lost_is_known_again(project: EmulatedProject) -> None:
    google, bucket, clock = project.context.google, f"{project.tag}-lost", project.clock
    google.call("storage", "buckets.insert", project="slipway-local", body={"name": bucket, "location": "us-central1"})
    project.inject_fault(**LOST)
    made = google.upload(bucket, "a", b"1", generation=0, metadata={"of": "me"})
    assert (made["name"], made["metadata"]["of"]) == ("a", "me")
    with pytest.raises(ConflictError):
        google.upload(bucket, "a", b"1", generation=0)  # the same content, and another writer
    project.inject_fault(**LOST)
    later = google.upload(bucket, "a", b"2", generation=int(made["generation"]))
    assert int(later["generation"]) > int(made["generation"])
    assert google.download(bucket, "a") == b"2"
    project.inject_fault(**LOST)
    assert Ledger(google, bucket, "run-00000000").create("launches/0001.json", "{}")
    project.inject_fault(**LOST)
    lease = BucketLeaseStore(google, bucket, "pod")
    record = Identity("laptop", "run").new_record(1, clock.now(), 60.0)
    generation = lease.write(record, 0)
    project.inject_fault(**LOST)
    assert lease.write(record, generation) > generation
    row: Any = {"run": "run-00000000"}
    publish_row(google, bucket, row)
    project.inject_fault(**LOST)
    publish_row(google, bucket, row, row_generation(google, bucket, "run-00000000"))
    google.call("storage", "objects.delete", bucket=bucket, object="a")
    for content, is_ours in ((b"3", True), (b"4", False)):
        project.inject_fault(**LOST, times=99)  # every try arrives, and no answer; httplib2 tries twice
        with pytest.raises(GoogleError, match=UNREACHABLE):
            google.upload(bucket, content.decode(), content, generation=0)
        project.cloud.call_ok("DELETE", "emulator/faults")
        if is_ours:
            google.upload(bucket, content.decode(), content, generation=0)  # as an outage is outlasted
        else:
            with pytest.raises(ConflictError):
                google.upload(bucket, content.decode(), b"another", generation=0)


@pytest.mark.parametrize("status", [400, 403])
def test_a_final_refusal_is_not_asked_again(project: EmulatedProject, status: int) -> None:
    project.inject_fault(kind="http", status=status, match=f"POST /{COMPUTE}/global/networks$", message="not so")
    with pytest.raises(CloudError, match="not so"):
        project.create_shared()
    posts = [
        r for r in project.cloud.request_log() if r["path"] == f"/{COMPUTE}/global/networks" and r["status"] == status
    ]
    assert len(posts) == 1


class Offline(Credentials):
    """Credentials whose token server answers with these errors first."""

    def __init__(self, *errors: Exception) -> None:
        super().__init__()
        self.errors = [*errors]

    def refresh(self, request: object) -> None:
        if self.errors:
            raise self.errors.pop(0)
        self.token = "fresh"


@pytest.mark.parametrize(
    "error", [TransportError("no route"), RefreshError("overloaded", retryable=True), IncompleteRead(b"")]
)
def test_a_token_server_that_cannot_be_reached_is_asked_again(project: EmulatedProject, error: Exception) -> None:
    """A laptop that has just woken up has an old token and no network."""
    assert GoogleClient(Offline(error, error), project.clock).token() == "fresh"
    assert project.clock.sleeps[-2:] == [1.0, 2.0]
    with pytest.raises(GoogleError, match=r"access token: 503 UNREACHABLE.*check the network") as caught:
        GoogleClient(Offline(*[error] * ATTEMPTS), project.clock).token()
    assert caught.value.is_transient


def test_a_machine_without_a_network_is_told_in_seconds_and_an_outage_is_waited_for(project: EmulatedProject) -> None:
    """A plan sends three requests in a row before it ends; once Google was reached, a run must survive an outage."""
    credentials, clock = Offline(*[TransportError("no route")] * 99), project.clock
    client = GoogleClient(credentials, clock)
    for _ in range(3):
        with pytest.raises(GoogleError, match="no route; Google cannot be reached: check the network"):
            client.token()
    assert clock.sleeps == [1.0, 2.0, 4.0]
    credentials.errors, clock.sleeps[:] = [], []
    assert client.token() == "fresh"
    credentials.errors, credentials.token = [TransportError("no route")] * (ATTEMPTS - 1), None
    assert client.token() == "fresh"
    assert clock.sleeps == [1.0, 2.0, 4.0, 8.0, 16.0]


def test_credentials_that_google_rejects_end_at_once(project: EmulatedProject) -> None:
    rejected = RefreshError("invalid_grant: Token has been expired or revoked.")
    with pytest.raises(NoCredentialsError, match=r"rejected the credentials \(invalid_grant.*log in again"):
        GoogleClient(Offline(rejected), project.clock).token()
    assert project.clock.sleeps == []


def test_credentials_without_a_quota_project_are_no_disabled_api(project: EmulatedProject) -> None:
    """The answer of real APIs to a user whose requests count against gcloud's own project."""
    message = "OS Login API has not been used in project 764086051850 before or it is disabled."
    project.inject_fault(
        kind="http", status=403, match=f"GET /{COMPUTE}/global/networks", message=message, reason="accessNotConfigured"
    )
    with pytest.raises(NoCredentialsError, match="auth application-default set-quota-project"):
        project.create_shared()


def test_the_wait_for_an_operation_has_longer_than_google_takes_to_answer(project: EmulatedProject) -> None:
    """Compute Engine answers `wait` after up to two minutes; every other request keeps its short timeout."""
    timeouts: dict[str, float] = {}

    def seen(http: Any, method_id: str) -> Any:
        timeouts[method_id] = http.http.timeout
        return http

    project.context.google.wrap_connection = seen
    project.create_shared()
    assert timeouts["compute.networks.insert"] == 60
    assert timeouts["compute.globalOperations.wait"] == timeouts["compute.regionOperations.wait"] == 150


def test_a_method_is_built_once_and_no_other(project: EmulatedProject, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library would build the 60 methods of `projects.locations` and its children for every single request."""
    built: list[str] = []
    really = discovery.createMethod

    def create_method(name: str, *rest: Any) -> Any:
        built.append(name)
        return really(name, *rest)

    monkeypatch.setattr(discovery, "createMethod", create_method)
    parent = "projects/slipway-local/locations/us-central2-b"
    for _ in range(2):
        project.context.google.call("tpu", "projects.locations.nodes.list", parent=parent)
    assert built == ["list"]


@pytest.mark.parametrize(
    ("status", "message", "transient"),
    [
        (503, "The zone 'projects/p1/zones/z' does not have enough resources available to fulfill the request.", False),
        (503, "The service is currently unavailable.", True),
        (429, "There is no more capacity in the zone", False),
        (429, "Too many requests per minute", True),
    ],
)
def test_a_zone_without_capacity_is_not_asked_again(status: int, message: str, transient: bool) -> None:
    assert GoogleError("instances.insert", status, "UNAVAILABLE", message).is_transient is transient


@pytest.mark.parametrize(
    ("status", "name"),
    [
        ({"code": 8, "message": "no capacity"}, "RESOURCE_EXHAUSTED"),
        ({"code": 13}, "INTERNAL"),
        ({"message": "no code"}, "UNKNOWN"),
        ({"code": 4711}, "UNKNOWN"),
    ],
)
def test_a_status_has_the_name_of_its_code(status: dict[str, object], name: str) -> None:
    assert code_name(status) == name


def test_a_poll_asks_google_once_each_time_and_does_not_wait() -> None:
    asked: list[dict[str, Any]] = []
    answers = iter([{"status": "RUNNING"}, {"status": "DONE", "error": {"errors": [{"code": "STOCKOUT"}]}}])

    def call(api: str, method: str, **where: Any) -> dict[str, Any]:
        asked.append({"method": method, **where})
        return {"name": "op", **next(answers)}

    caller: Any = SimpleNamespace(google=SimpleNamespace(call=call), project="p", clock=ManualClock())
    is_done = poll_compute(caller, {"name": "op", "zone": "https://x/zones/a-b-c", "status": "PENDING"}, 60.0)
    assert [is_done(), is_done()] == [False, False]  # the first answer is that of the request itself
    with pytest.raises(OperationFailedError) as refused:
        is_done()
    assert refused.value.reason == "STOCKOUT"
    assert asked == [{"method": "zoneOperations.get", "project": "p", "operation": "op", "zone": "a-b-c"}] * 2


def poll(caller: Any, operation: dict[str, Any], seconds: float) -> None:
    is_done = poll_compute(caller, operation, seconds)
    while not is_done():
        caller.clock.sleep(60.0)


def wait_rpc_for(caller: Any, operation: dict[str, Any], seconds: float | None = None) -> None:
    wait_rpc(caller, "tpu", operation, "projects.locations.operations.get", seconds)


@pytest.mark.parametrize("seconds", [1140.0, 1200.0, 1260.0, None])
@pytest.mark.parametrize("wait", [poll, wait_compute, wait_rpc_for])
def test_no_operation_is_waited_for_for_ever(wait: Callable[..., object], seconds: float | None) -> None:
    """A limit that the config sets is always named, also where it is as long as that of any other operation."""
    if wait is poll and seconds is None:
        return
    clock = ManualClock()

    def call(api: str, method: str, **where: Any) -> dict[str, Any]:
        clock.elapsed += 60.0  # `operations.wait` returns before the operation is done
        return {"name": "op", "status": "RUNNING"}

    caller: Any = SimpleNamespace(google=SimpleNamespace(call=call), project="p", clock=clock, poll_seconds=60.0)
    hint = "" if seconds is None else "; if it needs more time, raise tpu.create_timeout_minutes"
    with pytest.raises(OperationFailedError, match=rf"not done after {seconds or 2400:.0f} s{hint}$") as late:
        wait(caller, {"name": "op", "status": "RUNNING"}, *([] if seconds is None else [seconds]))
    assert (late.value.reason, clock.elapsed) == ("DEADLINE_EXCEEDED", pytest.approx((seconds or 2400) + 60, abs=60))


@pytest.mark.parametrize("more", [{}, {"done": True}, {"done": True, "response": {}}])
def test_an_operation_that_had_nothing_to_do_is_not_asked_for(more: dict[str, Any]) -> None:
    def call(api: str, method: str, **where: Any) -> dict[str, Any]:
        raise AssertionError("Google has no such operation")

    caller: Any = SimpleNamespace(google=SimpleNamespace(call=call), clock=ManualClock(), poll_seconds=1.0)
    operation = {"name": "operations/noop.DONE_OPERATION", **more}
    assert wait_rpc(caller, "serviceusage", operation, "operations.get") == {}


USER = {"type": "authorized_user", "client_id": "id", "client_secret": "secret", "refresh_token": "token"}


def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: dict[str, Any], project: str | None) -> Any:
    (file := tmp_path / "adc.json").write_text(json.dumps(content))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    return application_default_credentials(project)


@pytest.mark.parametrize(
    ("stored", "project", "expected"), [(None, "p1", "p1"), ("other", "p1", "other"), (None, None, None)]
)
def test_a_user_has_a_quota_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: str | None, project: str | None, expected: str | None
) -> None:
    content = USER | ({"quota_project_id": stored} if stored else {})
    loaded = load(tmp_path, monkeypatch, content, project)
    assert loaded.quota_project_id == expected
    assert loaded.scopes is None, "a refresh that names cloud-platform alone loses the user's address"


def test_a_service_account_gets_scopes_and_no_quota_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = rsa.generate_private_key(65537, 2048)
    content = {
        "type": "service_account",
        "client_email": "a@p.iam.gserviceaccount.com",
        "token_uri": "https://oauth2.googleapis.com/token",
        "private_key": key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode(),
    }
    found = load(tmp_path, monkeypatch, content, "p1")
    assert (tuple(found.scopes), found.quota_project_id) == (SCOPES, None)


@pytest.mark.parametrize(
    ("product", "variables", "found"),
    [
        ("Google Compute Engine\n", {}, True),
        ("Google Compute Engine\n", {"NO_GCE_CHECK": "true"}, False),
        ("HP Laptop\n", {}, False),
        ("HP Laptop\n", {"CLOUD_SHELL": "true"}, True),
        (None, {}, False),
    ],
)
def test_a_google_vm_has_its_own_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, product: str | None, variables: dict[str, str], found: bool
) -> None:
    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "NO_GCE_CHECK", "CLOUD_SHELL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"CLOUDSDK_CONFIG": str(tmp_path), **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(credentials, "PRODUCT_NAME", tmp_path / "product_name")
    if product is not None:
        (tmp_path / "product_name").write_text(product)
    own = application_default_credentials("p1")
    assert type(own) is ComputeCredentials if found else own is None
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "absent.json"))
    assert application_default_credentials("p1") is None, "the named file decides"
    said = f"GOOGLE_APPLICATION_CREDENTIALS names {tmp_path / 'absent.json'}, and there is no such file"
    assert said in absent_file()
    with pytest.raises(NoCredentialsError, match="there is no such file; correct or unset the variable"):
        GoogleClient(None, ManualClock()).call("storage", "buckets.list", project="p1")
    (tmp_path / "absent.json").touch()
    assert absent_file() == ""
    for content in ('{"type": "service_account", "private_key": "hush"}', "hush\nhush", "hush" * 2000):
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", content)
        assert "holds the credentials themselves, not a path" in absent_file()
        assert "hush" not in absent_file()
        assert application_default_credentials("p1") is None


def test_the_project_is_that_of_the_named_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GOOGLE_CLOUD_PROJECT", "CLOUDSDK_CORE_PROJECT", "CLOUDSDK_ACTIVE_CONFIG_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    (tmp_path / "configurations").mkdir()
    for name in ("work", "home"):
        (tmp_path / "configurations" / f"config_{name}").write_text(f"[core]\nproject = p-{name}\n")
    (tmp_path / "active_config").write_text("work\n")
    assert default_project() == "p-work"
    monkeypatch.setenv("CLOUDSDK_ACTIVE_CONFIG_NAME", "home")
    assert default_project() == "p-home"


@pytest.mark.parametrize("content", ["no JSON", "{}", '{"type": "authorized_user"}', "[1]"])
def test_a_file_that_holds_no_credentials_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    (file := tmp_path / "adc.json").write_text(content)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    with pytest.raises(ConfigError) as caught:
        application_default_credentials()
    assert str(caught.value).startswith(f"GOOGLE_APPLICATION_CREDENTIALS: {file} holds no usable Google credentials (")
    assert "\n" not in str(caught.value)

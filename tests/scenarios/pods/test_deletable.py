"""Whatever fails for good while a run goes through its steps, `down` ends what is billed.

The table has a row for each kind of resource in the quick start's plan, and for each later step of a run. A kind
without a row fails `test_every_step_has_a_row`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from controller.agent.protocol import Command
from controller.cli import main
from controller.gcp import client, errors
from controller.plan.build import build_plan
from controller.ssh.connect import WorkerError
from controller.ssh.fleet import Fleet
from tests.controller.cli.verbs.run.test_up import until
from tests.controller.conftest import ECHO_COMMAND, SlipwayCli
from tests.controller.localcloud.harness import EmulatedCloud

pytestmark = pytest.mark.e2e
ONE_WORKER = ("tpu.accelerator_type=v6e-1", "tpu.zone=us-east5-b", "cloud.bucket=deletable")
REFUSALS = (403, 404, 500)
REQUESTS: dict[str, tuple[str, ...]] = {
    "services": ("POST .*services:batchEnable", "POST .*services:batchGet|GET .*services:batchGet"),
    "service account": ("POST .*/serviceAccounts$",),
    "bucket": ("POST .*/storage/v1/b$",),
    "roles of": ("POST .*/projects/[^/]*:setIamPolicy",),
    "bucket roles of": ("PUT .*/b/[^/]*/iam$",),
    "network": ("POST .*/global/networks$",),
    "firewall": ("POST .*/global/firewalls$", "GET .*/global/firewalls$"),
    "subnet": ("POST .*/subnetworks$",),
    "private Google access": ("POST .*/setPrivateIpGoogleAccess",),
    "router": ("POST .*/routers$",),
    "nat": ("PATCH .*/routers/",),
    "code": ("POST .*/upload/storage/.*",),
    "node": ("POST .*/nodes$", "POST .*/queuedResources$", "GET .*/tpu/.*/operations/"),
    "ssh": ("POST .*:getGuestAttributes",),
    "lease": ("(GET|POST) .*/pods(%2F|/).*lease.*",),
}
"""Requests to Google that fail for good, by the step that sends them."""
OBJECTS: dict[str, tuple[str, ...]] = {
    "lease": ("pods/.*/lease.json",),
    "record of the run": ("runs/.*/record.json", "runs/.*/pods/.*"),
    "launch": ("runs/.*/attempt.*|runs/.*/launch.*",),
    "results": ("runs/.*/result.*",),
}
"""Objects that cannot be written, by the step that writes them."""
COMMANDS: dict[str, tuple[str, ...]] = {
    "ssh": ("observe",),
    "chips": ("observe",),
    "watchdog": ("set_watchdog",),
    "tidied": ("tidy",),
    "venv": ("install_venv",),
    "worker code": ("install_code",),
    "run config": ("write_config",),
    "verified": ("probe_peers",),
    "launch": ("start",),
    "follow": ("watch",),
}
"""Commands of the agent that fail for good, by step."""
NEVER_SENT = {
    ("private Google access", "POST .*/setPrivateIpGoogleAccess"): "a subnet of ours is created with it",
    ("nat", "PATCH .*/routers/"): "a router of ours is created with it",
    ("tidied", "tidy"): "a fresh worker is tidy",
}
"""Requests and commands that only an older network or pod needs."""


@dataclass(frozen=True)
class Failure:
    """One row: a step, and what fails there; the status of a request, None for a command of the agent."""

    step: str
    what: str
    status: int | None = None

    def __str__(self) -> str:
        return f"{self.step}: {self.what}" + ("" if self.status is None else f" {self.status}")


def rows() -> Iterator[Failure]:
    for step, requests in REQUESTS.items():
        yield from (Failure(step, match, status) for match in requests for status in REFUSALS)
    for step, objects in OBJECTS.items():
        yield from (Failure(step, match, status) for match in objects for status in (403, 500))
    for step, commands in COMMANDS.items():
        yield from (Failure(step, command) for command in commands)
    yield Failure("ssh", "never answers")


REFUSALS_IN_STORE = 10_000
"""How often a request is refused: more often than any test repeats it."""
FAST = {
    Failure("ssh", "POST .*:getGuestAttributes", 403),
    Failure("code", "POST .*/upload/storage/.*", 500),
    Failure("worker code", "install_code"),
}
ROWS = [row if row in FAST else pytest.param(row, marks=pytest.mark.deep) for row in rows()]


def refused(match: str, status: int = 403) -> dict[str, Any]:
    return {"kind": "http", "status": status, "match": match, "times": REFUSALS_IN_STORE, "message": "refused for good"}


def nothing_is_billed(slipway: SlipwayCli) -> bool:
    state = slipway.cloud().get("state")
    compute = [path for path in state.get("compute", {}) if "/disks/" in path or "/instances/" in path]
    return not state.get("node") and not state.get("queued") and not compute


def inject(slipway: SlipwayCli, row: Failure, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Make the step fail from now on, without pauses between retries; the list fills with the commands refused."""
    monkeypatch.setattr(client, "_backoff_seconds", lambda state: 0.0)
    struck: list[str] = []
    if row.what in OBJECTS.get(row.step, ()):
        really_upload = client.GoogleClient.upload

        def upload(google: client.GoogleClient, bucket: str, name: str, content: bytes, **options: Any) -> Any:
            if not re.fullmatch(row.what, name):
                return really_upload(google, bucket, name, content, **options)
            struck.append(name)
            error = errors.ForbiddenError if row.status == 403 else errors.GoogleError
            raise error(f"upload of {name}", row.status or 0, "refused", "refused for good")

        monkeypatch.setattr(client.GoogleClient, "upload", upload)
    elif row.status is not None:
        spec = refused(row.what, row.status)
        slipway.cloud().post("faults", {"key": str(row), "faults": [spec]})
    elif row.what == "never answers":
        slipway.cloud().post("faults", {"key": "ssh", "faults": [{"kind": "ssh_refused", "seconds": 36_000}]})
    else:
        really, really_stream = Fleet.call, Fleet.stream

        def call(fleet: Fleet, worker: int, command: Command[Any, Any], payload: Any) -> Any:
            if command != row.what:
                return really(fleet, worker, command, payload)
            struck.append(command)
            raise WorkerError(worker, "10.0.0.1", "agent", f"`{command}` is refused for good")

        def stream(fleet: Fleet, worker: int, command: Command[Any, Any], payload: Any) -> Any:
            return (
                call(fleet, worker, command, payload)
                if command == row.what
                else really_stream(fleet, worker, command, payload)
            )

        monkeypatch.setattr(Fleet, "call", call)
        monkeypatch.setattr(Fleet, "stream", stream)
    return struck


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_down_ends_what_is_billed(slipway: SlipwayCli, row: Failure, monkeypatch: pytest.MonkeyPatch) -> None:
    queued = "queuedResources" in row.what
    words = [ECHO_COMMAND, *ONE_WORKER, "cleanup.on_failure=keep", f"tpu.provisioner={'queued' if queued else 'node'}"]
    words += ["ssh.ready_timeout_seconds=0.5", "recovery.max_program_failures=0", "recovery.max_preemptions=0"]
    words += ["recovery.max_create_attempts=2", "recovery.policy.network_lost=give_up"]
    struck = inject(slipway, row, monkeypatch)
    _, out, err = slipway("up", *words)
    assert "Traceback" not in out + err
    if row.what in REQUESTS.get(row.step, ()):
        [fault] = [state for key, state in slipway.cloud().get("state")["fault"].items() if key.startswith(str(row))]
        struck += [row.what] * (REFUSALS_IN_STORE - fault["left"])
    assert struck or row.what == "never answers" or (row.step, row.what) in NEVER_SENT, "the row proves nothing"
    code, out, err = slipway("down", *words, "--yes")
    assert (code, err) == (0, "")
    assert nothing_is_billed(slipway)


def test_every_step_has_a_row() -> None:
    config = main.parse(["plan", "+experiment=quickstart"]).options.config()[0]
    kinds = {resource.kind for resource in build_plan(config, "slipway-local", Path.cwd()).resources}
    assert kinds
    assert kinds <= REQUESTS.keys() | COMMANDS.keys()


def test_down_needs_no_bucket(slipway: SlipwayCli) -> None:
    """The rights on it may have gone since, and so may the bucket."""
    words = [ECHO_COMMAND, "cleanup.on_success=keep"]
    assert slipway("up", *words)[0] == 0
    assert not nothing_is_billed(slipway)
    no_bucket, no_ssh = refused("(GET|POST|PUT|PATCH) .*/storage/.*"), {"kind": "ssh_refused", "seconds": 36_000}
    slipway.cloud().post("faults", {"key": "bucket", "faults": [no_bucket, {**no_ssh, "after_requests": 0}]})
    code, out, err = slipway("down", *words)
    assert code == 2
    assert "nothing was deleted; neither the pod's lease nor its workers can be read, so a run may be on it" in err
    assert not nothing_is_billed(slipway)
    code, out, err = slipway("down", *words, "--yes")
    assert (code, err) == (0, "")
    assert "the bucket cannot be used, so this is not on record" in out
    assert nothing_is_billed(slipway)


def test_a_pod_whose_ssh_never_works_deletes_itself_without_a_controller(slipway: SlipwayCli) -> None:
    """Nobody runs `down`: the node's startup script deletes the pod, without SSH, agent or watchdog."""
    spec = {"kind": "ssh_refused", "seconds": 36_000}
    slipway.cloud().post("faults", {"key": "ssh", "faults": [spec]})
    words = [ECHO_COMMAND, *ONE_WORKER, "cleanup.on_failure=keep", "cleanup.heartbeat_timeout_hours=0.001"]
    assert slipway("up", *words, "ssh.ready_timeout_seconds=0.5", "recovery.policy.setup_failure=give_up")[0] != 0
    until(lambda: nothing_is_billed(slipway))
    assert [r["client"] for r in slipway.cloud().requests() if r["method"] == "DELETE"][-1].endswith("/0")


def test_down_names_a_zone_that_it_may_not_look_into(slipway: SlipwayCli) -> None:
    EmulatedCloud(slipway.cloud().state).establish()  # where the API is off there is no pod to look for
    words = [ECHO_COMMAND, *ONE_WORKER, "tpu.fallback_zones=[us-east5-a]"]
    slipway.cloud().post("faults", {"key": "zone", "faults": [refused("GET .*/locations/us-east5-a/.*")]})
    code, out, err = slipway("down", *words)
    assert code == 2
    assert "nothing to delete" in out
    assert "you may not look for TPUs in us-east5-a: if a pod or queued resource slipway-v6e-1-" in err

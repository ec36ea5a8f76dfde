"""Whatever fails for good while a pod is made, `down` ends what is billed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.controller.cli.verbs.run.test_up import until
from tests.controller.conftest import ECHO_COMMAND, SlipwayCli

pytestmark = pytest.mark.e2e
ONE_WORKER = ("tpu.accelerator_type=v6e-1", "tpu.zone=us-east5-b", "cloud.bucket=deletable")


def refused(match: str, status: int = 403) -> dict[str, Any]:
    return {"kind": "http", "status": status, "match": match, "times": 10_000, "message": "refused for good"}


FAST = {
    "guest attributes": refused("POST .*:getGuestAttributes"),
    "nothing published": refused("POST .*:getGuestAttributes", 404),
    "code": refused("POST .*/upload/storage/.*"),
}
DEEP = {
    "services": refused("POST .*services:batchEnable"),
    "network": refused("POST .*/global/networks$"),
    "subnet": refused("POST .*/subnetworks$"),
    "firewall": refused("POST .*/global/firewalls$"),
    "router": refused("POST .*/routers$"),
    "bucket": refused("POST .*/storage/v1/b$"),
    "account": refused("POST .*/serviceAccounts$"),
    "policy": refused("POST .*:setIamPolicy"),
    "node": refused("POST .*/nodes$"),
    "node not found": refused("POST .*/nodes$", 404),
    "firewall list": refused("GET .*/global/firewalls$"),
    "ssh": {"kind": "ssh_refused", "seconds": 3600},
    "lease": refused("GET .*/pods%2F.*"),
}
CASES = [*FAST, *(pytest.param(name, marks=pytest.mark.deep) for name in DEEP)]


def nothing_is_billed(slipway: SlipwayCli) -> bool:
    state = slipway.cloud().get("state")
    compute = [path for path in state.get("compute", {}) if "/disks/" in path or "/instances/" in path]
    return not state.get("node") and not state.get("queued") and not compute


@pytest.mark.parametrize("what", CASES)
def test_down_ends_what_is_billed(slipway: SlipwayCli, what: str) -> None:
    spec = (FAST | DEEP)[what]
    words = [ECHO_COMMAND, "cleanup.on_failure=keep", "ssh.ready_timeout_seconds=0.5", "tpu.provisioner=node"]
    slipway.cloud().post("faults", {"key": json.dumps(spec), "faults": [spec]})
    code, out, err = slipway("up", *words)
    assert "Traceback" not in out + err
    assert what == "ssh" or spec["status"] in [request["status"] for request in slipway.cloud().requests()]
    if code == 0:
        assert what in ("account", "policy", "firewall list"), "everything else is needed"
    assert slipway("down", *words, "--yes")[0] == 0
    assert nothing_is_billed(slipway)


def test_down_needs_no_bucket(slipway: SlipwayCli) -> None:
    """The rights on it may have gone since, and so may the bucket."""
    words = [ECHO_COMMAND, "cleanup.on_success=keep"]
    assert slipway("up", *words)[0] == 0
    assert not nothing_is_billed(slipway)
    slipway.cloud().post("faults", {"key": "bucket", "faults": [refused("(GET|POST|PUT|PATCH) .*/storage/.*")]})
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

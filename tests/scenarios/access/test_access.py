"""Reaching the workers of an emulated pod when something is in the way: what is late, OS Login, faults."""

from __future__ import annotations

import json
import re

import pytest

from controller.cli import main
from controller.cloud.connect import open_context
from tests.controller.conftest import ECHO_COMMAND, ONE_WORKER, SlipwayCli
from tests.controller.localcloud.harness import EmulatedCloud

pytestmark = pytest.mark.e2e
KEEP = [ECHO_COMMAND, ONE_WORKER, "cleanup.on_success=keep"]


def fault(slipway: SlipwayCli, **spec: object) -> None:
    slipway.cloud().post("faults", {"key": json.dumps(spec, sort_keys=True), "faults": [spec]})


LATE = [
    ("laptop", "POST .*/compute/v1/.*/global/networks$", 403),  # an API enabled a moment ago
    ("laptop", "GET .*/serviceAccounts/slipway-runner@.*", 404),  # an account created a moment ago
    ("laptop", "POST .*:getGuestAttributes", 404),  # a VM that has just booted
    (".*/0", "GET .*/storage/v1/.*/code%2F.*", 403),  # roles bound a moment ago, asked for by a worker
    ("laptop", "POST .*/upload/storage/.*", 429),  # a second write of one object within a second
]
"""Requests that are refused on the way, as (client, method and path, status)."""


class LateCloud(SlipwayCli):
    """The command line with an emulated cloud whose changes take effect late."""

    @property
    def base_overrides(self) -> list[str]:
        return [*super().base_overrides, "cloud.operation_seconds=0.5"]


@pytest.mark.deep
def test_up_in_a_fresh_project_waits_for_everything_that_is_late(slipway: SlipwayCli) -> None:
    late = LateCloud(slipway.home, slipway.repository, slipway.capsys, slipway.environment)
    fault(late, kind="ssh_refused", seconds=2)
    code, out, err = late("up", ECHO_COMMAND, "cleanup.on_success=keep")
    assert (code, err) == (0, "")
    assert "hello from worker 0" in out
    requests = [
        (r["client"], f"{r['method']} {r['path'].partition('?')[0]}", r["status"]) for r in late.cloud().requests()
    ]
    late_ones = {
        (client, path, status)
        for client, path, status in LATE
        for r in requests
        if re.fullmatch(client, r[0]) and re.fullmatch(path, r[1]) and r[2] == status
    }
    # All of them on an idle machine; on a busy one, some are no longer late when they are asked for.
    assert late_ones


NO_ATTRIBUTES = {"kind": "http", "match": "POST .*:getGuestAttributes", "times": 1000}


@pytest.mark.deep
def test_a_pod_whose_guest_attributes_are_refused_can_be_deleted_and_reached_without_them(
    slipway: SlipwayCli,
) -> None:
    fault(slipway, **NO_ATTRIBUTES, status=403, message="constraints/compute.disableGuestAttributesAccess")
    code, out, err = slipway("up", *KEEP)
    assert code != 0
    assert "Traceback" not in err
    assert "ssh.host_keys=trust_on_first_use" in err
    assert "is kept; `slipway down` deletes it" in out  # the emulated cloud has no price
    assert slipway("status", *KEEP)[0] == 0
    assert slipway("down", *KEEP, "--yes")[0] == 0
    assert not slipway.cloud().get("state").get("node")
    code, out, err = slipway("up", *KEEP, "ssh.host_keys=trust_on_first_use", "ssh.method=external")
    assert code == 0, err
    assert "hello from worker 0" in out


@pytest.mark.deep
def test_os_login_where_the_project_wants_it(slipway: SlipwayCli) -> None:
    cloud = slipway.cloud()
    EmulatedCloud(cloud.state).establish()
    with open_context(main.parse(slipway.line("plan", *KEEP)).options.config()[0], keep_awake=True) as (context, _):
        body = {"items": [{"key": "enable-oslogin", "value": "TRUE"}]}
        context.google.call("compute", "projects.setCommonInstanceMetadata", project="slipway-local", body=body)
    code, out, err = slipway("up", *KEEP)
    assert (code, err) == (0, "")
    assert "hello from worker 0" in out
    assert main.run(["exec", "--worker", "0", "--", "echo $USER"]) == 0
    assert slipway.capsys.readouterr().out == "you_example_com\n"
    [profile] = cloud.get("state")["loginProfile"].values()
    assert len(profile["sshPublicKeys"]) == 1
    before = slipway.mutations()
    assert slipway("up", *KEEP)[0] == 0
    assert slipway.mutations() == before
    assert main.run(["exec", *KEEP, *slipway.base_overrides, "ssh.os_login=false", "--worker", "0", "--", "true"]) != 0
    assert "does not accept user slipway" in slipway.capsys.readouterr().err

"""Reaching the workers of an emulated pod when something is in the way: OS Login, faults."""

from __future__ import annotations

import json

import pytest

from controller.cli import main
from controller.cloud.connect import open_context
from controller.run.session import open_session
from controller.ssh.fleet import WorkerError, failures
from tests.controller.conftest import ECHO_COMMAND, ONE_WORKER, SlipwayCli
from tests.controller.localcloud.harness import EmulatedCloud

pytestmark = pytest.mark.e2e
KEEP = [ECHO_COMMAND, ONE_WORKER, "cleanup.on_success=keep"]
TWO = [ECHO_COMMAND, "tpu.accelerator_type=v4-16", "tpu.zone=us-central2-b", "cleanup.on_success=keep"]


def fault(slipway: SlipwayCli, **spec: object) -> None:
    slipway.cloud().post("faults", {"key": json.dumps(spec, sort_keys=True), "faults": [spec]})


@pytest.mark.deep
def test_ssh_that_stays_refused_is_told(slipway: SlipwayCli) -> None:
    fault(slipway, kind="ssh_refused", seconds=600, worker=1)
    code, _, err = slipway("up", *TWO, "ssh.ready_timeout_seconds=0.5")
    assert code != 0
    assert "worker 1: no SSH" in err
    assert "worker 0" not in err


@pytest.mark.deep
def test_a_worker_that_freezes_is_noticed(slipway: SlipwayCli) -> None:
    assert slipway("up", *TWO)[0] == 0
    with open_session(main.parse(slipway.line("status", *TWO)).options) as now:
        fleet = now.authorized_fleet()
        assert not failures(fleet.call_all("observe", {}))
        access = fleet._params
        object.__setattr__(access, "silence_seconds", 0.3)
        heard: list[bytes] = []

        def hear(data: bytes) -> None:
            heard.append(data)
            if len(heard) == 1:
                fault(slipway, kind="ssh_frozen", seconds=600, worker=1)

        with pytest.raises(WorkerError, match="has not answered") as caught:
            fleet.connection(1).follow("while true; do echo; sleep 0.01; done", hear, hear)
        assert caught.value.kind == "dropped"
        assert fleet.connection(0).follow("true", print, print) == 0


NO_ATTRIBUTES = {"kind": "http", "match": "POST .*:getGuestAttributes", "times": 1000}


@pytest.mark.deep
def test_guest_attributes_and_ssh_that_come_late_are_waited_for(slipway: SlipwayCli) -> None:
    fault(slipway, **NO_ATTRIBUTES | {"status": 404, "times": 3})
    fault(slipway, kind="ssh_refused", seconds=2)
    code, out, err = slipway("up", *KEEP)
    assert (code, err) == (0, "")
    assert "hello from worker 0" in out


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

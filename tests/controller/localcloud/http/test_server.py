"""Who may speak to the emulated cloud, and what its log says of them."""

import json
from pathlib import Path

import pytest

from controller.localcloud.apis.projects import EnabledApis
from controller.localcloud.delays import DELAYS
from controller.localcloud.http.errors import ApiError
from controller.localcloud.settings import Settings
from controller.localcloud.store import Store
from tests.controller.localcloud.harness import COMPUTE, NODES, PROJECT, EmulatedCloud

NETWORKS = f"{COMPUTE}/global/networks"


HOSTS = ("evil.example:80", "127.evil.example:80", "127.0.0.1.evil.example", "localhost.evil.example")
ADMITTED = [{}, *({"Host": host} for host in ("localhost:1", "[::1]:1", "127.1.2.3"))]
REFUSED = [({"Authorization": text}, 401) for text in ("", "Bearer wrong", "Basic x", "Bearer \xff")]
REFUSED += [({"Host": host}, 403) for host in HOSTS]
ADMITTED += [{"X-Goog-User-Project": "slipway-local"}]
REFUSED += [({"X-Goog-User-Project": "of-someone-else"}, 403)]
REFUSED += [({"Origin": origin}, 403) for origin in ("http://127.0.0.1", "null")]


def test_only_programs_of_this_machine_with_the_token(cloud: EmulatedCloud) -> None:
    for headers in ADMITTED:
        assert cloud.send("GET", NETWORKS, headers=headers)[0] == 200, headers
    for headers, status in REFUSED:
        answered, text, _ = cloud.send("GET", NETWORKS, headers=headers)
        assert (answered, json.loads(text)["error"]["code"]) == (status, status), headers


def test_the_token_may_come_in_the_path(cloud: EmulatedCloud) -> None:
    token = cloud.endpoint["token"]
    anonymous = {"Authorization": ""}
    assert cloud.send("GET", f"t/{token}/{NETWORKS}", headers=anonymous)[0] == 200
    assert cloud.send("GET", f"t/{token}x/{NETWORKS}", headers=anonymous)[0] == 401
    assert cloud.send("GET", f"w/{token}/77/3/{NETWORKS}", headers=anonymous)[0] == 403  # there is no such VM
    assert [entry["client"] for entry in cloud.request_log()[-2:]] == ["laptop", "77/3"]


def test_the_log_tells_reads_from_changes(cloud: EmulatedCloud) -> None:
    after = cloud.request_log()[-1]["seq"] if cloud.request_log() else 0
    cloud.call("GET", NETWORKS)
    cloud.call("POST", NETWORKS, {"name": "logged", "autoCreateSubnetworks": False})
    cloud.call("POST", f"cloudresourcemanager/v1/{PROJECT}:getIamPolicy", {})
    cloud.call("POST", f"{NODES}/none:getGuestAttributes", {})
    cloud.call("POST", f"{COMPUTE}/global/operations/none/wait")
    cloud.call("DELETE", f"{NODES}/none")
    entries = cloud.request_log(after)
    assert [entry["mutating"] for entry in entries] == [False, True, False, False, False, True]
    assert [entry["status"] for entry in entries] == [200, 200, 200, 404, 404, 404]
    assert (entries[1]["api"], entries[1]["call"]) == ("compute", "networks.insert")
    assert entries[1]["body"]["name"] == "logged"
    assert entries[0]["permissions"] == ["compute.networks.list"], "which the request needed"


def test_the_log_holds_no_secrets(cloud: EmulatedCloud) -> None:
    body = cloud.node_body("nowhere")
    body["metadata"] |= {"startup-script": "export WANDB_API_KEY=s3cret"}
    cloud.call("POST", f"{NODES}?nodeId=n", body)
    cloud.call("GET", f"{NETWORKS}?access_token=s3cret")
    *_, create, listing = cloud.request_log()
    assert "s3cret" not in json.dumps([create, listing])
    assert create["body"]["metadata"]["ssh-keys"].startswith("me:")


def test_the_emulators_own_api(cloud: EmulatedCloud) -> None:
    state = cloud.call_ok("GET", "emulator/state")
    assert {"node", "queued", "worker", "compute", "bucket", "operation", "fault"} <= set(state)
    assert cloud.call_ok("POST", "emulator/settings", {"operation_seconds": 0.03})["operation_seconds"] == 0.03
    now = cloud.call_ok("GET", "emulator/settings")
    assert (now["operation_seconds"], now["realism"], now["pid"]) == (0.03, "strict", cloud.endpoint["pid"])
    cloud.refused("POST", "emulator/settings", {"operation_seconds": -1}, 400)
    cloud.refused("POST", "emulator/settings", {"speed": 1}, 400)
    cloud.refused("GET", "emulator/nothing", None, 404, "GET state")
    cloud.refused("GET", f"{COMPUTE}/global/interconnects", None, 501, "UNIMPLEMENTED")  # what is not emulated
    cloud.refused("GET", "tpu/v2/nothing", None, 404)


DEFAULTS = ("storage", "logging", "serviceusage", "oauth2")
OTHERS = ("tpu", "compute", "iam", "cloudresourcemanager", "cloudbilling")


def answers(apis: EnabledApis, api: str) -> bool:
    try:
        apis.check(api)
    except ApiError as error:
        told = (error.code, error.reason, error.details[0]["reason"])
        assert told == (403, "accessNotConfigured", "SERVICE_DISABLED")
        return False
    return True


def test_a_fresh_project_has_googles_defaults_and_nothing_else(tmp_path: Path) -> None:
    apis = EnabledApis(store := Store(tmp_path / "s"), Settings(store))
    found = {api: answers(apis, api) for api in (*DEFAULTS, *OTHERS)}
    assert found == dict.fromkeys(DEFAULTS, True) | dict.fromkeys(OTHERS, False)


def test_an_api_just_enabled_refuses_every_other_request_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("time.time", lambda: now[0])
    store = Store(tmp_path / "s")
    apis = EnabledApis(store, Settings(store, operation_seconds=30))
    apis.set_enabled("tpu.googleapis.com", True)
    assert [answers(apis, "tpu") for _ in range(4)] == [False, True, False, True]
    now[0] += DELAYS["new API"].most
    apis.set_enabled("tpu.googleapis.com", True)  # it is enabled already
    assert [answers(apis, "tpu") for _ in range(4)] == [True] * 4
    Settings(store, realism="relaxed")
    relaxed = EnabledApis(store, Settings(store))
    relaxed.set_enabled("iam.googleapis.com", True)
    assert answers(relaxed, "iam")

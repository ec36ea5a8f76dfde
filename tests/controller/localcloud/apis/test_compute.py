"""compute v1 and the project APIs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from controller.localcloud.apis.catalog import load_catalog
from controller.localcloud.apis.networks import Networks
from controller.localcloud.store import Store
from tests.controller.localcloud.harness import COMPUTE, NODES, PROJECT, REGION, EmulatedCloud, wait_for

GLOBAL, REGIONAL = f"{COMPUTE}/global", f"{COMPUTE}/regions/{REGION}"


def reason(answer: Any) -> str:
    return answer["error"]["errors"][0]["reason"]


def test_a_network_lives_and_dies(cloud: EmulatedCloud) -> None:
    operation = cloud.call_ok(
        "POST", f"{GLOBAL}/networks", {"name": "life", "autoCreateSubnetworks": False, "mtu": 8896}
    )
    assert (operation["kind"], operation["status"]) == ("compute#operation", "RUNNING")
    assert cloud.wait_operation(operation)["status"] == "DONE"
    network = cloud.call_ok("GET", f"{GLOBAL}/networks/life")
    assert network["selfLink"] == f"{cloud.endpoint['url']}{GLOBAL}/networks/life"
    assert (network["mtu"], network["autoCreateSubnetworks"]) == (8896, False)
    cloud.call_and_wait("DELETE", f"{GLOBAL}/networks/life")
    status, answer = cloud.call("GET", f"{GLOBAL}/networks/life")
    assert (status, reason(answer)) == (404, "notFound")
    assert answer["error"]["message"] == f"The resource '{PROJECT}/global/networks/life' was not found"


def test_auto_mode_makes_subnetworks(cloud: EmulatedCloud) -> None:
    cloud.call_and_wait("POST", f"{GLOBAL}/networks", {"name": "auto"})
    subnetwork = cloud.call_ok("GET", f"{REGIONAL}/subnetworks/auto")
    assert subnetwork["ipCidrRange"].endswith("/20")
    cloud.call_and_wait("DELETE", f"{GLOBAL}/networks/auto")
    assert cloud.call("GET", f"{REGIONAL}/subnetworks/auto")[0] == 404


def test_private_google_access_is_switched(cloud: EmulatedCloud) -> None:
    cloud.create_network("pga", ssh=False, internal=False)
    path = f"{REGIONAL}/subnetworks/pga"
    assert cloud.call_ok("GET", path)["privateIpGoogleAccess"] is False
    cloud.call_and_wait("POST", f"{path}/setPrivateIpGoogleAccess", {"privateIpGoogleAccess": True})
    assert cloud.call_ok("GET", path)["privateIpGoogleAccess"] is True
    cloud.call_and_wait("PATCH", path, {"privateIpGoogleAccess": False})
    assert cloud.call_ok("GET", path)["privateIpGoogleAccess"] is False
    assert cloud.call("PATCH", path, {"ipCidrRange": "10.99.0.0/24"})[0] == 400


def test_a_nat_is_part_of_its_router(cloud: EmulatedCloud) -> None:
    cloud.create_network("nat", ssh=False, internal=False)
    router = {"name": "router", "network": f"{PROJECT}/global/networks/nat"}
    cloud.call_and_wait("POST", f"{REGIONAL}/routers", router)
    nat = {
        "name": "nat",
        "natIpAllocateOption": "AUTO_ONLY",
        "sourceSubnetworkIpRangesToNat": "ALL_SUBNETWORKS_ALL_IP_RANGES",
    }
    whole = cloud.call_ok("GET", f"{REGIONAL}/routers/router") | {"nats": [nat]}  # as gcloud does
    cloud.call_and_wait("PATCH", f"{REGIONAL}/routers/router", whole)
    assert cloud.call_ok("GET", f"{REGIONAL}/routers/router")["nats"] == [nat]
    cloud.call_and_wait("PUT", f"{REGIONAL}/routers/router", router)
    assert "nats" not in cloud.call_ok("GET", f"{REGIONAL}/routers/router")
    status, answer = cloud.call("PATCH", f"{REGIONAL}/routers/router", {"nats": [{"name": "nat"}]})
    assert status == 400
    assert "natIpAllocateOption" in answer["error"]["message"]


def test_a_network_in_use_stays(cloud: EmulatedCloud) -> None:
    cloud.create_network("used", internal=False)
    status, answer = cloud.call("DELETE", f"{GLOBAL}/networks/used")
    assert (status, reason(answer)) == (400, "resourceInUseByAnotherResource")
    cloud.create_node("user", "used")
    status, answer = cloud.call("DELETE", f"{REGIONAL}/subnetworks/used")
    assert status == 400
    assert "nodes/user" in answer["error"]["message"]
    cloud.call_and_wait("DELETE", f"{NODES}/user")
    wait_for(lambda: cloud.call("DELETE", f"{REGIONAL}/subnetworks/used")[0] == 200, "it is in use no more")
    wait_for(lambda: cloud.call("GET", f"{REGIONAL}/subnetworks/used")[0] == 404, "its end")
    cloud.call_and_wait("DELETE", f"{GLOBAL}/firewalls/used-ssh")
    cloud.call_and_wait("DELETE", f"{GLOBAL}/networks/used")


def test_the_network_of_a_deleted_node_is_in_use_a_while_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time", lambda: now[0])
    now, networks = [100.0], Networks(Store(tmp_path / "state.db"), load_catalog())
    networks.keep_in_use("gone", {"network": "n", "subnetwork": "s"}, until=101.0)
    assert networks.dependents("n") == networks.dependents("s") == ["gone"]
    now[0] = 101.0
    assert networks.dependents("n") == []


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("global/networks", {"name": "Bad_Name"}, 400, "resource.name"),
        ("global/networks", {"name": "n", "mtu": 100}, 400, "resource.mtu"),
        ("global/networks", {"name": "n", "mode": "auto"}, 400, 'Unknown name "mode"'),
        ("global/networks", {"name": "wrong"}, 409, "already exists"),
        ("regions/nowhere/routers", {"name": "r"}, 400, "Unknown region"),
        (f"regions/{REGION}/routers", {"name": "r"}, 400, "A network must be specified"),
        (f"regions/{REGION}/routers", {"name": "r", "network": "global/networks/none"}, 404, "networks/none"),
        (f"regions/{REGION}/subnetworks", {"ipCidrRange": "10.20.0.1/24"}, 400, "ipCidrRange"),
        (f"regions/{REGION}/subnetworks", {"ipCidrRange": "10.20.0.0/28"}, 400, "conflicts"),
        ("global/firewalls", {}, 400, "exactly one of 'allowed' and 'denied'"),
        ("global/firewalls", {"allowed": [{"IPProtocol": "tcp", "ports": ["ssh"]}]}, 400, "ports"),
        ("global/firewalls", {"allowed": [{"IPProtocol": "tcp"}], "sourceRanges": ["me"]}, 400, "sourceRanges"),
    ],
)
def test_wrong_requests_are_refused(
    cloud: EmulatedCloud, path: str, body: dict[str, Any], status: int, words: str
) -> None:
    if cloud.call("GET", f"{GLOBAL}/networks/wrong")[0] == 404:
        cloud.create_network("wrong", ssh=False, internal=False)
    if "subnetworks" in path or "firewalls" in path:
        body = {"name": "x", "network": f"{PROJECT}/global/networks/wrong"} | body
    answered, answer = cloud.call("POST", f"{COMPUTE}/{path}", body)
    assert answered == status
    assert words in answer["error"]["message"]


def test_a_resource_being_made_cannot_be_used_yet(fresh_cloud: EmulatedCloud) -> None:
    fresh_cloud.call_ok("POST", "emulator/settings", {"operation_seconds": 30})
    fresh_cloud.call_ok("POST", f"{GLOBAL}/networks", {"name": "slow", "autoCreateSubnetworks": False})
    body = {"name": "r", "network": f"{PROJECT}/global/networks/slow"}
    status, answer = fresh_cloud.call("POST", f"{REGIONAL}/routers", body)
    assert (status, reason(answer)) == (400, "resourceNotReady")


def test_lists_are_filtered_and_paged(cloud: EmulatedCloud) -> None:
    for name in ("list-a", "list-b"):
        cloud.call_and_wait("POST", f"{GLOBAL}/networks", {"name": name, "autoCreateSubnetworks": False})
    found = cloud.call_ok("GET", f"{GLOBAL}/networks?filter=name%20%3D%20list-b")["items"]
    assert [network["name"] for network in found] == ["list-b"]
    first = cloud.call_ok("GET", f"{GLOBAL}/networks?filter=name%20eq%20list-.*&maxResults=1")
    second = cloud.call_ok("GET", f"{GLOBAL}/networks?filter=name%20eq%20list-.*&pageToken={first['nextPageToken']}")
    assert [network["name"] for network in first["items"] + second["items"]] == ["list-a", "list-b"]
    assert cloud.call("GET", f"{GLOBAL}/networks?filter=a%20AND%20b")[0] == 400


def test_services_are_enabled(cloud: EmulatedCloud) -> None:
    usage = f"serviceusage/v1/{PROJECT}/services"
    assert cloud.call_ok("GET", f"{usage}/artifactregistry.googleapis.com")["state"] == "DISABLED"
    operation = cloud.call_ok("POST", f"{usage}:batchEnable", {"serviceIds": ["artifactregistry.googleapis.com"]})
    assert operation["name"].startswith("operations/")
    assert cloud.call_ok("GET", f"serviceusage/v1/{operation['name']}")["metadata"]["verb"] == "enable"
    cloud.call_ok("POST", f"{usage}/oslogin.googleapis.com:disable", {})
    enabled = cloud.call_ok("GET", f"{usage}?filter=state:ENABLED")["services"]
    names = {service["config"]["name"] for service in enabled}
    assert {"artifactregistry.googleapis.com", "storage.googleapis.com", "tpu.googleapis.com"} <= names
    names = [f"{PROJECT}/services/{name}.googleapis.com" for name in ("tpu", "oslogin")]
    got = cloud.call_ok("GET", f"{usage}:batchGet?names={names[0]}&names={names[1]}")["services"]
    assert [service["state"] for service in got] == ["ENABLED", "DISABLED"]
    assert cloud.call("POST", f"{usage}/tpus.googleapis.com:enable", {})[0] == 403


def test_a_stale_etag_is_a_conflict(cloud: EmulatedCloud) -> None:
    crm = f"cloudresourcemanager/v3/{PROJECT}"
    policy = cloud.call_ok("POST", f"{crm}:getIamPolicy", {})
    policy["bindings"] = [{"role": "roles/viewer", "members": ["user:a@example.com"]}]
    changed = cloud.call_ok("POST", f"{crm}:setIamPolicy", {"policy": policy})
    assert changed["bindings"] == policy["bindings"]
    assert changed["etag"] != policy["etag"]
    status, answer = cloud.call("POST", f"cloudresourcemanager/v1/{PROJECT}:setIamPolicy", {"policy": policy})
    assert (status, answer["error"]["status"]) == (409, "ABORTED")


def test_service_accounts(cloud: EmulatedCloud) -> None:
    accounts = f"iam/v1/{PROJECT}/serviceAccounts"
    account = cloud.call_ok("POST", accounts, {"accountId": "runner", "serviceAccount": {"displayName": "Runner"}})
    assert account["email"] == "runner@slipway-local.iam.gserviceaccount.com"
    assert cloud.call("POST", accounts, {"accountId": "runner"})[0] == 409
    assert cloud.call("POST", accounts, {"accountId": "no"})[0] == 400
    wait_for(lambda: cloud.call("GET", f"{accounts}/{account['email']}")[0] == 200, "IAM shows it, after a while")
    assert cloud.call_ok("GET", f"{accounts}/{account['email']}") == account
    assert cloud.call_ok("GET", accounts)["accounts"][1:] == [account]  # Compute's own comes first
    binding = {"role": "roles/tpu.admin", "members": [f"serviceAccount:{account['email']}"]}
    crm = f"cloudresourcemanager/v1/{PROJECT}:setIamPolicy"
    assert cloud.call("POST", crm, {"policy": {"bindings": [binding]}})[0] == 200
    cloud.call_ok("DELETE", f"{accounts}/{account['email']}")
    assert cloud.call("GET", f"{accounts}/{account['email']}")[0] == 404
    assert cloud.call("POST", crm, {"policy": {"bindings": [binding]}})[0] == 400


@pytest.mark.parametrize(
    "path",
    [
        "compute/v1/projects/other",
        "compute/v1/projects/other/global/networks",
        "cloudresourcemanager/v1/projects/other",
        "cloudresourcemanager/v3/projects/other",
        "tpu/v2/projects/other/locations/us-central1-a/nodes",
        "storage/v1/b?project=other",
    ],
)
def test_another_project_is_forbidden(cloud: EmulatedCloud, path: str) -> None:
    assert cloud.call("GET", path)[0] == 403


def test_projects_zones_and_regions(cloud: EmulatedCloud) -> None:
    assert cloud.call_ok("GET", COMPUTE)["name"] == "slipway-local"
    assert (
        cloud.call_ok("GET", f"cloudresourcemanager/v1/{PROJECT}")["projectNumber"] == cloud.endpoint["project_number"]
    )
    assert cloud.call_ok("GET", f"{COMPUTE}/zones/us-central1-a")["region"].endswith("/us-central1")
    assert "us-central2" in {region["name"] for region in cloud.call_ok("GET", f"{COMPUTE}/regions")["items"]}

"""compute v1 and the APIs of projects: how resources live and die, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from controller.localcloud.apis.catalog import load_catalog
from controller.localcloud.apis.networks import Networks
from controller.localcloud.store import Store
from tests.controller.localcloud.harness import COMPUTE, NODES, PROJECT, REGION, EmulatedCloud, wait_for

GLOBAL, REGIONAL = f"{COMPUTE}/global", f"{COMPUTE}/regions/{REGION}"
NETWORK = {"network": f"{PROJECT}/global/networks/net"}
ROLES, ACCOUNTS = f"iam/v1/{PROJECT}/roles", f"iam/v1/{PROJECT}/serviceAccounts"
NAT = {
    "name": "nat",
    "natIpAllocateOption": "AUTO_ONLY",
    "sourceSubnetworkIpRangesToNat": "ALL_SUBNETWORKS_ALL_IP_RANGES",
}
RULE = {"allowed": [{"IPProtocol": "tcp", "ports": ["22"]}]}
LIVES = {
    f"{GLOBAL}/networks": ({"autoCreateSubnetworks": False, "mtu": 8896}, "PATCH", {"mtu": 1500}),
    f"{REGIONAL}/subnetworks": (NETWORK | {"ipCidrRange": "10.30.0.0/24"}, "PATCH", {"privateIpGoogleAccess": True}),
    f"{REGIONAL}/routers": (NETWORK, "PATCH", {"nats": [NAT]}),
    f"{GLOBAL}/firewalls": (NETWORK | RULE | {"sourceRanges": ["10.0.0.0/8"]}, "PATCH", {"disabled": True}),
}
"""By collection of Compute Engine: a resource, and how it is changed."""


@pytest.mark.parametrize("collection", LIVES)
def test_a_resource_lives_and_dies(cloud: EmulatedCloud, net: str, collection: str) -> None:
    (body, method, change), path = LIVES[collection], f"{collection}/life"
    operation = cloud.call_ok("POST", collection, {"name": "life"} | body)
    assert (operation["kind"], operation["status"]) == ("compute#operation", "RUNNING")
    assert cloud.wait_operation(operation)["status"] == "DONE"
    made = cloud.call_ok("GET", path)
    assert made["selfLink"] == f"{cloud.endpoint['url']}{path}"
    assert {name: made[name] for name in body.keys() - {"network"}}.items() <= body.items()
    cloud.refused("POST", collection, {"name": "life"} | body, 409, "already exists")
    current = {"fingerprint": made["fingerprint"]} if "subnetworks" in path else {}
    cloud.call_and_wait(method, path, change | current)
    assert cloud.call_ok("GET", path).items() >= change.items()
    assert "life" in [one["name"] for one in cloud.call_ok("GET", f"{collection}?filter=name%20%3D%20life")["items"]]
    cloud.delete(path)
    place = path.removeprefix("compute/v1/")
    assert cloud.refused("GET", path, None, 404, "notFound") == f"The resource '{place}' was not found"


def test_auto_mode_makes_subnetworks(cloud: EmulatedCloud) -> None:
    cloud.call_and_wait("POST", f"{GLOBAL}/networks", {"name": "auto"})
    assert cloud.call_ok("GET", f"{REGIONAL}/subnetworks/auto")["ipCidrRange"].endswith("/20")
    cloud.delete(f"{GLOBAL}/networks/auto")
    cloud.refused("GET", f"{REGIONAL}/subnetworks/auto", None, 404)


def test_private_google_access_is_switched(cloud: EmulatedCloud, net: str) -> None:
    path = f"{REGIONAL}/subnetworks/net"
    assert cloud.call_ok("GET", path)["privateIpGoogleAccess"] is False
    cloud.call_and_wait("POST", f"{path}/setPrivateIpGoogleAccess", {"privateIpGoogleAccess": True})
    assert cloud.call_ok("GET", path)["privateIpGoogleAccess"] is True
    other = {"ipCidrRange": "10.99.0.0/24"}
    cloud.refused("PATCH", path, other, 412, "conditionNotMet")
    cloud.refused("PATCH", path, other | {"fingerprint": cloud.call_ok("GET", path)["fingerprint"]}, 400)


def test_the_mode_of_a_network_is_no_part_of_a_patch(cloud: EmulatedCloud, net: str) -> None:
    """By the description of networks.patch; https://cloud.google.com/vpc/docs/change-mtu patches the MTU alone."""
    cloud.refused("PATCH", f"{GLOBAL}/networks/net", {"mtu": 1500, "autoCreateSubnetworks": False}, 400, "autoCreateS")


def test_metadata_of_the_project_has_a_fingerprint(cloud: EmulatedCloud) -> None:
    path, body = f"{COMPUTE}/setCommonInstanceMetadata", {"items": [{"key": "k", "value": "v"}]}
    cloud.refused("POST", path, body, 412, "conditionNotMet")
    old = cloud.call_ok("GET", COMPUTE)["commonInstanceMetadata"]["fingerprint"]
    cloud.call_and_wait("POST", path, body | {"fingerprint": old})
    cloud.refused("POST", path, body | {"fingerprint": old}, 412, "conditionNotMet")
    now = cloud.call_ok("GET", COMPUTE)["commonInstanceMetadata"]["fingerprint"]
    cloud.call_and_wait("POST", path, {"items": [], "fingerprint": now})


def test_a_nat_is_part_of_its_router(cloud: EmulatedCloud, net: str) -> None:
    path, router = f"{REGIONAL}/routers/router", {"name": "router", **NETWORK}
    cloud.call_and_wait("POST", f"{REGIONAL}/routers", router)
    cloud.call_and_wait("PATCH", path, cloud.call_ok("GET", path) | {"nats": [NAT]})  # the whole, as gcloud does
    assert cloud.call_ok("GET", path)["nats"] == [NAT]
    cloud.call_and_wait("PUT", path, router)
    assert "nats" not in cloud.call_ok("GET", path)
    cloud.refused("PATCH", path, {"nats": [{"name": "nat"}]}, 400, "natIpAllocateOption")


def test_a_network_in_use_stays(cloud: EmulatedCloud) -> None:
    cloud.create_network("used", internal=False)
    cloud.refused("DELETE", f"{GLOBAL}/networks/used", None, 400, "resourceInUseByAnotherResource")
    cloud.create_node("user", "used")
    cloud.refused("DELETE", f"{REGIONAL}/subnetworks/used", None, 400, "nodes/user")
    cloud.delete(f"{NODES}/user")
    wait_for(lambda: cloud.call("DELETE", f"{REGIONAL}/subnetworks/used")[0] == 200, "it is in use no more")
    wait_for(lambda: cloud.call("GET", f"{REGIONAL}/subnetworks/used")[0] == 404, "its end")
    cloud.delete(f"{GLOBAL}/firewalls/used-ssh")
    cloud.delete(f"{GLOBAL}/networks/used")


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
    cloud: EmulatedCloud, net: str, path: str, body: dict[str, Any], status: int, words: str
) -> None:
    if "subnetworks" in path or "firewalls" in path:
        body = {"name": "x"} | NETWORK | body
    cloud.refused("POST", f"{COMPUTE}/{path}", body, status, words)


def test_a_resource_being_made_cannot_be_used_changed_or_deleted_yet(cloud: EmulatedCloud) -> None:
    with cloud.settings(operation_seconds=30):
        cloud.call_ok("POST", f"{GLOBAL}/networks", {"name": "slow", "autoCreateSubnetworks": False})
        body = {"name": "r", "network": f"{PROJECT}/global/networks/slow"}
        cloud.refused("POST", f"{REGIONAL}/routers", body, 400, "resourceNotReady")
        cloud.refused("PATCH", f"{GLOBAL}/networks/slow", {"mtu": 1500}, 400, "resourceNotReady")
        cloud.refused("DELETE", f"{GLOBAL}/networks/slow", None, 400, "resourceNotReady")


def test_lists_are_filtered_and_paged(cloud: EmulatedCloud) -> None:
    for name in ("list-a", "list-b"):
        cloud.call_and_wait("POST", f"{GLOBAL}/networks", {"name": name, "autoCreateSubnetworks": False})
    path = f"{GLOBAL}/networks?filter=name%20eq%20list-.*"
    first = cloud.call_ok("GET", f"{path}&maxResults=1")
    second = cloud.call_ok("GET", f"{path}&pageToken={first['nextPageToken']}")
    assert [network["name"] for network in first["items"] + second["items"]] == ["list-a", "list-b"]
    cloud.refused("GET", f"{GLOBAL}/networks?filter=a%20AND%20b", None, 400)


def test_services_are_enabled(cloud: EmulatedCloud) -> None:
    usage = f"serviceusage/v1/{PROJECT}/services"
    assert cloud.call_ok("GET", f"{usage}/artifactregistry.googleapis.com")["state"] == "DISABLED"
    operation = cloud.call_ok("POST", f"{usage}:batchEnable", {"serviceIds": ["artifactregistry.googleapis.com"]})
    assert operation["name"].startswith("operations/")
    metadata = cloud.call_ok("GET", f"serviceusage/v1/{operation['name']}")["metadata"]
    assert metadata == {"resourceNames": ["services/artifactregistry.googleapis.com"]}
    cloud.call_ok("POST", f"{usage}/oslogin.googleapis.com:disable", {})
    enabled = cloud.call_ok("GET", f"{usage}?filter=state:ENABLED")["services"]
    names = {service["config"]["name"] for service in enabled}
    assert {"artifactregistry.googleapis.com", "storage.googleapis.com", "tpu.googleapis.com"} <= names
    names = [f"{PROJECT}/services/{name}.googleapis.com" for name in ("tpu", "oslogin")]
    got = cloud.call_ok("GET", f"{usage}:batchGet?names={names[0]}&names={names[1]}")["services"]
    assert [service["state"] for service in got] == ["ENABLED", "DISABLED"]
    cloud.refused("POST", f"{usage}/tpus.googleapis.com:enable", {}, 403)
    cloud.refused("POST", f"{usage}:batchEnable", {"serviceIds": ["tpu.googleapis.com"] * 21}, 400, "at most 20")
    cloud.refused("GET", f"{usage}:batchGet?names=" + "&names=".join([names[0]] * 31), None, 400, "at most 30")


def test_a_stale_etag_is_a_conflict(cloud: EmulatedCloud) -> None:
    crm = f"cloudresourcemanager/v3/{PROJECT}"
    policy = cloud.call_ok("POST", f"{crm}:getIamPolicy", {})
    policy["bindings"] = [{"role": "roles/viewer", "members": ["user:a@example.com"]}]
    changed = cloud.call_ok("POST", f"{crm}:setIamPolicy", {"policy": policy})
    assert changed["bindings"] == policy["bindings"]
    assert changed["etag"] != policy["etag"]
    old = f"cloudresourcemanager/v1/{PROJECT}:setIamPolicy"
    cloud.refused("POST", old, {"policy": policy}, 409, "ABORTED")


def test_service_accounts(cloud: EmulatedCloud) -> None:
    account = cloud.call_ok("POST", ACCOUNTS, {"accountId": "runner", "serviceAccount": {"displayName": "Runner"}})
    path = f"{ACCOUNTS}/{account['email']}"
    assert account["email"] == "runner@slipway-local.iam.gserviceaccount.com"
    cloud.refused("POST", ACCOUNTS, {"accountId": "runner"}, 409)
    cloud.refused("POST", ACCOUNTS, {"accountId": "no"}, 400)
    wait_for(lambda: cloud.call("GET", path)[0] == 200, "IAM shows it, after a while")
    assert cloud.call_ok("GET", path) == account
    assert cloud.call_ok("GET", ACCOUNTS)["accounts"][1:] == [account]  # Compute's own comes first
    bindings = {"bindings": [{"role": "roles/tpu.admin", "members": [f"serviceAccount:{account['email']}"]}]}
    crm = f"cloudresourcemanager/v1/{PROJECT}:setIamPolicy"
    cloud.call_ok("POST", crm, {"policy": bindings})
    cloud.call_ok("DELETE", path)
    cloud.refused("GET", path, None, 404)
    cloud.refused("POST", crm, {"policy": bindings}, 400)


def test_a_custom_role_is_made_changed_and_deleted(cloud: EmulatedCloud) -> None:
    body = {"roleId": "slipwayWatchdog", "role": {"title": "w", "includedPermissions": ["tpu.nodes.delete"]}}
    path, made = f"{ROLES}/slipwayWatchdog", cloud.call_ok("POST", ROLES, body)
    assert made["name"] == f"{PROJECT}/roles/slipwayWatchdog"
    cloud.refused("POST", ROLES, body, 409)
    cloud.refused("POST", ROLES, {"roleId": "no good"}, 400)
    queued = {"roleId": "queued", "role": {"includedPermissions": ["tpu.queuedresources.delete"]}}
    words = "Permission tpu.queuedresources.delete is not valid."  # they have none of their own
    assert cloud.refused("POST", ROLES, queued, 400) == words
    more = {"includedPermissions": ["tpu.nodes.delete", "tpu.nodes.get"]}
    changed = cloud.call_ok("PATCH", f"{path}?updateMask=includedPermissions", more)
    assert (changed["title"], len(changed["includedPermissions"])) == ("w", 2)
    assert [role["name"] for role in cloud.call_ok("GET", ROLES)["roles"]] == [made["name"]]
    assert cloud.call_ok("DELETE", path)["deleted"]
    assert cloud.call_ok("GET", ROLES) == {}
    cloud.refused("GET", f"{ROLES}/other", None, 404)


def test_a_caller_with_a_role_on_a_service_account_alone(cloud: EmulatedCloud) -> None:
    path = f"iam/v1/{cloud.call_ok('POST', ACCOUNTS, {'accountId': 'single-account'})['name']}"
    wait_for(lambda: cloud.call("GET", path)[0] == 200, "the account is visible")
    binding = {"role": "roles/iam.serviceAccountUser", "members": ["user:you@example.com"]}
    cloud.call_ok("POST", f"{path}:setIamPolicy", {"policy": {"bindings": [binding]}})
    wanted = {"permissions": ["iam.serviceAccounts.actAs", "iam.serviceAccounts.delete"]}
    with cloud.settings(caller_roles=[]):
        held = wait_for(lambda: cloud.call_ok("POST", f"{path}:testIamPermissions", wanted).get("permissions"), "it")
        assert held == ["iam.serviceAccounts.actAs"]
        assert cloud.call_ok("POST", f"cloudresourcemanager/v1/{PROJECT}:testIamPermissions", wanted) == {}


def test_another_project_is_forbidden(cloud: EmulatedCloud) -> None:
    apis = ("compute/v1", "cloudresourcemanager/v1", "cloudresourcemanager/v3")
    for path in (*(f"{api}/projects/other" for api in apis), "compute/v1/projects/other/global/networks",
                 "tpu/v2/projects/other/locations/us-central1-a/nodes", "storage/v1/b?project=other"):  # fmt: skip
        cloud.refused("GET", path, None, 403)

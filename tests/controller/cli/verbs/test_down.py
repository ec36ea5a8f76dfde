"""`down` deletes the pod, `down --all` everything that is ours; the emulated cloud's whole state is compared."""

import json
from typing import Any

import pytest

from tests.controller.conftest import ECHO_COMMAND, SlipwayCli, comparable_state
from tests.controller.localcloud.harness import COMPUTE, PROJECT, REGION, EmulatedCloud

pytestmark = pytest.mark.e2e
KEEP = "cleanup.on_success=keep"
POD = ["tpu.accelerator_type=v5litepod-8", "mesh.data=8", ECHO_COMMAND]
GLOBAL = f"{COMPUTE}/global"
REGIONAL = f"{COMPUTE}/regions/{REGION}"


@pytest.fixture
def cloud(slipway: SlipwayCli) -> EmulatedCloud:
    """The emulated cloud of these tests by hand."""
    slipway.cloud()
    found = EmulatedCloud(slipway.home / "localcloud")
    found.establish()
    return found


def state(slipway: SlipwayCli) -> dict[str, Any]:
    return comparable_state(slipway.cloud().get("state"))


def added(before: dict[str, Any], after: dict[str, Any]) -> dict[str, list[str]]:
    """Names of what is new, by kind; everything that was there must be there still, unaltered."""
    for kind, things in before.items():
        if kind == "policy":
            continue  # the project's own is altered, and compared once it is put back
        assert things == {name: after[kind].get(name) for name in things}, kind
    new = {kind: sorted(set(things) - set(before.get(kind, {}))) for kind, things in after.items()}
    return {kind: names for kind, names in new.items() if names}


def leaves(names: list[str]) -> list[str]:
    return sorted(name.rpartition("/")[2] for name in names)


def someone_else(cloud: EmulatedCloud) -> None:
    """What others have in the project: a network with all its parts, an account, a binding, a bucket, a TPU."""
    cloud.create_network("theirs")
    router = {"name": "theirs", "network": f"{PROJECT}/global/networks/theirs"}
    nat = {"name": "theirs", "natIpAllocateOption": "AUTO_ONLY"}
    nat["sourceSubnetworkIpRangesToNat"] = "ALL_SUBNETWORKS_ALL_IP_RANGES"
    cloud.call_and_wait("POST", f"{REGIONAL}/routers", {**router, "nats": [nat]})
    cloud.call_ok("POST", f"iam/v1/{PROJECT}/serviceAccounts", {"accountId": "theirs-too"})
    binding = {"role": "roles/logging.logWriter", "members": ["user:someone@example.com"]}
    crm = f"cloudresourcemanager/v1/{PROJECT}:setIamPolicy"
    cloud.call_ok("POST", crm, {"policy": {"bindings": [binding]}})
    cloud.call_ok("POST", "storage/v1/b?project=slipway-local", {"name": "theirs-bucket", "location": "US"})
    cloud.send("POST", "upload/storage/v1/b/theirs-bucket/o?uploadType=media&name=precious", b"x")
    cloud.create_node("theirs", "theirs")


def test_down_leaves_what_is_shared_and_down_all_nothing(
    slipway: SlipwayCli, cloud: EmulatedCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    someone_else(cloud)
    before, told = state(slipway), len(slipway.mutations())
    assert slipway("up", KEEP, *POD)[0] == 0

    code, out, _ = slipway("down", *POD)
    assert code == 0
    new = added(before, state(slipway))
    subnet, inside = f"slipway-{REGION}", f"slipway-allow-internal-{REGION}"
    assert leaves(new.pop("compute")) == sorted(["slipway", "slipway-allow-ssh", inside, subnet, subnet])
    bucket = f"slipway-local-slipway-{REGION}"
    assert new.pop("bucket") == new.pop("objects") == [bucket]
    assert leaves(new.pop("policy")) == [bucket]
    assert new == {"serviceAccount": ["slipway-runner@slipway-local.iam.gserviceaccount.com"]}
    assert max(map(len, out.splitlines())) <= 80
    stays = " ".join(out[out.index("kept for the next run:") :].split())
    titles = ["service account slipway-runner", "roles of slipway-runner", "network slipway"]
    titles += [f"bucket {bucket}", f"bucket roles of slipway-runner on {bucket}", f"firewall {inside}"]
    titles += [*(f"{part} {subnet} in {REGION}" for part in ("subnet", "router", "nat")), "firewall slipway-allow-ssh"]
    assert [title for title in titles if title not in stays] == []
    assert "`slipway down --all` deletes them too" in stays

    code, out, _ = slipway("down", "--all", "--yes", *POD)
    assert code == 0
    assert state(slipway) == before
    enabled = "the APIs stay enabled, which costs nothing; to disable those that you do not need: gcloud services "
    assert enabled in " ".join(out.split())
    assert [m for m in slipway.mutations()[told:] if "theirs" in m] == []

    told = len(slipway.mutations())
    nothing = "\nnothing to delete: found no resources created by Slipway\n"
    assert slipway("down", "--all", "--yes", *POD)[1].endswith(nothing)
    assert slipway.json("down", "--all", "--yes", *POD)["deleted"] == []
    assert slipway.mutations()[told:] == []


def test_a_project_that_was_never_used_has_nothing_to_delete(slipway: SlipwayCli) -> None:
    """Compute Engine is off there. Where it is on and a server does not know it yet, that one is asked again."""
    code, out, err = slipway("down", "--all", "--yes", *POD)
    assert (code, err) == (0, "")
    assert "nothing to delete" in out
    EmulatedCloud(slipway.cloud().state).establish()
    fault = {"kind": "http", "status": 403, "match": "GET .*/aggregated/subnetworks", "reason": "SERVICE_DISABLED"}
    slipway.cloud().post("faults", {"key": "flap", "faults": [{**fault, "times": 5}]})
    told = len(slipway.cloud().requests())
    code, _, err = slipway("down", "--all", "--yes", *POD)
    assert code == 0, err
    asked = [r["status"] for r in slipway.cloud().requests()[told:] if r["path"].endswith("/aggregated/subnetworks")]
    assert asked[:6] == [403] * 5 + [200]


@pytest.mark.parametrize("told", ["field", "warning"])
def test_a_verb_that_finds_nothing_says_where_google_could_not_look(slipway: SlipwayCli, told: str) -> None:
    """Else it would say that nothing is billed while a pod is there."""
    emulated = EmulatedCloud(slipway.cloud().state)
    emulated.establish()
    faults = [{"kind": "unreachable", "place": place, "told": told} for place in ("us-east5-b", "us-west4")]
    slipway.cloud().post("faults", {"key": "dark", "faults": faults})
    where = [f"{kind} in us-east5-b" for kind in ("nodes", "instances", "instanceGroupManagers", "disks")]
    where.append("routers in us-west4")
    for words in (["orphans"], ["status", "--all"], ["down", *POD], ["down", "--all", "--yes", *POD]):
        code, out, err = slipway(*words)
        assert code == 2, words
        assert "Google did not list everything (" in err, words
        assert all(one in err for one in where if words[0] == "orphans"), err
        assert ("(as far as Google could look)" in out) == (words[0] in ("orphans", "status")), out
    code, out, err = slipway("orphans", "--json")
    assert code == 2, err
    assert set(where) < set(json.loads(out)["unlisted"])
    emulated.call_ok("DELETE", "emulator/faults")
    assert slipway("orphans")[0] == slipway("status", "--all")[0] == slipway("down", *POD)[0] == 0


@pytest.mark.deep
def test_all_that_can_be_made_goes_again_also_where_the_config_names_it_no_more(
    slipway: SlipwayCli, cloud: EmulatedCloud
) -> None:
    """Parts in two regions, a rule for this machine, a disk, a budget; shared parts by a config of one region."""
    someone_else(cloud)
    before = state(slipway)
    kept = ["cloud.bucket_location=us", "cloud.bucket=slipway-everything", "network.laptop=auto", "tpu.data_disk_gb=10"]
    kept += ["cloud.billing_budget={account: 012345-6789AB-CDEF01, usd: 10, thresholds: [0.5]}"]
    more = ["tpu.fallback_zones=[us-west4-a]"]
    assert slipway("up", KEEP, *POD, *kept, *more)[0] == 0
    new = added(before, state(slipway))
    there = leaves(new["compute"])
    assert {"slipway-us-west4", "slipway-allow-internal-us-west4", "slipway-allow-laptop"} <= set(there)
    assert slipway("down", *POD, *kept, *more)[0] == 0  # zones are part of the pod's name
    code, _, err = slipway("down", "--all", "--yes", *POD, *kept)
    assert (code, err) == (0, "")
    assert state(slipway) == before


def refused(slipway: SlipwayCli, *by: str) -> None:
    """`down --all` names what is in the way and has done nothing."""
    before, told = state(slipway), len(slipway.mutations())
    code, out, err = slipway("down", "--all", "--yes", *POD)
    assert (code, out) == (2, "")
    assert "nothing was deleted; still in use: " in err
    for words in by:
        assert words in err
    assert state(slipway) == before
    assert slipway.mutations()[told:] == []


def test_what_something_else_uses_is_refused_by_name(slipway: SlipwayCli, cloud: EmulatedCloud) -> None:
    assert slipway("up", *POD)[0] == 0
    zone, network = f"{REGION}-a", f"{PROJECT}/global/networks/slipway"
    subnet = f"{PROJECT}/regions/{REGION}/subnetworks/slipway-{REGION}"
    interfaces = [{"network": network, "subnetwork": subnet}]
    instance = {"name": "their-vm", "machineType": "e2-small", "networkInterfaces": interfaces}
    cloud.call_and_wait("POST", f"{COMPUTE}/zones/{zone}/instances", instance)
    rule = {"name": "their-rule", "network": network, "allowed": [{"IPProtocol": "tcp", "ports": ["8888"]}]}
    cloud.call_and_wait("POST", f"{GLOBAL}/firewalls", rule)
    cloud.call_and_wait("POST", f"{REGIONAL}/routers", {"name": "their-vpn", "network": network})
    node = {**cloud.node_body("slipway"), "networkConfig": {"network": network, "subnetwork": subnet}}
    cloud.call_and_wait("POST", f"tpu/v2/{PROJECT}/locations/{zone}/nodes?nodeId=their-pod", node)
    cloud.create_network("theirs")
    account = "slipway-runner@slipway-local.iam.gserviceaccount.com"
    elsewhere = {**cloud.node_body("theirs"), "serviceAccount": {"email": account}}
    cloud.call_and_wait("POST", f"tpu/v2/{PROJECT}/locations/{zone}/nodes?nodeId=elsewhere", elsewhere)
    refused(
        slipway,
        f"instance their-vm in {zone} is in network slipway",
        "firewall rule their-rule is in network slipway",
        f"router their-vpn in {REGION} is in network slipway",
        f"TPU their-pod in {zone} is in network slipway",
        f"TPU elsewhere in {zone} runs as {account}",
    )
    assert slipway("down", *POD)[0] == 0  # the pod alone is nobody else's
    cloud.call_and_wait("DELETE", f"{COMPUTE}/zones/{zone}/instances/their-vm")
    cloud.call_and_wait("DELETE", f"{GLOBAL}/firewalls/their-rule")
    cloud.call_and_wait("DELETE", f"{REGIONAL}/routers/their-vpn")
    refused(slipway, "their-pod")
    cloud.call_and_wait("DELETE", f"tpu/v2/{PROJECT}/locations/{zone}/nodes/their-pod")
    refused(slipway, "elsewhere")
    cloud.call_and_wait("DELETE", f"tpu/v2/{PROJECT}/locations/{zone}/nodes/elsewhere")
    assert slipway("down", "--all", "--yes", *POD)[0] == 0
    assert not [name for name in state(slipway)["compute"] if "slipway" in name.rpartition("/")[2]]


@pytest.mark.deep
def test_a_network_half_made_by_hand_is_used_and_left(slipway: SlipwayCli, cloud: EmulatedCloud) -> None:
    """The network, one subnet and a router with its NAT were there: only what was missing is made, and goes again."""
    link = f"{PROJECT}/global/networks/slipway"
    network = {"name": "slipway", "autoCreateSubnetworks": False, "description": "lab"}
    cloud.call_and_wait("POST", f"{GLOBAL}/networks", network)
    subnet = {"name": f"slipway-{REGION}", "network": link, "ipCidrRange": "10.9.0.0/20", "privateIpGoogleAccess": True}
    cloud.call_and_wait("POST", f"{REGIONAL}/subnetworks", subnet)
    nat = {"name": "lab", "natIpAllocateOption": "AUTO_ONLY"}
    nat["sourceSubnetworkIpRangesToNat"] = "ALL_SUBNETWORKS_ALL_IP_RANGES"
    cloud.call_and_wait("POST", f"{REGIONAL}/routers", {"name": "lab", "network": link, "nats": [nat]})
    before, told = state(slipway), len(slipway.mutations())
    assert slipway("up", *POD)[0] == 0
    kinds = added(before, state(slipway))
    assert leaves(kinds["compute"]) == [f"slipway-allow-internal-{REGION}", "slipway-allow-ssh"]
    code, out, _ = slipway("down", "--all", "--yes", *POD)
    assert code == 0
    assert f"not created by Slipway, left unchanged: network slipway, subnet slipway-{REGION} in {REGION}" in out
    assert state(slipway) == before
    assert [m for m in slipway.mutations()[told:] if "/routers" in m or "/subnetworks" in m] == []


def test_a_bucket_of_ones_own_keeps_what_runs_wrote(slipway: SlipwayCli, cloud: EmulatedCloud) -> None:
    bucket = f"slipway-local-slipway-{REGION}"
    cloud.call_ok("POST", "storage/v1/b?project=slipway-local", {"name": bucket, "location": REGION})
    elsewhere = {"name": "slipway-local-slipway-us-west4", "location": "US-WEST4", "labels": {"managed-by": "slipway"}}
    cloud.call_ok("POST", "storage/v1/b?project=slipway-local", elsewhere)
    before = state(slipway)
    assert slipway("up", *POD)[0] == 0
    code, out, _ = slipway("down", "--all", "--yes", *POD)
    assert code == 0
    assert "gs://slipway-local-slipway-us-west4 stays, with results of runs elsewhere" in out
    assert slipway.json("down", "--all", "--yes", *POD)["other_buckets"] == [elsewhere["name"]]
    assert f"data of runs stays in gs://{bucket}, under assets/, capacity/, code/, index/, pods/ and runs/" in out
    after = state(slipway)
    kept = after.pop("objects")[bucket]
    assert {name.partition("/")[0] for name in kept} <= {"assets", "capacity", "code", "index", "pods", "runs"}
    assert before.pop("objects")[bucket] == []
    assert after == before


@pytest.mark.deep
def test_a_missing_internal_rule_is_found_by_verify_and_made_by_up(slipway: SlipwayCli, cloud: EmulatedCloud) -> None:
    """Without it `jax.distributed` would hang; the probe of worker 0's port says so at once."""
    two = ["tpu.accelerator_type=v4-16", "tpu.zone=us-central2-b", "mesh.data=8", KEEP, ECHO_COMMAND]
    assert slipway("up", *two)[0] == 0
    rule = f"{GLOBAL}/firewalls/slipway-allow-internal-us-central2"
    cloud.call_and_wait("DELETE", rule)
    code, out, _ = slipway("verify", "--json", *two)
    assert code == 4
    workers = json.loads(out)["workers"]
    assert [row["wrong"] for row in workers] == [["reaches worker 0"]] * 2
    assert workers[0]["reaches worker 0"] == "worker 0 received nothing from worker 1"
    plan = slipway.json("plan", *two)
    [missing] = [r["id"] for r in plan["resources"] if r["action"] == "create" and r["id"].startswith("firewall/")]
    assert missing == "firewall/slipway-allow-internal-us-central2"
    (slipway.repository / "hello.txt").write_text("another run\n")  # the first one has finished
    assert slipway("up", *two)[0] == 0
    assert slipway("verify", *two)[0] == 0


ONE = ["tpu=v5litepod_8", "tpu.capacity=on_demand", KEEP, ECHO_COMMAND]


@pytest.mark.deep
def test_a_stopped_pod_is_started_by_the_next_up(slipway: SlipwayCli) -> None:
    code, _, err = slipway("stop", *ONE)
    assert (code, "is absent or not ready, so it cannot be stopped" in err) == (2, True)
    assert slipway("up", *ONE)[0] == 0
    assert "is stopped; `slipway up` starts it" in slipway("stop", *ONE)[1]
    assert slipway.json("status", *ONE)["pod"]["state"] == "stopped"
    assert "is already stopped" in slipway("stop", *ONE)[1]
    code, out, _ = slipway("up", *ONE, "run.seed=7")
    assert code == 0
    assert "the node is stopped; starting it" in out
    assert "hello from worker 0" in out
    creations = [m for m in slipway.mutations() if m.startswith("POST /tpu/") and "queuedResources" in m]
    assert len(creations) == 1

"""Networks, subnets, routers, NATs, firewall rules: made, adopted, repaired, deleted; rules that stand in for ours."""

import json
from contextlib import nullcontext
from typing import Any

import pytest

from conf.schema.cloud import IAP_RANGE
from controller.core.errors import CloudError, ConfigError
from controller.gcp.answers import admits
from controller.reconcile import destroy
from controller.resources.vpc import Subnet
from tests.controller.localcloud.harness import COMPUTE, PROJECT, REGION
from tests.controller.resources.conftest import EmulatedProject

REGIONAL = f"{COMPUTE}/regions/{REGION}"
EVERY = {"natIpAllocateOption": "AUTO_ONLY", "sourceSubnetworkIpRangesToNat": "ALL_SUBNETWORKS_ALL_IP_RANGES"}


def network(project: EmulatedProject, **body: Any) -> str:
    """A network made by hand; returns its full name."""
    project.cloud.call_and_wait("POST", f"{COMPUTE}/global/networks", {"name": project.tag, **body})
    return f"{PROJECT}/global/networks/{project.tag}"


def test_from_nothing_and_back(project: EmulatedProject) -> None:
    """What Google still counts as in use is deleted later: Compute lists a deleted TPU's address for some minutes."""
    before = project.state()
    project.create_shared()
    assert project.planned_actions() == {}
    told = len(project.cloud.request_log())
    project.create_shared()
    assert [r["path"] for r in project.cloud.request_log()[told:] if r["mutating"]] == []
    subnet = project.cloud.call_ok("GET", f"{REGIONAL}/subnetworks/{project.tag}-{REGION}")
    assert (subnet["ipCidrRange"], subnet["privateIpGoogleAccess"]) == ("10.64.176.0/20", True)
    inside = project.cloud.call_ok("GET", f"{COMPUTE}/global/firewalls/{project.tag}-allow-internal-{REGION}")
    assert inside["sourceRanges"] == ["10.64.176.0/20"]
    message = "The resource 'x' is already being used by 'projects/p/zones/z/instances/t1v-n-1'"
    for kind in ("regions/[^/]+/subnetworks", "global/networks"):
        project.inject_fault(kind="http", status=400, match=f"DELETE .*/{kind}/{project.tag}", times=4, message=message)
    destroy(project.shared_resources(), project.context)
    assert project.state() == before


def test_several_regions_do_not_overlap(project: EmulatedProject) -> None:
    project.create_shared("zones=europe-west4-b,us-west4-a")
    found = project.cloud.call_ok("GET", f"{COMPUTE}/aggregated/subnetworks")["items"]
    mine = [s for scope in found.values() for s in scope.get("subnetworks", ()) if s["network"].endswith(project.tag)]
    assert len({s["ipCidrRange"] for s in mine}) == 3  # the emulated cloud, as Google, refuses an overlap
    for region in (REGION, "europe-west4", "us-west4"):
        router = project.cloud.call_ok("GET", f"{COMPUTE}/regions/{region}/routers/{project.tag}-{region}")
        assert len(router["nats"]) == 1


DEFAULT = ("network=default", "network.name=TAG")
CUSTOM = ("global/networks", {"name": "TAG", "autoCreateSubnetworks": False, "mtu": 1460, "description": "mine"})
AUTO = ("global/networks", {"name": "TAG"})
LINK = {"network": f"{PROJECT}/global/networks/TAG"}
SUBNET = (f"regions/{REGION}/subnetworks", {"name": "by-hand", **LINK, "ipCidrRange": "10.77.0.0/24"})
ROUTER = (f"regions/{REGION}/routers", {"name": "TAG-simply", **LINK, "nats": [{"name": "simply-nat", **EVERY}]})
BY_HAND: dict[str, tuple[list[tuple[str, dict[str, Any]]], tuple[str, ...], str]] = {
    "a half made network": ([CUSTOM], (), "networks/TAG"),
    "an auto network": ([AUTO], DEFAULT, "networks/TAG"),
    "a subnet": ([CUSTOM, SUBNET], ("network.subnet=by-hand",), "firewalls/TAG-allow-internal-us-central1"),
    "a NAT": ([AUTO, ROUTER], DEFAULT, ""),
}
"""What is there, the overrides, and something that must be there while a pod is; of a NAT no router of our own."""


@pytest.mark.parametrize("what", BY_HAND)
def test_what_was_made_by_hand_is_used_and_left_as_it_was(project: EmulatedProject, what: str) -> None:
    """A subnet keeps its range and gets its access back off; a router is not patched."""

    def state() -> dict[str, Any]:
        found = project.state()
        for name, thing in found["compute"].items():
            if "/subnetworks/" in name:
                thing.setdefault("privateIpGoogleAccess", False)  # off, whether it says so or says nothing
        return found

    made, words, there = BY_HAND[what]
    group = [word.replace("TAG", project.tag) for word in words]
    for collection, body in made:
        named = json.loads(json.dumps(body).replace("TAG", project.tag))
        project.cloud.call_and_wait("POST", f"{COMPUTE}/{collection}", named)
    before = state()
    project.create_shared(*group)
    assert project.planned_actions(*group) == {}
    if there:
        shown = project.cloud.call_ok("GET", f"{COMPUTE}/global/{there.replace('TAG', project.tag)}")
        assert shown.get("mtu", 1460) == 1460
        assert shown.get("sourceRanges", ["10.77.0.0/24"]) == ["10.77.0.0/24"]
    else:
        assert project.cloud.call("GET", f"{REGIONAL}/routers/{project.tag}-{REGION}")[0] == 404
    destroy(project.shared_resources(*group), project.context)
    assert state() == before


def test_a_subnet_made_by_hand_with_another_range_than_wanted_is_an_error(project: EmulatedProject) -> None:
    link = network(project, autoCreateSubnetworks=False)
    body = {"name": f"{project.tag}-{REGION}", "network": link, "ipCidrRange": "10.77.0.0/24"}
    project.cloud.call_and_wait("POST", f"{REGIONAL}/subnetworks", body)
    with pytest.raises(CloudError, match=r"not created by Slipway and differs \(cidr: 10.77.0.0/24 -> 10.5.0.0/20\)"):
        project.create_shared("network.cidr=10.5.0.0/20")


def test_a_subnet_without_ipv4_is_refused_by_name() -> None:
    """Google leaves `ipCidrRange` out of a subnet whose stack type is IPV6_ONLY."""
    subnet = Subnet(name="six", region="us-east5", network="net", block="10.0.0.0/20")
    with pytest.raises(CloudError, match=r"subnet six in us-east5 has no IPv4 range.*set network.subnet"):
        subnet.read({"network": "global/networks/net", "stackType": "IPV6_ONLY"})


def test_the_default_network_of_a_project_is_used_as_the_guides_do(project: EmulatedProject) -> None:
    group = ["network=default", f"network.name={project.tag}"]
    project.create_shared(*group)
    made = project.cloud.call_ok("GET", f"{COMPUTE}/global/networks/{project.tag}")
    assert made["autoCreateSubnetworks"] is True
    subnet = project.cloud.call_ok("GET", f"{REGIONAL}/subnetworks/{project.tag}")
    assert subnet["privateIpGoogleAccess"] is True
    assert project.planned_actions(*group) == {}
    destroy(project.shared_resources(*group), project.context)
    assert project.cloud.call("GET", f"{COMPUTE}/global/networks/{project.tag}")[0] == 404


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("routers/TAG-vpn", {}, ""),
        ("routers/TAG-us-central1", {}, "was not created by Slipway and has no NAT for subnet"),
        (
            "firewalls/TAG-allow-ssh",
            {"allowed": [{"IPProtocol": "udp"}]},
            "not created by Slipway and differs .* set net",
        ),
    ],
)
def test_what_others_made_is_never_altered(
    project: EmulatedProject, path: str, body: dict[str, Any], said: str
) -> None:
    """A router beside ours is none of our business; one of our name, or a rule, that does not do is an error."""
    collection, _, name = path.replace("TAG", project.tag).partition("/")
    where = f"{REGIONAL if collection == 'routers' else f'{COMPUTE}/global'}/{collection}"
    made = {"name": name, "network": network(project, autoCreateSubnetworks=False), **body}
    project.cloud.call_and_wait("POST", where, made)
    before = project.cloud.call_ok("GET", f"{where}/{name}")
    with pytest.raises(CloudError, match=said) if said else nullcontext():
        project.create_shared()
    assert project.cloud.call_ok("GET", f"{where}/{name}") == before
    if not said:
        assert len(project.cloud.call_ok("GET", f"{REGIONAL}/routers/{project.tag}-{REGION}")["nats"]) == 1


def test_what_drifted_is_repaired(project: EmulatedProject) -> None:
    project.create_shared()
    subnet = f"{REGIONAL}/subnetworks/{project.tag}-{REGION}"
    project.cloud.call_and_wait("POST", f"{subnet}/setPrivateIpGoogleAccess", {"privateIpGoogleAccess": False})
    project.cloud.call_and_wait("PATCH", f"{REGIONAL}/routers/{project.tag}-{REGION}", {"nats": []})
    rule = f"{COMPUTE}/global/firewalls/{project.tag}-allow-internal-{REGION}"
    project.cloud.call_and_wait("PATCH", rule, {"sourceRanges": ["10.1.2.0/24"]})
    assert sorted(project.planned_actions().values()) == ["create", "update", "update"]
    project.create_shared()
    assert project.planned_actions() == {}
    assert project.cloud.call_ok("GET", subnet)["privateIpGoogleAccess"] is True


def test_without_nat_there_is_no_router(project: EmulatedProject) -> None:
    assert not [r for r in project.shared_resources("network.nat=false") if r.kind in ("router", "nat")]


SSH = {"IPProtocol": "tcp", "ports": ["22"]}


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ({"allowed": [SSH], "sourceRanges": ["0.0.0.0/0"]}, True),
        ({"allowed": [SSH, {"IPProtocol": "icmp"}], "sourceRanges": ["35.235.0.0/16", "10.0.0.0/8"]}, True),
        ({"allowed": [{"IPProtocol": "all"}], "sourceRanges": ["35.235.240.0/20"]}, True),
        ({"allowed": [{"IPProtocol": "tcp", "ports": ["1-1024"]}], "sourceRanges": ["35.235.240.0/20"]}, True),
        ({"allowed": [SSH], "sourceRanges": ["35.235.240.0/20"], "targetTags": ["other", "slipway"]}, True),
        ({"allowed": [SSH], "sourceRanges": ["35.235.240.0/20"], "targetTags": ["other"]}, False),
        ({"allowed": [SSH], "sourceRanges": ["35.235.240.0/20"], "targetServiceAccounts": ["a@b"]}, False),
        ({"allowed": [SSH], "sourceRanges": ["35.235.240.0/21"]}, False),
        ({"allowed": [SSH], "sourceRanges": ["::/0"]}, False),
        ({"allowed": [SSH], "sourceTags": ["bastion"]}, False),
        ({"allowed": [{"IPProtocol": "tcp", "ports": ["80", "443"]}], "sourceRanges": ["0.0.0.0/0"]}, False),
        ({"allowed": [{"IPProtocol": "udp"}], "sourceRanges": ["0.0.0.0/0"]}, False),
        ({"denied": [SSH], "sourceRanges": ["0.0.0.0/0"]}, False),
        ({"allowed": [SSH], "sourceRanges": ["0.0.0.0/0"], "disabled": True}, False),
        ({"allowed": [SSH], "sourceRanges": ["0.0.0.0/0"], "direction": "EGRESS"}, False),
    ],
)
def test_one_rule_admits_ssh_from_iap(rule: dict[str, Any], expected: bool) -> None:
    assert admits(rule, ("tcp:22",), ("35.235.240.0/20",), ("slipway",)) is expected


def test_all_ports_are_not_some() -> None:
    rule = {"allowed": [{"IPProtocol": "tcp", "ports": ["0-65535"]}], "sourceRanges": ["10.128.0.0/9"]}
    assert admits(rule, ("tcp",), ("10.128.0.0/20",), ())
    assert not admits(rule | {"allowed": [SSH]}, ("tcp",), ("10.128.0.0/20",), ())


def test_googles_own_ssh_rule_of_the_default_network_does_the_work_and_is_told(project: EmulatedProject) -> None:
    """Every new project has `default-allow-ssh` for all the world, under the very name that ours would have."""
    project.cloud.call_and_wait("POST", f"{COMPUTE}/global/networks", {"name": project.tag})
    rule = {"name": f"{project.tag}-allow-ssh", "network": f"{PROJECT}/global/networks/{project.tag}", "allowed": [SSH]}
    project.cloud.call_and_wait("POST", f"{COMPUTE}/global/firewalls", rule | {"priority": 65534})
    group = ["network=default", f"network.name={project.tag}", "network.nat=false"]
    before = project.cloud.call_ok("GET", f"{COMPUTE}/global/firewalls/{project.tag}-allow-ssh")
    project.create_shared(*group)
    assert project.planned_actions(*group) == {}
    [note] = [note for note in project.notes if "whole internet" in note]
    assert f"gcloud compute firewall-rules update {project.tag}-allow-ssh --source-ranges=127.0.0.0/8" in note
    destroy(project.shared_resources(*group), project.context)
    assert project.cloud.call_ok("GET", f"{COMPUTE}/global/firewalls/{project.tag}-allow-ssh") == before


def test_what_lost_its_stand_in_is_made(project: EmulatedProject) -> None:
    project.create_shared()
    project.cloud.call_and_wait("DELETE", f"{COMPUTE}/global/firewalls/{project.tag}-allow-ssh")
    rule = {"name": f"{project.tag}-office", "network": f"{PROJECT}/global/networks/{project.tag}", "allowed": [SSH]}
    project.cloud.call_and_wait(
        "POST", f"{COMPUTE}/global/firewalls", rule | {"sourceRanges": ["127.0.0.0/8", IAP_RANGE]}
    )
    assert project.planned_actions() == {}
    project.cloud.call_and_wait("DELETE", f"{COMPUTE}/global/firewalls/{project.tag}-office")
    assert project.planned_actions() == {f"firewall/{project.tag}-allow-ssh": "create"}


def test_this_machine_is_admitted_beside_others_when_asked_for(project: EmulatedProject) -> None:
    project.context.find_public_ip = lambda: "8.8.4.4"
    auto = "network.laptop=auto"
    project.create_shared(auto)
    assert project.planned_actions(auto) == {}
    path = f"{COMPUTE}/global/firewalls/{project.tag}-allow-laptop"
    assert project.cloud.call_ok("GET", path)["sourceRanges"] == ["8.8.4.4/32"]
    project.context.find_public_ip = lambda: "9.9.9.9"
    assert list(project.planned_actions(auto).values()) == ["update"]
    project.create_shared(auto)
    assert project.cloud.call_ok("GET", path)["sourceRanges"] == ["8.8.4.4/32", "9.9.9.9/32"]
    project.context.find_public_ip = lambda: None
    with pytest.raises(ConfigError, match=r"network\.laptop: cannot determine"):
        project.create_shared(auto)
    destroy(project.shared_resources(auto), project.context)
    assert project.cloud.call("GET", path)[0] == 404


def test_a_range_of_this_machine_joins_the_rule(project: EmulatedProject) -> None:
    project.create_shared("network.laptop=8.8.4.0/24", "network.open_to_world=true")
    rule = project.cloud.call_ok("GET", f"{COMPUTE}/global/firewalls/{project.tag}-allow-ssh")
    assert set(rule["sourceRanges"]) == {"8.8.4.0/24", "0.0.0.0/0", "127.0.0.0/8", IAP_RANGE}

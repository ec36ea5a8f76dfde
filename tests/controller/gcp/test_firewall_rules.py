"""Which firewall rules admit what is wanted, and so stand in for ours."""

from typing import Any

import pytest

from conf.schema.infra.cloud import IAP_RANGE
from controller.core.errors import ConfigError
from controller.gcp.firewall_rules import admits
from controller.reconcile.reconciler import destroy
from tests.controller.localcloud.harness import COMPUTE, PROJECT
from tests.controller.resources.conftest import EmulatedProject

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

"""Firewall rules, as pure functions."""

import pytest

from controller.localcloud.apis.networks import ANY_PORT, LAPTOP_RANGE, FirewallRule, allows_tcp

SSH: FirewallRule = {"allowed": [{"IPProtocol": "tcp", "ports": ["22"]}], "sourceRanges": ["0.0.0.0/0"]}
INTERNAL: FirewallRule = {"allowed": [{"IPProtocol": "tcp"}, {"IPProtocol": "udp"}], "sourceRanges": ["10.0.0.0/16"]}
DENY: FirewallRule = {"denied": [{"IPProtocol": "all"}], "sourceRanges": ["0.0.0.0/0"]}


@pytest.mark.parametrize(
    ("rules", "admitted"),
    [
        ([], False),
        ([SSH], True),
        ([INTERNAL], False),
        ([SSH | {"disabled": True}], False),
        ([SSH | {"direction": "EGRESS"}], False),
        ([SSH | {"sourceRanges": ["35.235.240.0/20"]}], False),
        ([SSH | {"sourceRanges": ["127.0.0.0/8"]}], True),
        ([SSH | {"allowed": [{"IPProtocol": "tcp", "ports": ["20-30"]}]}], True),
        ([SSH | {"allowed": [{"IPProtocol": "tcp", "ports": ["80", "443"]}]}], False),
        ([SSH | {"allowed": [{"IPProtocol": "udp"}]}], False),
        ([SSH | {"allowed": [{"IPProtocol": "all"}]}], True),
        ([SSH | {"targetTags": ["pod"]}], True),
        ([SSH | {"targetTags": ["other"]}], False),
        ([SSH, DENY], False),
        ([SSH | {"priority": 900}, DENY], True),
        ([SSH, DENY | {"priority": 65534}], True),
        ([SSH | {"sourceRanges": ["::/0"]}], False),
    ],
)
def test_ssh_from_the_laptop(rules: list[FirewallRule], admitted: bool) -> None:
    assert allows_tcp(rules, source=LAPTOP_RANGE, ports=(22, 22), tags=["pod"]) is admitted


@pytest.mark.parametrize(
    ("rules", "admitted"),
    [
        ([SSH], False),
        ([INTERNAL], True),
        ([INTERNAL | {"sourceRanges": ["10.0.0.0/28"]}], False),
        ([INTERNAL | {"sourceRanges": ["10.0.0.0/28", "10.0.0.0/24"]}], True),
        ([INTERNAL | {"allowed": [{"IPProtocol": "tcp", "ports": ["8482"]}]}], False),
        ([INTERNAL | {"allowed": [{"IPProtocol": "tcp", "ports": ["0-65535"]}]}], True),
        ([INTERNAL | {"sourceRanges": [], "sourceTags": ["pod"]}], True),
        ([INTERNAL, DENY | {"denied": [{"IPProtocol": "tcp", "ports": ["8482"]}], "priority": 10}], False),
    ],
)
def test_workers_among_each_other(rules: list[FirewallRule], admitted: bool) -> None:
    assert allows_tcp(rules, source="10.0.0.0/24", ports=ANY_PORT, tags=["pod"]) is admitted

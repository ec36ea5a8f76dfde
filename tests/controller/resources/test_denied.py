"""A caller who may use what an admin has made, and make nothing."""

from __future__ import annotations

import re
from typing import Any

import pytest

from controller.core.errors import CloudError
from controller.gcp.operations import OperationFailedError
from tests.controller.localcloud.harness import COMPUTE, PROJECT, REGION
from tests.controller.resources.conftest import EmulatedProject

REGIONAL = f"{COMPUTE}/regions/{REGION}"
NAT = {"natIpAllocateOption": "AUTO_ONLY", "sourceSubnetworkIpRangesToNat": "ALL_SUBNETWORKS_ALL_IP_RANGES"}


def given(project: EmulatedProject) -> list[str]:
    return ["cloud.service_account=default", f"network.subnet={project.tag}-tpus"]


def by_admin(project: EmulatedProject, *, without: str = "") -> None:
    """A network with all that a pod needs, but for one part."""
    link = f"{PROJECT}/global/networks/{project.tag}"
    subnet = {"name": "TAG-tpus", "network": link, "ipCidrRange": "10.3.0.0/20", "privateIpGoogleAccess": True}
    everything: dict[str, tuple[str, dict[str, Any]]] = {
        "network": (f"{COMPUTE}/global/networks", {"name": project.tag, "autoCreateSubnetworks": False}),
        "subnet": (f"{REGIONAL}/subnetworks", subnet),
        "router": (f"{REGIONAL}/routers", {"name": project.tag, "network": link, "nats": [{"name": "out", **NAT}]}),
        "ssh": (f"{COMPUTE}/global/firewalls", rule("ssh", link, "tcp", "0.0.0.0/0", ["22"])),
        "inside": (f"{COMPUTE}/global/firewalls", rule("inside", link, "all", "10.0.0.0/8")),
    }
    project.cloud.call_ok(
        "POST", "storage/v1/b?project=slipway-local", {"name": f"{project.tag}-bucket", "location": REGION}
    )
    apis = {"serviceIds": list(project.config().cloud.apis)}
    project.cloud.call_ok("POST", f"serviceusage/v1/{PROJECT}/services:batchEnable", apis)
    for part, (path, body) in everything.items():
        if part == without:
            return  # what comes later needs it
        project.cloud.call_and_wait("POST", path, {**body, "name": body["name"].replace("TAG", project.tag)})


def rule(name: str, link: str, protocol: str, source: str, ports: list[str] | None = None) -> dict[str, Any]:
    allowed = {"IPProtocol": protocol, **({"ports": ports} if ports else {})}
    return {"name": f"TAG-{name}", "network": link, "allowed": [allowed], "sourceRanges": [source]}


def may_not(project: EmulatedProject, match: str) -> None:
    project.inject_fault(kind="http", status=403, match=f"^POST /{match}$", message="Required permission")


def test_what_an_admin_made_is_enough(project: EmulatedProject) -> None:
    by_admin(project)
    before, told = project.state(), len(project.cloud.request_log())
    may_not(project, f"{COMPUTE}/global/firewalls")  # the rule for the inside; there is one that does as well
    project.create_shared(*given(project))
    assert project.planned_actions(*given(project)) == {}
    assert [r["status"] for r in project.cloud.request_log()[told:] if r["mutating"]] == [403]
    assert project.state() == before


@pytest.mark.parametrize(
    ("without", "path", "command"),
    [
        ("network", f"{COMPUTE}/global/networks", "gcloud compute networks create TAG --subnet-mode=custom --mtu=8896"),
        (
            "subnet",
            f"{REGIONAL}/subnetworks",
            f"gcloud compute networks subnets create TAG-tpus --network=TAG --region={REGION} --range=10.64.176.0/20 "
            "--enable-private-ip-google-access",
        ),
        (
            "router",
            f"{REGIONAL}/routers",
            f"gcloud compute routers create TAG-{REGION} --network=TAG --region={REGION} --project=slipway-local && "
            f"gcloud compute routers nats create TAG-{REGION} --router=TAG-{REGION} ",
        ),
        (
            "inside",
            f"{COMPUTE}/global/firewalls",
            f"gcloud compute firewall-rules create TAG-allow-internal-{REGION} --allow=icmp,tcp,udp "
            "--source-ranges=10.3.0.0/20 --network=TAG",
        ),
    ],
)
def test_what_is_missing_is_told_as_the_command_for_an_admin(
    project: EmulatedProject, without: str, path: str, command: str
) -> None:
    by_admin(project, without=without)
    may_not(project, path)
    words = re.escape(command.replace("TAG", project.tag))
    with pytest.raises(CloudError, match=rf"you may not create it \(Required permission\); ask .* `{words}"):
        project.create_shared(*given(project))


def test_private_access_that_may_not_be_switched_on_is_a_note(project: EmulatedProject) -> None:
    by_admin(project)
    where = f"{REGIONAL}/subnetworks/{project.tag}-tpus"
    project.cloud.call_and_wait("POST", f"{where}/setPrivateIpGoogleAccess", {"privateIpGoogleAccess": False})
    may_not(project, f"{where}/setPrivateIpGoogleAccess")
    project.create_shared(*given(project))
    [note] = [note for note in project.notes if "private Google access is off" in note]
    assert f"gcloud compute networks subnets update {project.tag}-tpus --region={REGION} --enable-private-ip" in note


def test_an_operation_that_fails_late_is_told_with_its_reason(project: EmulatedProject) -> None:
    """Compute accepts the request, and its operation ends with an error."""
    answer = {"name": "o", "status": "DONE", "operationType": "insert"}
    answer["error"] = {"errors": [{"code": "QUOTA_EXCEEDED", "message": "Quota 'NETWORKS' exceeded. Limit: 5.0"}]}  # pyright: ignore[reportArgumentType]
    call = project.context.google.call

    def quota(api: str, method: str, **parameters: Any) -> dict[str, Any]:
        return answer if method == "networks.insert" else call(api, method, **parameters)

    project.context.google.call = quota  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(OperationFailedError, match=r"compute insert: 0 QUOTA_EXCEEDED: Quota 'NETWORKS' exceeded"):
        project.create_shared()

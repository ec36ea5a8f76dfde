"""The controller's requests, field by field, beside those that gcloud was seen to send for the same ends.

Each case names the command and every field in which we differ, with the reason. A difference that is not listed
fails, and so does a listed one that is none. Names are made equal first; a resource may be named in full or in short.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from controller.localcloud.http.discovery import Validation, load_discovery
from controller.reconcile import destroy, reconcile
from controller.resources.accounts import ServiceAccount
from controller.resources.bastion_vm import POD_LABEL, RUN_LABEL, Bastion
from tests.controller.gcloud.conftest import desired_resources, make_context
from tests.controller.localcloud.harness import COMPUTE, PROJECT, EmulatedCloud, run_localcloud
from tests.paths import ROOT

FIXTURES = ROOT / "tests" / "fixtures"
RECORDED: list[dict[str, Any]] = [
    json.loads(line)
    for name in ("gcloud_requests.jsonl", "gcloud_requests_here.jsonl")
    for line in (FIXTURES / name).read_text().splitlines()
]
REGION, ZONE = "us-central2", "us-central2-b"
COMMON = [
    "cloud.apis=[tpu.googleapis.com,compute.googleapis.com,storage.googleapis.com]",
    "network.ssh_source_ranges=[35.235.240.0/20]",
    f"tpu.zone={ZONE}",
    "tpu.accelerator_type=v4-8",
    "tpu.runtime_version=tpu-ubuntu2204-base",
    "mesh.data=4",
]
MINE = [
    *COMMON,
    "network.cidr=10.0.0.0/24",
    "network.name=net1",
    "network.subnet=sub1",
    "cloud.service_account=sa-runner",
    "cloud.bucket=bk1",
    "cloud.roles=[roles/storage.admin]",
    "cloud.bucket_roles=[roles/storage.objectAdmin]",
]
SPOT = ["tpu.provisioner=node", "tpu.capacity=spot", "tpu.external_ip=false", "tpu.name=n1"]
DEFAULT = [*COMMON, "network=default", "network.nat=false", "cloud.service_account=default", "cloud.bucket=bk1"]
ON_DEMAND_POD = [*DEFAULT, "tpu.provisioner=node", "tpu.capacity=on_demand", "tpu.name=n1"]
GROUP_POD = [
    *("tpu=v6e_8_ce", "tpu.zone=us-east5-b", "tpu.capacity=spot", "tpu.name=n1", "mesh.data=8", COMMON[0], COMMON[1]),
    *DEFAULT[len(COMMON) :],
]
QUEUED_POD = [*DEFAULT, "tpu.provisioner=queued", "tpu.capacity=spot", "tpu.valid_until_hours=6", "tpu.name=n1"]

SAME = {
    "/p1/": "/slipway-local/",
    "/p1:": "/slipway-local:",
    "/su/": "/serviceusage/",
    "/crm/": "/cloudresourcemanager/",
    "sa@p1.": "sa-runner@slipway-local.",
    "/r1": f"/net1-{REGION}",
    '"r1"': f'"net1-{REGION}"',
    '"nat1"': f'"net1-{REGION}"',
    "fw1": "net1-allow-ssh",
    '"runner"': '"sa-runner"',
    "runner@": "sa-runner@",
    "n2": "n1",
    "/q1": "/n1",
    '"q1"': '"n1"',
    '"qn1"': '"n1"',
    "us-central1": REGION,
    "v5litepod-8": "v4-8",
    "v2-alpha-tpuv5-lite": "tpu-ubuntu2204-base",
    '"email": "default"': '"email": "sa-runner@slipway-local.iam.gserviceaccount.com"',
    '["p1"]': '["slipway-local"]',
}
"""gcloud's words in the recording, and ours for the same thing. The longest is put in first."""

MARK = "says who made it, so that `down --all` deletes only what is ours"
WHOLE = "gcloud sends the router back as it read it; PATCH takes the fields that change"
ETAG = "whatever was read"
TIER = "the tier that was asked for: of a flex-start node the API does not tell it"
SWITCH = "our own dead man's switch, which deletes a pod that nobody uses"
LEAST = "icmp is not needed for SSH"
IN_PATH = "the place is in the path of the request"
FAMILY = "gcloud asks for the view of a family of images; the API takes the family's own name too"


@dataclass(frozen=True)
class Case:
    """One request: of `command` (its beginning) the one with this method and path, and how ours may differ from it."""

    command: str
    method: str
    path: str
    differs: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.method} {self.path} of {self.command}"


CASES = (
    Case("gcloud services enable tpu.googleapis.com compute", "POST", "services:batchEnable"),
    Case("gcloud compute networks create net1", "POST", "networks", {"body.description": MARK}),
    Case("gcloud compute networks create net1", "GET", "networks/net1"),
    Case("gcloud compute networks create default", "POST", "networks", {
        "body.description": MARK, "body.mtu": "what Google takes where none is given, in words",
    }),
    Case("gcloud compute networks subnets create sub1", "POST", "subnetworks", {"body.description": MARK}),
    Case("gcloud compute networks subnets create sub1", "GET", "subnetworks/sub1"),
    Case("gcloud compute networks subnets update default", "POST", "setPrivateIpGoogleAccess"),
    Case("gcloud compute routers create r1", "POST", "routers", {"body.description": MARK}),
    Case("gcloud compute routers create r1", "GET", "routers/r1"),
    Case("gcloud compute routers nats create nat1", "GET", "routers/r1"),
    Case("gcloud compute routers nats create nat1", "PATCH", "routers/r1", {
        f"body.{key}": WHOLE for key in ("creationTimestamp", "id", "kind", "name", "network", "region", "selfLink")
    }),
    Case("gcloud compute firewall-rules create fw1", "POST", "firewalls", {
        "body.description": MARK,
        "body.disabled": "false is the default; we name it so that a rule that was switched off is put right",
        "body.allowed[1].IPProtocol": LEAST,
        "body.targetTags[0]": "our own tag, which the pods carry",
    }),
    Case("gcloud compute firewall-rules create fw1", "GET", "firewalls/fw1"),
    Case("gcloud iam service-accounts create runner", "POST", "serviceAccounts", {
        "body.serviceAccount.description": MARK, "body.serviceAccount.displayName": "free text",
    }),
    Case("gcloud projects add-iam-policy-binding p1", "POST", ":getIamPolicy"),
    Case("gcloud projects add-iam-policy-binding p1", "POST", ":setIamPolicy", {"body.policy.etag": ETAG}),
    Case("gcloud storage buckets create gs://bk1", "POST", "/b", {
        "query.enableObjectRetention": "false is the default",
        "query.projection": "only shapes the answer, which is not used",
        "body.labels.managed-by": MARK,
        "body.iamConfiguration.publicAccessPrevention": "--public-access-prevention: nothing of a run is for everyone",
        "body.softDeletePolicy.retentionDurationSeconds": "--soft-delete-duration=0: else what is deleted is billed",
        **{f"body.lifecycle.rule[{i}].{key}": "--lifecycle-file: what is left over is dropped" for i, key in (
            (0, "action.type"), (0, "condition.age"), (1, "action.type"), (1, "condition.daysSinceNoncurrentTime"))},
    }),
    Case("gcloud storage buckets describe gs://bk1", "GET", "/b/bk1", {"query.projection": "no ACLs: there are none"}),
    Case("gcloud storage buckets add-iam-policy-binding gs://bk1", "GET", "/b/bk1/iam", {
        "query.fields": "gcloud asks for a part of the policy; we send the whole back as it came",
    }),
    Case("gcloud storage buckets add-iam-policy-binding gs://bk1", "PUT", "/b/bk1/iam", {
        "body.etag": ETAG, "body.resourceId": "output only; the policy is sent back as it came",
    }),
    Case("gcloud compute instances create i1", "POST", "instances", {
        "body.description": MARK, "body.labels.managed-by": MARK,
        "body.labels.slipway-run": "whose bastion it is", "body.labels.slipway-pod": "as above",
        "body.disks[0].initializeParams.sourceImage": FAMILY,
        "body.shieldedInstanceConfig.enableSecureBoot": "--shielded-secure-boot: compute.requireShieldedVm demands it",
    }),
    Case("gcloud compute instances create i1", "GET", "instances/i1"),
    Case("gcloud compute instances get-serial-port-output i1", "GET", "instances/i1/serialPort"),
    Case("gcloud compute instances delete i1", "DELETE", "instances/i1"),
    Case("gcloud compute tpus tpu-vm create n1 --accelerator-type=v4-8 --version=tpu-ubuntu2204-base --spot", "POST",
         "nodes", {
        "body.labels.x": "the recorded command's own", "body.labels.managed-by": MARK,
        "body.labels.slipway-capacity": TIER,
        "body.metadata.k": "the recorded command's own",
        "body.metadata.ssh-keys": "our key, which gcloud adds later, at the first ssh",
        "body.metadata.startup-script": SWITCH,
        "body.tags[0]": "our own tag, which the firewall rules aim at", "body.tags[1]": "the recorded command has two",
    }),
    Case("gcloud compute tpus tpu-vm describe n1", "GET", "nodes/n1"),
    Case("gcloud compute tpus tpu-vm delete n2", "DELETE", "nodes/n2"),
    Case("gcloud compute tpus queued-resources create q1 --node-id=qn1", "POST", "queuedResources", {
        f"body.tpu.nodeSpec[0].node.{key}": reason for key, reason in {
            "labels.managed-by": MARK, "labels.slipway-capacity": TIER,
            "metadata.ssh-keys": "our key, which gcloud adds later, at the first ssh",
            "metadata.startup-script": SWITCH,
            "tags[0]": "our own tag, which the firewall rules aim at",
            "networkConfig.subnetwork": "by name, since there may be several",
            "serviceAccount.email": "in full; gcloud leaves it to the API to take the same one",
            "serviceAccount.scope[0]": "as above: what that account may do is said by its roles alone",
            "shieldedInstanceConfig.enableSecureBoot": "what gcloud sends with tpu-vm create; false is the default",
        }.items()
    }),
    Case("gcloud compute tpus queued-resources describe q1", "GET", "queuedResources/q1"),
    Case("gcloud compute tpus queued-resources delete q1 --force", "DELETE", "queuedResources/q1"),
    Case("gcloud compute resource-policies create workload-policy n1-2x4", "POST", "resourcePolicies", {
        "body.description": MARK, "body.region": IN_PATH,
        "body.workloadPolicy.acceleratorTopologyMode": "the default, in words",
    }),
    Case("gcloud compute instance-templates create n1-template", "POST", "instanceTemplates", {
        "body.description": MARK, "body.region": IN_PATH, "body.name": "a template is named by its content",
        "body.properties.canIpForward": "false is the default",
        "body.properties.disks[0].initializeParams.sourceImage": "gcloud names it by a full URL",
        "body.properties.disks[0].mode": "the default",
        "body.properties.labels.managed-by": MARK, "body.properties.labels.x": "the recorded command's own",
        "body.properties.scheduling.preemptible": "the older name of the same; SPOT implies it",
        "body.properties.scheduling.preemptionNoticeDuration.seconds": "gcloud 528 has no flag for it",
        "body.properties.serviceAccounts[0].email": "in full; `default` means the same",
        "body.properties.tags.items[0]": "our own tag, which the firewall rules aim at",
    }),
    Case("gcloud alpha compute instance-groups managed create n1", "POST", "instanceGroupManagers", {
        "body.description": MARK, "body.zone": IN_PATH,
        "body.baseInstanceName": "gcloud leaves it to the API, which takes the group's name",
        "body.instanceTemplate": "a template is named by its content",
        "body.resourcePolicies.workloadPolicy": "we name it by a full URL",
    }),
    Case("gcloud compute instance-groups managed resize n1", "POST", "n1/resize"),
    Case("gcloud compute instance-groups managed resize n1", "GET", "instanceGroupManagers/n1"),
    Case("gcloud compute instance-groups managed list-instances n1", "POST", "n1/listManagedInstances", {
        "query.maxResults": "the answer has no pages unless the group asks for them",
    }),
    Case("gcloud compute instance-groups managed delete n1", "DELETE", "instanceGroupManagers/n1"),
    Case("gcloud compute resource-policies delete n1-2x4", "DELETE", "resourcePolicies/n1-2x4"),
    Case("gcloud compute firewall-rules delete fw1", "DELETE", "firewalls/fw1"),
    Case("gcloud compute routers nats delete nat1", "PATCH", "routers/r1", {
        f"body.{key}": WHOLE for key in ("creationTimestamp", "id", "kind", "name", "network", "region", "selfLink")
    }),
    Case("gcloud compute routers delete r1", "DELETE", "routers/r1"),
    Case("gcloud compute networks subnets delete sub1", "DELETE", "subnetworks/sub1"),
    Case("gcloud compute networks delete net1", "DELETE", "networks/net1"),
    Case("gcloud iam service-accounts delete runner", "DELETE", "runner@slipway-local.iam.gserviceaccount.com", {
        "path": "gcloud leaves the project to the address; we name it",
    }),
    Case("gcloud projects describe p1", "GET", "projects/p1"),
)  # fmt: skip
ON_DEMAND = Case(
    "gcloud compute tpus tpu-vm create n1 --accelerator-type=v4-8 --version=tpu-ubuntu2204-base", "POST", "nodes", {
        "body.labels.managed-by": MARK,
        "body.labels.slipway-capacity": TIER,
        "body.metadata.ssh-keys": "our key, which gcloud adds later, at the first ssh",
        "body.metadata.startup-script": SWITCH,
        "body.tags[0]": "our own tag, which the firewall rules aim at",
        "body.networkConfig.subnetwork": "by name, since there may be several",
        "body.serviceAccount.email": "in full; gcloud leaves it to the API to take the same one",
        "body.serviceAccount.scope[0]": "as above: what that account may do is said by its roles alone",
    },
)  # fmt: skip


@pytest.fixture(scope="module")
def sent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Any]]]:
    """The requests of making and deleting everything: in a network of our own, and in `default` made by hand."""
    folder = tmp_path_factory.mktemp("parity")
    cloud = EmulatedCloud(folder / "state")
    cloud.start("--operation-seconds=0")
    for api in ("tpu", "compute", "storage"):  # which the recorded command enables
        cloud.call_ok("POST", f"serviceusage/v1/{PROJECT}/services/{api}.googleapis.com:disable", {})
    told = len(cloud.request_log())
    context = make_context(cloud, folder)
    for overrides in ([*MINE, *SPOT], ON_DEMAND_POD, QUEUED_POD, GROUP_POD):
        resources = desired_resources(*overrides)
        reconcile(resources, context)
        destroy(resources, context)
    # A subnet made by hand, whose private access was left off.
    cloud.call_and_wait("POST", f"{COMPUTE}/global/networks", {"name": "default"})
    reconcile(desired_resources(*DEFAULT)[:-1], context)
    machine = bastion()
    reconcile([machine], context)
    machine.serial_output(context)
    destroy([machine], context)
    yield cloud.request_log()[told:]
    context.close()
    run_localcloud("wipe", cloud.state)


def bastion() -> Bastion:
    """The machine that the recorded command makes."""
    return Bastion(
        name="i1", zone=ZONE, machine_type="g1-small", network="default", subnetwork="default",
        external_ip=False, account=ServiceAccount(name="sa-runner"), script="#!/bin/true", orders="{}", run_id="run-1",
        labels={RUN_LABEL: "run-1", POD_LABEL: "n1"}, max_seconds=30 * 86_400,
    )  # fmt: skip


@pytest.mark.parametrize("case", [*CASES, ON_DEMAND], ids=str)
def test_field_by_field(case: Case, sent: list[dict[str, Any]]) -> None:
    theirs = flat(recorded(case))
    candidates = [flat(without_legacy_bindings(entry)) for entry in sent if entry["method"] == theirs["method"]]
    same_path = [entry for entry in candidates if entry["path"] == theirs["path"] or "path" in case.differs]
    ours = min(same_path, key=lambda entry: len(unlike(theirs, entry).keys() ^ case.differs.keys()), default=None)
    assert ours is not None, f"we never sent {theirs['method']} {theirs['path']}"
    found = unlike(theirs, ours)
    unlisted = {name: pair for name, pair in found.items() if name not in case.differs}
    assert not unlisted, "gcloud's and ours"
    assert set(case.differs) == set(found), "a listed difference is none"


def without_legacy_bindings(entry: dict[str, Any]) -> dict[str, Any]:
    """A request without what a new bucket's policy holds and a client sends back; the recorded bucket had none."""
    body = entry["body"]
    if not isinstance(body, dict) or "bindings" not in body:
        return entry
    kept = [binding for binding in body["bindings"] if not binding["members"][0].startswith("project")]
    return {**entry, "body": {**body, "bindings": kept}}


def recorded(case: Case) -> dict[str, Any]:
    """gcloud's request in our names."""
    [found, *_] = [
        entry
        for entry in RECORDED
        if entry["label"].startswith(case.command)
        and entry["method"] == case.method
        and entry["path"].endswith(case.path)
        and not (case is ON_DEMAND and "--spot" in entry["label"])
    ]
    text = json.dumps({key: found[key] for key in ("method", "path", "query", "body") if key in found})
    words = sorted(SAME, key=len, reverse=True)
    pattern = "|".join(re.escape(word) for word in words)
    renamed = json.loads(re.sub(pattern, lambda match: SAME[match[0]], text))
    if "net1" not in case.command and case.command.startswith("gcloud compute networks create default"):
        renamed["body"]["name"] = "default"
    return renamed


def flat(entry: dict[str, Any]) -> dict[str, str]:
    """A request as one value per field: `body.nats[0].name`, `query.alt`."""
    query = {f"query.{k}": (v[0] if isinstance(v, list) else v).lower() for k, v in entry["query"].items()}
    body = dict(_fields("body", entry.get("body"))) if entry.get("body") else {}
    path = re.sub(r"/p1$", "/slipway-local", entry["path"])
    return {"method": entry["method"], "path": path, **query, **body}


def _fields(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, one in value.items():
            yield from _fields(f"{name}.{key}", one)
    elif isinstance(value, list) and value:
        for index, one in enumerate(value):
            yield from _fields(f"{name}[{index}]", one)
    elif value not in ({}, None):  # an empty message says nothing
        named = re.search(r"(\.network|\.subnetwork|\.machineType|\.scope\[\d+\])$", name)
        text = str(value).lower()
        yield name, text.rpartition("/")[2] if named else text


def unlike(theirs: dict[str, str], ours: dict[str, str]) -> dict[str, tuple[str | None, str | None]]:
    """The fields that differ: gcloud's value and ours."""
    names = {*theirs, *ours}
    return {n: (theirs.get(n), ours.get(n)) for n in sorted(names) if theirs.get(n) != ours.get(n)}


def test_every_kind_of_mutating_request_is_compared(sent: list[dict[str, Any]]) -> None:
    """But for those that no gcloud command sends in this form."""
    compared = {(case.method, recorded(case)["path"].rpartition("/")[2]) for case in (*CASES, ON_DEMAND)}
    calls = {(r["method"], r["path"].rpartition("/")[2]): r["call"] for r in sent if r["mutating"]}
    left = {call for key, call in calls.items() if key not in compared}
    assert left <= {
        "buckets.delete",  # gcloud storage rm -r: no body, no query
        "firewalls.insert",
        "firewalls.patch",  # the record that we switched on private access
        "firewalls.delete",
        "projects.serviceAccounts.delete",
        "services.batchEnable",
        "networks.delete",
        "subnetworks.delete",
        "projects.locations.nodes.delete",
        "regionInstanceTemplates.delete",  # no body, no query; the name is that of the content
    }


def test_no_request_was_refused_as_malformed(sent: list[dict[str, Any]]) -> None:
    """Each was judged by Google's discovery documents."""
    assert [r for r in sent if r["status"] in (400, 405, 500, 501)] == []


def test_we_send_nothing_that_google_ignores(sent: list[dict[str, Any]]) -> None:
    """An output-only field in a request would be a wish that nobody grants."""
    discovery = load_discovery()
    validation = Validation(discovery)
    for request in sent:
        found = discovery.match(request["method"], request["path"].strip("/"))
        if found and isinstance(request["body"], dict):
            body = _without_redaction(request["body"])
            assert validation.check_body(found[0], body) == body, request["path"]


def _without_redaction(body: Any) -> Any:
    """Return a body without metadata, of which the log shows the keys alone."""
    if isinstance(body, list):
        return [_without_redaction(item) for item in body]
    if not isinstance(body, dict):
        return body
    return {key: _without_redaction(value) for key, value in body.items() if key != "metadata"}

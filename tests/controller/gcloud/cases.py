"""What gcloud was seen to send: each case names the fields in which our request for the same end differs, and why."""

import json
from dataclasses import dataclass, field
from typing import Any

from tests.paths import ROOT

RECORDED: list[dict[str, Any]] = [
    json.loads(line) for line in (ROOT / "tests" / "fixtures" / "gcloud_requests.jsonl").read_text().splitlines()
]
MARK = "says who made it, so that `down --all` deletes only what is ours"
WHOLE = "gcloud sends the router back as it read it; PATCH takes the fields that change"
ETAG = "whatever was read"
TIER = "the tier that was asked for: of a flex-start node the API does not tell it"
SWITCH = "our own dead man's switch, which deletes a pod that nobody uses"
LEAST = "icmp is not needed for SSH"
IN_PATH = "the place is in the path of the request"
LISTED = {
    "query.includeAllScopes": "an empty place would only have a warning",
    "query.maxResults": "the default",
    "query.returnPartialSuccess": "not in the discovery document; places out of reach are told, and named",
}
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
    Case("gcloud iam service-accounts create sa-runner", "POST", "serviceAccounts", {
        "body.serviceAccount.description": MARK, "body.serviceAccount.displayName": "free text",
    }),
    Case("gcloud projects add-iam-policy-binding slipway-local", "POST", ":getIamPolicy"),
    Case("gcloud projects add-iam-policy-binding slipway-local", "POST", ":setIamPolicy", {"body.policy.etag": ETAG}),
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
        "body.etag": ETAG, "body.kind": "output only; the policy is sent back as it came",
        "body.resourceId": "as above",
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
    Case("gcloud compute tpus tpu-vm delete n1", "DELETE", "nodes/n1"),
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
    Case("gcloud billing projects describe", "GET", "billingInfo"),
    Case("gcloud resource-manager org-policies describe", "POST", ":getEffectiveOrgPolicy"),
    Case("gcloud alpha services quota list", "GET", "consumerQuotaMetrics", {
        "query.pageSize": "gcloud asks for as many pages as it takes", "query.view": "with the limits of single places",
    }),
    Case("gcloud compute project-info describe", "GET", "/compute/v1/projects/slipway-local"),
    Case("gcloud compute regions describe", "GET", "regions/us-central2"),
    Case("gcloud iam service-accounts describe", "GET", "sa-runner@slipway-local.iam.gserviceaccount.com", {
        "path": "gcloud leaves the project to the address; we name it",
    }),
    Case("gcloud iam service-accounts add-iam-policy-binding", "POST", ":getIamPolicy"),
    Case("gcloud iam service-accounts add-iam-policy-binding", "POST", ":setIamPolicy", {"body.policy.etag": ETAG}),
    Case("gcloud compute firewall-rules list", "GET", "firewalls", {"query.maxResults": "the default"}),
    Case("gcloud compute tpus tpu-vm versions list", "GET", "runtimeVersions"),
    Case("gcloud compute tpus tpu-vm list", "GET", "nodes", {"query.pageSize": "whether there may be any is asked"}),
    Case("gcloud compute tpus queued-resources list", "GET", "queuedResources", {"path": "of all zones at once"}),
    Case("gcloud compute machine-types describe", "GET", "machineTypes/ct6e-standard-4t"),
    Case("gcloud compute images describe-from-family", "GET", "ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e"),
    Case("gcloud compute instances create n1", "POST", "instances", {
        "body.description": MARK, "body.labels.managed-by": MARK, "body.labels.x": "the recorded command's own",
        "body.canIpForward": "false is the default", "body.deletionProtection": "as above",
        "body.disks[0].initializeParams.diskType": "gcloud names it by a full URL",
        "body.disks[0].initializeParams.sourceImage": FAMILY, "body.disks[0].mode": "the default",
        **{f"body.disks[1].{key}": "the data disk, which gcloud's VM has not" for key in (
            "autoDelete", "boot", "mode", "source")},
        "body.scheduling.preemptible": "the older name of the same; SPOT implies it",
        "body.scheduling.preemptionNoticeDuration.seconds": "gcloud 528 has no flag for it",
        "body.serviceAccounts[0].email": "in full; `default` means the same",
        "body.tags.items[0]": "our own tag, which the firewall rules aim at",
    }),
    Case("gcloud compute instances describe n1", "GET", "instances/n1"),
    Case("gcloud compute instances list", "GET", "aggregated/instances", LISTED),
    Case("gcloud compute instances delete n1", "DELETE", "instances/n1"),
    Case("gcloud compute disks create n1-data", "POST", "disks", {
        "body.labels.managed-by": MARK, "body.labels.x": "the recorded command's own",
        "body.type": "gcloud names it by a full URL",
    }),
    Case("gcloud compute disks describe n1-data", "GET", "disks/n1-data"),
    Case("gcloud compute disks delete n1-data", "DELETE", "disks/n1-data"),
    Case("gcloud compute instance-groups managed list", "GET", "aggregated/instanceGroupManagers", LISTED),
    Case("gcloud compute instance-templates delete", "DELETE", "instanceTemplates/n1-template", {
        "path": "a template is named by its content",
    }),
    Case("gcloud compute instances add-iam-policy-binding i1", "GET", "instances/i1/getIamPolicy"),
    Case("gcloud compute instances add-iam-policy-binding i1", "POST", "instances/i1/setIamPolicy", {
        "body.policy.etag": ETAG,
    }),
    Case("gcloud compute resource-policies delete n1-2x4", "DELETE", "resourcePolicies/n1-2x4"),
    Case("gcloud compute firewall-rules delete fw1", "DELETE", "firewalls/fw1"),
    Case("gcloud compute routers nats delete nat1", "PATCH", "routers/r1", {
        f"body.{key}": WHOLE for key in ("creationTimestamp", "id", "kind", "name", "network", "region", "selfLink")
    }),
    Case("gcloud compute routers delete r1", "DELETE", "routers/r1"),
    Case("gcloud compute networks subnets delete sub1", "DELETE", "subnetworks/sub1"),
    Case("gcloud compute networks delete net1", "DELETE", "networks/net1"),
    Case("gcloud iam service-accounts delete sa-runner", "DELETE", "sa-runner@slipway-local.iam.gserviceaccount.com", {
        "path": "gcloud leaves the project to the address; we name it",
    }),
    Case("gcloud projects describe slipway-local", "GET", "projects/slipway-local"),
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

NOT_COMPARED = {
    "buckets.delete": "gcloud storage rm: no body, no query",
    "buckets.testIamPermissions": "no command of gcloud asks it; so do the next two",
    "projects.testIamPermissions": "as above",
    "projects.locations.acceleratorTypes.list": "gcloud 528 asks v1",
    "services.batchGet": "gcloud lists the whole project's",
    "firewalls.patch": "the record that we switched on private access",
    "globalOperations.wait": "each operation has a name of its own, which is all there is to say; so have the next six",
    "operations.get": "as above",
    "projects.locations.operations.get": "as above",
    "regionOperations.get": "as above",
    "regionOperations.wait": "as above",
    "zoneOperations.get": "as above",
    "zoneOperations.wait": "as above",
    "instances.list": "gcloud lists all zones at once, as we do elsewhere",
    "objects.list": "of a bucket that is to be deleted, one page",
    "regionInstanceTemplates.list": "gcloud lists all regions at once",
    "resourcePolicies.list": "as above",
    "routers.list": "as above",
}
"""What we send and no case compares, with the reason."""

"""What the controller made, as the real gcloud describes it; and a slice that gcloud itself makes and deletes."""

import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from controller.reconcile import reconcile
from controller.resources.services import Services
from controller.resources.vpc import ComputeResource
from tests.conftest import deep
from tests.controller.gcloud.conftest import GcloudShell, desired_resources, make_context, planned_actions
from tests.controller.localcloud.harness import APIS as OTHERS
from tests.controller.localcloud.harness import PROJECT, REGION, ZONE, EmulatedCloud

APIS = next(tuple(sorted(r.apis)) for r in desired_resources() if isinstance(r, Services))
ENABLED = sorted({*APIS, "monitoring.googleapis.com", *(f"{api}.googleapis.com" for api in OTHERS.split())})
"""What the controller enables, what the tests have enabled before, and one that Google enables."""
OURS = "made by slipway"
HERE = f"slipway-{REGION}"
BUCKET = f"slipway-local-slipway-{REGION}"
ACCOUNT = "slipway-runner@slipway-local.iam.gserviceaccount.com"
MEMBERS = [f"serviceAccount:{ACCOUNT}"]
POD = ["tpu=v5litepod_8", f"tpu.zone={ZONE}", "tpu.name=pod", "tpu.capacity=spot", "tpu.external_ip=false"]
NODE = {
    "acceleratorType": "v5litepod-8",
    "runtimeVersion": "v2-alpha-tpuv5-lite",
    "networkConfig": {"network": "slipway", "subnetwork": HERE},
    "serviceAccount": {"email": ACCOUNT, "scope": ["cloud-platform"]},
    "labels": {"managed-by": "slipway"},
    "tags": ["slipway"],
}
OWNERS = ["projectEditor:slipway-local", "projectOwner:slipway-local"]
OF_A_NEW_BUCKET = [
    {"role": "roles/storage.legacyBucketOwner", "members": OWNERS},
    {"role": "roles/storage.legacyObjectOwner", "members": OWNERS},
    {"role": "roles/storage.legacyObjectReader", "members": ["projectViewer:slipway-local"]},
]
"""What Google binds on every new bucket, around the roles of the workers' account."""
DESCRIBED: dict[str, Any] = {
    "compute networks describe slipway": {
        "autoCreateSubnetworks": False,
        "mtu": 8896,
        "routingConfig": {"routingMode": "REGIONAL"},
        "description": OURS,
        "subnetworks": [HERE],
    },
    f"compute networks subnets describe {HERE} --region={REGION}": {
        "network": "slipway",
        "ipCidrRange": "10.64.176.0/20",
        "privateIpGoogleAccess": True,
        "description": OURS,
    },
    f"compute routers describe {HERE} --region={REGION}": {"network": "slipway", "description": OURS},
    f"compute routers nats describe {HERE} --router={HERE} --region={REGION}": {
        "natIpAllocateOption": "AUTO_ONLY",
        "sourceSubnetworkIpRangesToNat": "ALL_SUBNETWORKS_ALL_IP_RANGES",
    },
    "compute firewall-rules describe slipway-allow-ssh": {
        "network": "slipway",
        "direction": "INGRESS",
        "allowed": [{"IPProtocol": "tcp", "ports": ["22"]}],
        "sourceRanges": ["127.0.0.0/8", "35.235.240.0/20"],
        "targetTags": ["slipway"],
        "disabled": False,
    },
    f"compute firewall-rules describe slipway-allow-internal-{REGION}": {
        "allowed": [{"IPProtocol": "icmp"}, {"IPProtocol": "tcp"}, {"IPProtocol": "udp"}],
        "sourceRanges": ["10.64.176.0/20"],
    },
    f"iam service-accounts describe {ACCOUNT}": {"displayName": "Slipway TPU workers", "description": OURS},
    "projects get-iam-policy slipway-local": {
        "bindings": [
            {"role": "roles/logging.logWriter", "members": MEMBERS},
            {"role": "roles/tpu.admin", "members": MEMBERS},
        ]
    },
    f"storage buckets get-iam-policy gs://{BUCKET}": {
        "bindings": [
            *OF_A_NEW_BUCKET[:1],
            {"role": "roles/storage.legacyBucketReader", "members": ["projectViewer:slipway-local", *MEMBERS]},
            *OF_A_NEW_BUCKET[1:],
            {"role": "roles/storage.objectAdmin", "members": MEMBERS},
        ]
    },
    f"storage buckets describe gs://{BUCKET} --raw": {
        "location": REGION.upper(),
        "labels": {"managed-by": "slipway"},
        "iamConfiguration": {"uniformBucketLevelAccess": {"enabled": True}, "publicAccessPrevention": "enforced"},
        "softDeletePolicy": {"retentionDurationSeconds": "0"},
        "lifecycle": {
            "rule": [
                {"action": {"type": "AbortIncompleteMultipartUpload"}, "condition": {"age": 7}},
                {"action": {"type": "Delete"}, "condition": {"daysSinceNoncurrentTime": 7}},
            ]
        },
    },
    f"compute tpus tpu-vm describe pod --zone={ZONE}": {**NODE, "state": "READY", "health": "HEALTHY"},
    f"compute tpus queued-resources describe pod --zone={ZONE}": {
        "state": {"state": "ACTIVE"},
        "spot": {},
        "tpu": {"nodeSpec": [{"nodeId": "pod", "node": NODE}]},
    },
    "services list --enabled": [{"config": {"name": api}} for api in ENABLED],
}  # fmt: skip


@pytest.fixture(scope="module")
def shell(cloud: EmulatedCloud, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GcloudShell]:
    """A project in which the controller has made everything of a spot pod."""
    folder = tmp_path_factory.mktemp("made")
    context = make_context(cloud, folder)
    reconcile(desired_resources(*POD), context)
    yield GcloudShell(cloud, folder / "shell")
    context.close()


FAST = [f"storage buckets describe gs://{BUCKET} --raw", "compute tpus tpu-vm describe"]
"""What every run asks gcloud, which takes almost a second per command; `--deep` asks the rest."""


@pytest.mark.parametrize("fast", [True, *deep(False)])
def test_gcloud_describes_what_was_wanted(shell: GcloudShell, fast: bool) -> None:
    wanted = {command: fields for command, fields in DESCRIBED.items() if command.startswith((*FAST,)) == fast}

    def ask(command: str) -> str:
        return shell.run(
            f"gcloud {command} --format=json 2>errors-{hash(command)} || cat errors-{hash(command)}"
        ).stdout

    with ThreadPoolExecutor(3) as pool:
        answers = dict(zip(wanted, pool.map(ask, wanted), strict=True))
    found = {command: told(text, wanted[command]) for command, text in answers.items()}
    assert found == wanted


@pytest.mark.deep
def test_the_commands_that_an_admin_is_told_make_what_is_wanted(shell: GcloudShell, cloud: EmulatedCloud) -> None:
    names = ["network.name=told", "cloud.service_account=default", *POD]
    context = make_context(cloud, shell.home)
    try:
        for resource in desired_resources(*names):
            if isinstance(resource, ComputeResource):
                done = shell.run(resource.command(context))
                assert done.returncode == 0, done.stdout
        found = planned_actions(context, *names)
        assert {name for name, action in found.items() if action != "none"} == {"node/pod"}  # in another network
    finally:
        context.close()


def told(text: str, wanted: Any) -> Any:
    """Of an answer the fields that are wanted; of a link its last word."""
    try:
        return _of(json.loads(text), wanted)
    except ValueError:
        return text


def _of(value: Any, wanted: Any) -> Any:
    if isinstance(value, dict) and isinstance(wanted, dict):
        return {key: _of(value[key], one) for key, one in wanted.items() if key in value}
    if isinstance(value, list) and isinstance(wanted, list) and len(value) == len(wanted):
        return [_of(one, other) for one, other in zip(value, wanted, strict=True)]
    link = isinstance(value, str) and isinstance(wanted, str) and "/" in value and "/" not in wanted
    return value.rpartition("/")[2] if link else value


IMAGE = "--image-project=ubuntu-os-accelerator-images --image-family=ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e"
REGIONAL = f"{PROJECT}/regions/{REGION}"
GROUPS = "compute instance-groups managed"
GROUP = (
    f"--zone={ZONE} --size=0 --template={REGIONAL}/instanceTemplates/pod "
    f"--workload-policy={REGIONAL}/resourcePolicies/pod --default-action-on-vm-failure=do-nothing"
)


@pytest.mark.deep
def test_a_slice_by_gcloud(cloud: EmulatedCloud, tmp_path: Path) -> None:
    shell = GcloudShell(cloud, tmp_path)

    def gcloud(words: str) -> subprocess.CompletedProcess[str]:
        return shell.run(f"gcloud {words}")

    def done(words: str) -> str:
        ran = gcloud(words)
        assert ran.returncode == 0, ran.stdout
        return ran.stdout

    cloud.create_network("net")
    done(f"compute resource-policies create workload-policy pod --region={REGION} --type=high-throughput "
         "--accelerator-topology=2x4")  # fmt: skip
    done(f"compute instance-templates create pod --instance-template-region={REGION} --machine-type=ct6e-standard-4t "
         f"--maintenance-policy=TERMINATE {IMAGE} --boot-disk-size=200GB --scopes=cloud-platform --subnet=net "
         f"--region={REGION} --provisioning-model=SPOT --instance-termination-action=DELETE")  # fmt: skip
    refused = gcloud(f"{GROUPS} create pod {GROUP}")
    assert "MIGs with TPU accelerator topology require BULK mode in target size policy" in refused.stdout
    done(f"alpha {GROUPS} create pod {GROUP} --target-size-policy-mode=bulk")
    done(f"{GROUPS} resize pod --zone={ZONE} --size=2")
    done(f"{GROUPS} wait-until pod --zone={ZONE} --stable --timeout=120")
    members = done(f"{GROUPS} list-instances pod --zone={ZONE} --format='value(name,instanceStatus)'").splitlines()
    assert [line.split()[1] for line in members] == ["RUNNING", "RUNNING"]
    assert "pod" in done(f"{GROUPS} list --format='value(name)'").split()
    shown = json.loads(done(f"{GROUPS} describe pod --zone={ZONE} --format=json"))
    assert shown["status"]["appliedAcceleratorTopologies"] == [{"acceleratorTopology": "2x4", "state": "ACTIVE"}]
    listed = json.loads(done("compute instances list --format=json"))
    assert {one["name"] for one in listed} == {line.split()[0] for line in members}
    used = gcloud(f"compute instance-templates delete pod --region={REGION}")
    assert "is already being used by" in used.stdout
    done(f"{GROUPS} delete pod --zone={ZONE}")
    done(f"compute instance-templates delete pod --region={REGION}")
    done(f"compute resource-policies delete pod --region={REGION}")

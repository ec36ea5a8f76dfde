"""Writes down what gcloud sends: `python -m tests.controller.gcloud.record >tests/fixtures/gcloud_requests.jsonl`."""

import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from controller.localcloud import lifecycle
from tests.controller.localcloud.harness import COMPUTE, EmulatedCloud, run_localcloud
from tests.controller.localcloud.harness import PROJECT as OURS

EAST, EAST_ZONE = "--region=us-east5", "--zone=us-east5-b"
IMAGE = "--image-project=ubuntu-os-accelerator-images --image-family=ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e"
RUNNER = "sa-runner@slipway-local.iam.gserviceaccount.com"
PROJECT = (
    "gcloud services enable tpu.googleapis.com compute.googleapis.com storage.googleapis.com",
    "gcloud projects describe slipway-local",
    "gcloud billing projects describe slipway-local",
    "gcloud resource-manager org-policies describe compute.vmExternalIpAccess --effective --project=slipway-local",
    "gcloud alpha services quota list --service=tpu.googleapis.com --consumer=projects/slipway-local",
    "gcloud compute project-info describe",
    "gcloud compute regions describe us-central2",
    "gcloud iam service-accounts create sa-runner --display-name=workers --description=ours",
    "gcloud iam service-accounts create sa-driver",
    f"gcloud iam service-accounts describe {RUNNER}",
    f"gcloud projects add-iam-policy-binding slipway-local --member=serviceAccount:{RUNNER} --role=roles/storage.admin "
    "--condition=None",
    f"gcloud iam service-accounts add-iam-policy-binding {RUNNER} "
    "--member=serviceAccount:sa-driver@slipway-local.iam.gserviceaccount.com --role=roles/iam.serviceAccountUser",
    "gcloud storage buckets create gs://bk1 --location=us-central2 --uniform-bucket-level-access",
    f"gcloud storage buckets add-iam-policy-binding gs://bk1 --member=serviceAccount:{RUNNER} "
    "--role=roles/storage.objectAdmin",
    "gcloud storage buckets describe gs://bk1",
)
NETWORK = (
    "gcloud compute networks create default --subnet-mode=auto",
    "gcloud compute networks subnets update default --region=us-central2 --enable-private-ip-google-access",
    "gcloud compute networks create net1 --subnet-mode=custom --mtu=8896",
    "gcloud compute networks subnets create sub1 --network=net1 --range=10.0.0.0/24 --enable-private-ip-google-access",
    "gcloud compute routers create r1 --network=net1",
    "gcloud compute routers nats create nat1 --router=r1 --auto-allocate-nat-external-ips --nat-all-subnet-ip-ranges",
    "gcloud compute firewall-rules create fw1 --network=net1 --allow=tcp:22,icmp --source-ranges=35.235.240.0/20 "
    "--target-tags=a",
    "gcloud compute firewall-rules list",
)
TPU_API = (
    "gcloud compute tpus tpu-vm versions list",
    "gcloud compute tpus tpu-vm create n1 --accelerator-type=v4-8 --version=tpu-ubuntu2204-base --spot --network=net1 "
    f"--subnetwork=sub1 --internal-ips --metadata=k=v --tags=a,b --labels=x=y --service-account={RUNNER} "
    "--scopes=cloud-platform",
    "gcloud compute tpus tpu-vm describe n1",
    "gcloud compute tpus tpu-vm list",
    "gcloud compute tpus tpu-vm delete n1",
    "gcloud compute tpus tpu-vm create n1 --accelerator-type=v4-8 --version=tpu-ubuntu2204-base",
    "gcloud compute tpus queued-resources create q1 --node-id=qn1 --accelerator-type=v4-8 "
    "--runtime-version=tpu-ubuntu2204-base --spot --valid-until-duration=6h",
    "gcloud compute tpus queued-resources describe q1",
    "gcloud compute tpus queued-resources list",
    "gcloud compute tpus queued-resources delete q1 --force",
)
VM = (
    f"--maintenance-policy=TERMINATE {IMAGE} --boot-disk-size=200GB --boot-disk-type=hyperdisk-balanced "
    "--scopes=cloud-platform --network=default --subnet=default --instance-termination-action=DELETE "
    "--metadata=enable-guest-attributes=TRUE --labels=x=y --tags=a"
)
COMPUTE_ENGINE = (
    f"gcloud compute machine-types describe ct6e-standard-4t {EAST_ZONE}",
    "gcloud compute images describe-from-family ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e "
    "--project=ubuntu-os-accelerator-images",
    f"gcloud compute instances create n1 {EAST_ZONE} --machine-type=ct6e-standard-1t --provisioning-model=SPOT {VM}",
    f"gcloud compute instances describe n1 {EAST_ZONE}",
    "gcloud compute instances list",
    f"gcloud compute instances get-guest-attributes n1 {EAST_ZONE} --query-path=hostkeys/",
    f"gcloud compute instances delete n1 {EAST_ZONE}",
    f"gcloud compute disks create n1-data {EAST_ZONE} --size=10GB --type=hyperdisk-balanced --labels=x=y",
    f"gcloud compute disks describe n1-data {EAST_ZONE}",
    f"gcloud compute disks delete n1-data {EAST_ZONE}",
    f"gcloud compute resource-policies create workload-policy n1-2x4 {EAST} --type=high-throughput "
    "--accelerator-topology=2x4",
    f"gcloud compute resource-policies describe n1-2x4 {EAST}",
    "gcloud compute instance-templates create n1-template --instance-template-region=us-east5 "
    f"--machine-type=ct6e-standard-4t --provisioning-model=SPOT {EAST} {VM}",
    f"gcloud compute instance-templates describe n1-template {EAST}",
    f"gcloud alpha compute instance-groups managed create n1 {EAST_ZONE} --size=0 "
    "--template=projects/slipway-local/regions/us-east5/instanceTemplates/n1-template "
    "--workload-policy=projects/slipway-local/regions/us-east5/resourcePolicies/n1-2x4 "
    "--default-action-on-vm-failure=do-nothing --target-size-policy-mode=bulk",
    f"gcloud compute instance-groups managed resize n1 {EAST_ZONE} --size=2",
    f"gcloud compute instance-groups managed list-instances n1 {EAST_ZONE}",
    "gcloud compute instance-groups managed list",
    f"gcloud compute instance-groups managed list-errors n1 {EAST_ZONE}",
    f"gcloud compute instance-groups managed delete n1 {EAST_ZONE}",
    f"gcloud compute instance-templates delete n1-template {EAST}",
    f"gcloud compute resource-policies delete n1-2x4 {EAST}",
)
BASTION = (
    "gcloud compute instances create i1 --zone=us-central2-b --machine-type=g1-small "
    "--max-run-duration=30d --instance-termination-action=DELETE "
    "--metadata=startup-script=#!/bin/true --network=default --subnet=default --no-address --image-family=debian-12 "
    "--image-project=debian-cloud --scopes=cloud-platform",
    "gcloud compute instances get-serial-port-output i1 --zone=us-central2-b",
    f"gcloud compute instances add-iam-policy-binding i1 --zone=us-central2-b --member=serviceAccount:{RUNNER} "
    "--role=roles/compute.instanceAdmin.v1",
    "gcloud compute instances delete i1 --zone=us-central2-b",
)
END = (
    "gcloud compute firewall-rules delete fw1",
    "gcloud compute routers nats delete nat1 --router=r1",
    "gcloud compute routers delete r1",
    "gcloud compute networks subnets delete sub1",
    "gcloud compute networks delete net1",
    f"gcloud iam service-accounts delete {RUNNER}",
)
SETTINGS = {
    "CLOUDSDK_CORE_DISABLE_PROMPTS": "1",
    "CLOUDSDK_COMPONENT_MANAGER_DISABLE_UPDATE_CHECK": "1",
    "CLOUDSDK_COMPUTE_ZONE": "us-central2-b",
    "CLOUDSDK_COMPUTE_REGION": "us-central2",
}
SEEN_ONCE = {
    r"https?://(127\.0\.0\.1|localhost):\d+(/t/[^/]+)?/": "https://cloud/",
    r"operation-\d+": "operation-1",
    r"operations/[\w.-]+\b(?=[/:\"])": "operations/1",
    r'"(etag|id)": "[^"]*"': r'"\1": "1"',
    r'"\d{4}-\d\d-\d\dT[^"]*Z"': '"2026-11-28T22:00:00Z"',
}
"""What no two recordings have in common, and what stands for it."""


def record_requests() -> list[dict[str, Any]]:
    """What each command sends, in order; CalledProcessError if one fails. Each chain has a cloud of its own."""
    chains = ((*PROJECT, *NETWORK, *BASTION, *END), TPU_API, COMPUTE_ENGINE)
    with ThreadPoolExecutor(len(chains)) as pool:
        return [request for chain in pool.map(record_chain, chains) for request in chain]


def record_chain(commands: tuple[str, ...]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        cloud = EmulatedCloud(Path(folder) / "state")
        cloud.start("--operation-seconds=0")
        if commands[0] != PROJECT[0]:
            prepare(cloud)
        try:
            places = {"PATH": os.environ["PATH"], "HOME": folder}
            environment = {**places, **lifecycle.client_environment(cloud.state), **SETTINGS}
            for command in commands:
                told = len(cloud.request_log())
                subprocess.run(command.split(), env=environment, check=True, capture_output=True, timeout=120)
                for entry in cloud.request_log()[told:]:
                    shown = {key: entry[key] for key in ("method", "path", "query")}
                    shown["query"] = {name: [value] for name, value in shown["query"].items()}
                    found.append({"label": command, **shown, **({"body": entry["body"]} if entry["body"] else {})})
        finally:
            run_localcloud("wipe", cloud.state)
    shown = [without_chance(one) for one in found]
    return [one for one, former in zip(shown, [None, *shown], strict=False) if one != former]  # polls


def prepare(cloud: EmulatedCloud) -> None:
    """Make what the commands of pods take for granted."""
    networks = f"{COMPUTE}/global/networks"
    cloud.call_and_wait("POST", networks, {"name": "default", "autoCreateSubnetworks": True})
    cloud.call_and_wait("POST", networks, {"name": "net1", "autoCreateSubnetworks": False})
    subnet = {"name": "sub1", "network": f"{OURS}/global/networks/net1", "ipCidrRange": "10.0.0.0/24"}
    cloud.call_and_wait("POST", f"{COMPUTE}/regions/us-central2/subnetworks", subnet)
    cloud.call_ok("POST", f"iam/v1/{OURS}/serviceAccounts", {"accountId": "sa-runner"})


def without_chance(entry: dict[str, Any]) -> dict[str, Any]:
    """A request with stand-ins for what another recording would have differently."""
    text = json.dumps(entry)
    for pattern, stand_in in SEEN_ONCE.items():
        text = re.sub(pattern, stand_in, text)
    return json.loads(text)


if __name__ == "__main__":
    for one in record_requests():
        sys.stdout.write(json.dumps(one) + "\n")

"""Writes down what gcloud sends: `python -m tests.controller.gcloud.record >tests/fixtures/gcloud_requests_here.jsonl`.

The commands are those of the guides that were not in the recording which the project began with.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from controller.localcloud import lifecycle
from tests.controller.localcloud.harness import REGION, ZONE, EmulatedCloud, run_localcloud

EAST, EAST_ZONE = "--region=us-east5", "--zone=us-east5-b"
COMMANDS = (
    "gcloud compute networks create default --subnet-mode=auto",
    f"gcloud compute networks subnets update default --region={REGION} --enable-private-ip-google-access",
    "gcloud compute firewall-rules create allow-ssh --network=default --allow=tcp:22,icmp",
    "gcloud iam service-accounts create runner --display-name=workers --description=ours",
    "gcloud iam service-accounts delete runner@slipway-local.iam.gserviceaccount.com",
    f"gcloud compute tpus tpu-vm create n3 --zone={ZONE} --accelerator-type=v5litepod-8 --version=v2-alpha-tpuv5-lite "
    "--preemptible",
    "gcloud compute instances create i1 --zone=us-central2-b --machine-type=g1-small "
    "--max-run-duration=30d --instance-termination-action=DELETE "
    "--metadata=startup-script=#!/bin/true --network=default --subnet=default --no-address --image-family=debian-12 "
    "--image-project=debian-cloud --scopes=cloud-platform",
    "gcloud compute instances get-serial-port-output i1 --zone=us-central2-b",
    "gcloud compute instances delete i1 --zone=us-central2-b",
    f"gcloud compute resource-policies create workload-policy n1-2x4 {EAST} --type=high-throughput "
    "--accelerator-topology=2x4",
    "gcloud compute instance-templates create n1-template --instance-template-region=us-east5 "
    "--machine-type=ct6e-standard-4t --maintenance-policy=TERMINATE --image-project=ubuntu-os-accelerator-images "
    "--image-family=ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e --boot-disk-size=200GB --boot-disk-type=hyperdisk-balanced "
    f"--scopes=cloud-platform --network=default --subnet=default {EAST} --provisioning-model=SPOT "
    "--instance-termination-action=DELETE --metadata=enable-guest-attributes=TRUE --labels=x=y --tags=a",
    f"gcloud alpha compute instance-groups managed create n1 {EAST_ZONE} --size=0 "
    "--template=projects/slipway-local/regions/us-east5/instanceTemplates/n1-template "
    "--workload-policy=projects/slipway-local/regions/us-east5/resourcePolicies/n1-2x4 "
    "--default-action-on-vm-failure=do-nothing --target-size-policy-mode=bulk",
    f"gcloud compute instance-groups managed resize n1 {EAST_ZONE} --size=2",
    f"gcloud compute instance-groups managed list-instances n1 {EAST_ZONE}",
    f"gcloud compute instance-groups managed delete n1 {EAST_ZONE}",
    f"gcloud compute resource-policies delete n1-2x4 {EAST}",
)


def record_requests(commands: tuple[str, ...]) -> list[dict[str, Any]]:
    """What each command sends, in order; CalledProcessError if one fails."""
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        cloud = EmulatedCloud(Path(folder) / "state")
        cloud.start("--operation-seconds=0")
        try:
            quiet = {"CLOUDSDK_CORE_DISABLE_PROMPTS": "1", "CLOUDSDK_COMPONENT_MANAGER_DISABLE_UPDATE_CHECK": "1"}
            environment = {
                "PATH": os.environ["PATH"],
                "HOME": folder,
                **lifecycle.client_environment(cloud.state),
                **quiet,
            }
            for command in commands:
                told = len(cloud.request_log())
                subprocess.run(command.split(), env=environment, check=True, capture_output=True, timeout=120)
                for entry in cloud.request_log()[told:]:
                    shown = {key: entry[key] for key in ("method", "path", "query")}
                    shown["query"] = {name: [value] for name, value in shown["query"].items()}
                    found.append({"label": command, **shown, **({"body": entry["body"]} if entry["body"] else {})})
        finally:
            run_localcloud("wipe", cloud.state)
    return found


if __name__ == "__main__":
    for one in record_requests(COMMANDS):
        sys.stdout.write(json.dumps(one) + "\n")

"""gcloud makes a slice of two VMs on Compute Engine, looks at it, and deletes it."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.controller.gcloud.conftest import GcloudShell
from tests.controller.localcloud.harness import PROJECT, REGION, ZONE, EmulatedCloud

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

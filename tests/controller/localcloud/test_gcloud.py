"""The real gcloud against the emulated cloud; it takes about a second per command."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from controller.localcloud import lifecycle
from tests.controller.localcloud.harness import REGION, RUNTIME, ZONE, EmulatedCloud

pytestmark = pytest.mark.skipif(shutil.which("gcloud") is None, reason="gcloud is not installed")

Gcloud = Callable[[str], str]


@pytest.fixture
def gcloud(cloud: EmulatedCloud, tmp_path: Path) -> Gcloud:
    """Runs a gcloud command that must succeed; returns what it prints."""
    quiet = {"CLOUDSDK_CORE_DISABLE_PROMPTS": "1", "CLOUDSDK_COMPONENT_MANAGER_DISABLE_UPDATE_CHECK": "1"}
    place = {"CLOUDSDK_COMPUTE_ZONE": ZONE, "CLOUDSDK_COMPUTE_REGION": REGION, "HOME": str(tmp_path)}
    environment = {"PATH": os.environ["PATH"], **lifecycle.client_environment(cloud.state), **quiet, **place}

    def run(command: str) -> str:
        words = ["gcloud", *command.split()]
        done = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"gcloud {command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return run


@pytest.mark.deep
def test_networks_and_nodes(gcloud: Gcloud) -> None:
    gcloud("services enable tpu.googleapis.com compute.googleapis.com")
    gcloud("compute networks create net --subnet-mode=custom --mtu=8896")
    gcloud("compute networks subnets create sub --network=net --range=10.0.0.0/24 --enable-private-ip-google-access")
    gcloud("compute routers create router --network=net")
    nat = "--auto-allocate-nat-external-ips --nat-all-subnet-ip-ranges"
    gcloud(f"compute routers nats create nat --router=router {nat}")
    assert "AUTO_ONLY" in gcloud("compute routers nats describe nat --router=router")
    gcloud("compute firewall-rules create ssh --network=net --allow=tcp:22,icmp")
    assert "mtu: 8896" in gcloud("compute networks describe net")

    where = "--network=net --subnetwork=sub"
    pod = f"--accelerator-type=v5litepod-16 --version={RUNTIME} --spot --internal-ips {where} --labels=a=b"
    gcloud(f"compute tpus tpu-vm create pod {pod}")
    assert "state: READY" in gcloud("compute tpus tpu-vm describe pod")
    assert "ssh-ed25519" in gcloud("compute tpus tpu-vm get-guest-attributes pod")
    assert "pod" in gcloud("compute tpus tpu-vm list")
    gcloud("compute tpus tpu-vm delete pod")

    queued = f"--node-id=node --accelerator-type=v5litepod-16 --runtime-version={RUNTIME} --spot {where}"
    gcloud(f"compute tpus queued-resources create queue {queued}")
    assert "nodeId: node" in gcloud("compute tpus queued-resources describe queue")
    gcloud("compute tpus queued-resources delete queue --force")

    gcloud("compute firewall-rules delete ssh")
    gcloud("compute routers delete router")
    gcloud("compute networks subnets delete sub")
    gcloud("compute networks delete net")
    assert gcloud("compute networks list --format=value(name)").split() == []


@pytest.mark.deep
def test_iam(gcloud: Gcloud) -> None:
    gcloud("iam service-accounts create runner")
    member = "--member=serviceAccount:runner@slipway-local.iam.gserviceaccount.com"
    gcloud(f"projects add-iam-policy-binding slipway-local {member} --role=roles/tpu.admin --condition=None")
    assert "roles/tpu.admin" in gcloud("projects get-iam-policy slipway-local")
    gcloud(f"storage buckets create gs://gcloud-bucket --location={REGION} --uniform-bucket-level-access")
    gcloud(f"storage buckets add-iam-policy-binding gs://gcloud-bucket {member} --role=roles/storage.objectAdmin")


@pytest.mark.deep  # tests/controller/gcloud: what gcloud sends and describes, in every run
def test_storage(gcloud: Gcloud, cloud: EmulatedCloud, tmp_path: Path) -> None:
    tree = tmp_path / "tree" / "folder"
    tree.mkdir(parents=True)
    (tree / "small").write_text("hello")
    (tree / "big").write_bytes(os.urandom(9_000_000))  # from 8 MiB on gcloud uploads resumably
    gcloud(f"storage buckets create gs://gcloud-bucket --location={REGION} --uniform-bucket-level-access")
    gcloud("storage cp -r tree gs://gcloud-bucket/")
    gcloud("storage rsync -r gs://gcloud-bucket/tree copy")
    for name in ("small", "big"):
        assert (tmp_path / "copy" / "folder" / name).read_bytes() == (tree / name).read_bytes()
    assert gcloud("storage ls gs://gcloud-bucket/tree/folder/").split()[0] == "gs://gcloud-bucket/tree/folder/big"
    gcloud("storage rm -r gs://gcloud-bucket")
    assert "items" not in cloud.call_ok("GET", "storage/v1/b?project=slipway-local")

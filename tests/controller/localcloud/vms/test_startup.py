"""Startup scripts of TPU VMs: at every boot, on every worker, with the metadata server and without disks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from controller.resources.pod.data_disk import mount_part
from tests.controller.localcloud.harness import NODES, EmulatedCloud, wait_for

SCRIPT = f"""#!/bin/bash
{mount_part(100)}
lsblk && blkid && mkfs.ext4 /dev/sda && mount /dev/sda /mnt && echo "no disk was touched"
url="http://$GCE_METADATA_HOST/computeMetadata/v1/instance/attributes/agent-worker-number"
python3 -c "import sys, urllib.request as u
print(u.urlopen(u.Request(sys.argv[1], headers={{'Metadata-Flavor': 'Google'}})).read().decode())" "$url"
echo "$SLIPWAY_HOMES"
"""


def printed(home: Path) -> list[str]:
    log = home.parent / "startup.log"
    return log.read_text().splitlines() if log.exists() else []


def test_a_startup_script_runs_on_each_worker_at_each_boot(cloud: EmulatedCloud) -> None:
    cloud.create_network("startup")
    body: dict[str, Any] = cloud.node_body("startup")
    body["metadata"]["startup-script"] = SCRIPT
    cloud.call_and_wait("POST", f"{NODES}?nodeId=startup", body)
    uid = cloud.call_ok("GET", f"{NODES}/startup")["id"]
    home = cloud.state.resolve() / "nodes" / uid / "worker-0" / "home"
    once = ["no disk was touched", "0", str(home)]
    wait_for(lambda: printed(home) == once, "the script has run")
    cloud.call_and_wait("POST", f"{NODES}/startup:stop", {})
    cloud.call_and_wait("POST", f"{NODES}/startup:start", {})
    wait_for(lambda: printed(home) == once * 2, "the script has run at the second boot")

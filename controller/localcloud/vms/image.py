"""The "VM image": environment of a worker's programs, built from scratch."""

import os
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from controller.localcloud.vms.chips import DEVICE_FOLDER, SYSFS_FOLDER
from controller.localcloud.vms.processes import MARKER

COORDINATOR_PORT = 8482  # port of jax.distributed on Cloud TPU


CLOCK_FILE, DISK_FILE = "clock", "free_gb"
"""Files beside a worker's home with its clock skew and its free disk space, if they exist."""


@dataclass(frozen=True)
class EmulatedWorker:
    """VM of a node. `address` is what the cloud publishes; SSH listens on host:port."""

    uid: str  # ID of its node
    index: int
    address: str
    host: str
    port: int
    boot_id: str
    devices: int  # JAX devices of the VM
    boot_time: float = 0.0  # seconds since the epoch

    @property
    def name(self) -> str:
        """Name in the store; sorts by index."""
        return f"{self.uid}/{self.index:04d}"


def vm_name(worker: EmulatedWorker) -> str:
    """Return the name of the VM, which differs from that of the node."""
    return f"t1v-n-{worker.uid}-w-{worker.index}"


def process_marker(state: Path, worker: EmulatedWorker | None = None) -> str:
    """Return the marker's value for one worker, or the prefix shared by all workers of a state folder."""
    return f"{state}:{worker.name}" if worker else f"{state}:"


def worker_environment(
    worker: EmulatedWorker, hostnames: Sequence[str], *, home: Path, user: str, state: Path, url: str, token: str
) -> dict[str, str]:
    """Return a session's variables; `hostnames[i]` is where this worker finds worker i, `url` the server's root."""
    root = _vm_api_root(url, token, worker.uid, worker.index)
    return {
        **_session_environment(home, user, root),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(worker.devices),
        "JAX_FORCE_TPU_INIT": "1",
        # gloo binds the coordinator's address, not [::].
        "JAX_COORDINATOR_BIND_ADDRESS": f"{hostnames[0]}:{COORDINATOR_PORT}",
        "TPU_WORKER_HOSTNAMES": ",".join(hostnames),
        "TPU_WORKER_ID": str(worker.index),
        "MEGASCALE_COORDINATOR_ADDRESS": "",
        "MEGASCALE_NUM_SLICES": "",
        "MEGASCALE_SLICE_ID": "",
        "STORAGE_EMULATOR_HOST": root.rstrip("/"),
        "TENSORSTORE_GCS_HTTP_URL": root.rstrip("/"),
        "SLIPWAY_BOOT_ID": worker.boot_id,
        "SLIPWAY_BOOT_TIME": str(worker.boot_time),
        "SLIPWAY_VMSTAT": str(home.parent / "vmstat"),
        "SLIPWAY_CLOCK": str(home.parent / CLOCK_FILE),
        "SLIPWAY_FREE_GB": str(home.parent / DISK_FILE),
        "SLIPWAY_DEV": str(home.parent / DEVICE_FOLDER),
        "SLIPWAY_SYSFS": str(home.parent / SYSFS_FOLDER),  # keeps workers off this machine's kernel settings
        MARKER: process_marker(state, worker),
    }


def vm_environment(uid: str, home: Path, url: str, token: str) -> dict[str, str]:
    """Return the variables of the startup script of an instance that is not a TPU worker."""
    return _session_environment(home, "root", _vm_api_root(url, token, uid, 0))


def _vm_api_root(url: str, token: str, uid: str, index: int) -> str:
    """Return the server's URL for a VM; it holds the token and the VM's identity, replacing a header."""
    return f"{url}w/{token}/{uid}/{index}/"


def _session_environment(home: Path, user: str, root: str) -> dict[str, str]:
    metadata = root.removeprefix("http://").rstrip("/")
    bin_folders = [str(Path(sys.executable).parent), sysconfig.get_path("scripts")]
    path = [*dict.fromkeys(bin_folders), "/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"]
    return {
        "HOME": str(home),
        "USER": user,
        "LOGNAME": user,
        "SHELL": "/bin/bash",
        "LANG": "C.UTF-8",
        "PATH": os.pathsep.join(path),
        "TMPDIR": str(home.parent / "tmp"),
        "NO_GCE_CHECK": "true",
        "GCE_METADATA_HOST": metadata,
        "GCE_METADATA_IP": metadata,
        "GCE_METADATA_ROOT": metadata,
        "SLIPWAY_STORAGE_ROOT": root,
    }

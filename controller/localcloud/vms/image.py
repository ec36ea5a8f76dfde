"""The "VM image": environment of a worker's programs, its chips as files, and startup scripts."""

import asyncio
import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from controller.localcloud.apis.catalog import AcceleratorType
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
    worker: EmulatedWorker, peers: Sequence[EmulatedWorker], hostnames: Sequence[str], *, home: Path, user: str,
    state: Path, url: str, token: str,
) -> dict[str, str]:  # fmt: skip
    """Return a session's variables; `hostnames[i]` is where this worker finds `peers[i]`, `url` the server's root.

    It is told of them, as a TPU VM is not, only where their addresses do not lead there: behind a firewall, on macOS.
    """
    elsewhere = [*hostnames] != [peer.address for peer in peers]
    coordinator = f"{hostnames[0]}:{COORDINATOR_PORT}"
    told = {"TPU_WORKER_HOSTNAMES": ",".join(hostnames), "JAX_COORDINATOR_ADDRESS": coordinator} if elsewhere else {}
    root = f"{url}w/{token}/{worker.uid}/{worker.index}/"  # holds the VM's identity, replacing a header
    return {
        **_session_environment(home, user, root),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(worker.devices),
        "JAX_FORCE_TPU_INIT": "1",
        # gloo binds the coordinator's address, not [::].
        "JAX_COORDINATOR_BIND_ADDRESS": coordinator,
        **told,
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
    return _session_environment(home, "root", f"{url}w/{token}/{uid}/0/")


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


DEVICE_FOLDER, SYSFS_FOLDER = "dev", "sys"
"""Folders beside a worker's home that stand for /dev and /sys."""
_PCI_IDS = {"v2": "0x0027", "v3": "0x0027", "v4": "0x005e", "v5p": "0x0062", "v5e": "0x0063", "v6e": "0x006f"}
_ACCEL_GENERATIONS = frozenset({"v2", "v3", "v4"})
"""Generations with /dev/accel<n>; the others have /dev/vfio/<n> (source: controller/agent/commands/observe.py)."""


def install_chips(vm: Path, kind: AcceleratorType, *, missing: bool = False) -> None:
    """Make the device nodes of a VM as they are after a boot, of one chip less if one is `missing`."""
    dev, bus = vm / DEVICE_FOLDER, vm / SYSFS_FOLDER / "bus/pci/devices"
    for folder in (dev, bus):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    accel = kind.generation in _ACCEL_GENERATIONS
    if not accel:
        (dev / "vfio").mkdir()
        (dev / "vfio/vfio").touch()
    for number in range(kind.chips - missing):
        (dev / (f"accel{number}" if accel else f"vfio/{number}")).touch()
        slot = bus / f"0000:00:{4 + number:02x}.0"
        slot.mkdir()
        (slot / "vendor").write_text("0x1ae0\n")
        (slot / "device").write_text(f"{_PCI_IDS.get(kind.generation, '0x0076')}\n")


def first_chip(vm: Path) -> Path:
    """Return the device node of a VM's first chip."""
    dev = vm / DEVICE_FOLDER
    return next(path for path in (dev / "vfio/0", dev / "accel0") if path.exists())


STARTUP_SCRIPT_KEY = "startup-script"
"""Key of a node's metadata."""
ABSENT_TOOLS = ("lsblk", "blkid", "mkfs.ext4", "mount")
"""Tools that do nothing on an emulated VM, whose script must not touch the disks of this machine."""


def write_program(path: Path, text: str) -> Path:
    """Write a program that its owner may run; return its path."""
    path.write_text(text)
    path.chmod(0o700)
    return path


def startup_variables(home: Path, path: str) -> dict[str, str]:
    """Return the variables of a startup script that differ from those of a session with this PATH."""
    tools = home.parent / "sbin"
    tools.mkdir(exist_ok=True)
    for tool in (tools / name for name in ABSENT_TOOLS):
        if not tool.exists():
            write_program(tool, "#!/bin/sh\n")
    return {"PATH": os.pathsep.join([str(tools), path]), "SLIPWAY_HOMES": str(home)}


async def run_startup_script(folder: Path, script: str, variables: Mapping[str, str]) -> asyncio.subprocess.Process:
    """Start the script; its output goes to `startup.log` in the VM's folder."""
    program = write_program(folder / STARTUP_SCRIPT_KEY, script)
    with (folder / "startup.log").open("ab") as log:
        return await asyncio.create_subprocess_exec(
            str(program),
            cwd=folder,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=dict(variables),
        )

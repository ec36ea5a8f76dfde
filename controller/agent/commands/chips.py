"""TPU chips of this VM: their device nodes, their places on the PCI bus, and the processes that hold them.

v2 to v4 have /dev/accel<n>, later generations one VFIO group per chip, /dev/vfio/<n>. Sources: tpu-info
(https://github.com/AI-Hypercomputer/cloud-accelerator-diagnostics, tpu_info/device.py at 2cbfaa9) and JAX 0.10.2
(jax/_src/hardware_utils.py).
"""

from __future__ import annotations

import os
import pwd
from pathlib import Path
from typing import TYPE_CHECKING

from ..process import command_line, processes_with_open_file
from ..program.state import active_attempt
from .tidy import libtpu_lockfile, sysfs_root

if TYPE_CHECKING:
    from ..protocol import ChipHolder, Chips

GOOGLE = "0x1ae0"
"""PCI vendor id."""
TPU_IDS = frozenset({"0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076"})
"""PCI device ids of v2 and v3, an unnamed TPU, v4, v5p, v5e, v6e and TPU7x; Google's network card has another."""


def chips() -> Chips:
    """Return the state of this VM's chips. While a program of ours runs, nobody is listed as their holder."""
    nodes = _device_nodes()
    holders = [] if active_attempt() else _holders(nodes)
    return {"paths": list(nodes.values()), "on_pci": _chips_on_pci(), "holders": holders}


def _device_nodes() -> dict[str, str]:
    """Return the path under /dev of each chip, by its real path; an emulated worker has another folder for /dev."""
    dev = Path(os.environ.get("SLIPWAY_DEV", "/dev"))
    found = [*dev.glob("accel[0-9]*"), *dev.glob("vfio/[0-9]*")]  # /dev/vfio/vfio is no chip
    numbers = {path: path.name.removeprefix("accel") for path in found}
    ordered = sorted((path for path in found if numbers[path].isdigit()), key=lambda path: int(numbers[path]))
    return {os.path.realpath(path): f"/dev/{path.relative_to(dev)}" for path in ordered}


def _chips_on_pci() -> int:
    """Return how many TPU chips the PCI bus has, with or without a driver."""
    found = 0
    for vendor in (sysfs_root() / "bus/pci/devices").glob("*/vendor"):
        try:
            if vendor.read_text().strip() == GOOGLE and vendor.with_name("device").read_text().strip() in TPU_IDS:
                found += 1
        except OSError:
            continue  # the device has gone
    return found


def _holders(nodes: dict[str, str]) -> list[ChipHolder]:
    """Return the processes that have a device node, or libtpu's lock file, open."""
    lock = libtpu_lockfile()
    wanted = {**nodes, os.path.realpath(lock): str(lock)}
    found = processes_with_open_file(set(wanted))
    return [
        {"pid": pid, "user": _owner(pid), "command": command_line(pid), "paths": sorted(wanted[path] for path in paths)}
        for pid, paths in sorted(found.items())
    ]


def _owner(pid: int) -> str:
    try:
        uid = Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return "unknown"  # it has ended
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)

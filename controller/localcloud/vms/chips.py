"""TPU chips of the VMs as files: device nodes and their entries on the PCI bus. Nothing can be computed on them."""

import shutil
from pathlib import Path

from controller.localcloud.apis.catalog import AcceleratorType

DEVICE_FOLDER, SYSFS_FOLDER = "dev", "sys"
"""Folders beside a worker's home that stand for /dev and /sys."""
_PCI_IDS = {"v2": "0x0027", "v3": "0x0027", "v4": "0x005e", "v5p": "0x0062", "v5e": "0x0063", "v6e": "0x006f"}
_ACCEL_GENERATIONS = frozenset({"v2", "v3", "v4"})
"""Generations with /dev/accel<n>; the others have /dev/vfio/<n> (controller/agent/commands/chips.py has the source)."""


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

"""The devices of this machine for `cloud=here`, found without JAX: counting them with JAX would occupy them."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from conf.schema.cloud import HereCloud
from conf.schema.config import Config
from controller.core.errors import ConfigError
from controller.core.text import plural

Backend = Literal["cpu", "gpu", "tpu"]
JAX_NAMES: Mapping[str, Backend] = {"cpu": "cpu", "cuda": "gpu", "rocm": "gpu", "gpu": "gpu", "tpu": "tpu"}
"""Backends by their names in JAX_PLATFORMS."""
GOOGLE = "0x1ae0"
"""PCI vendor id of Google, of TPUs among others."""
TWO_CORES = "0x0027"
"""PCI device id of TPU v2 and v3, whose chips are two JAX devices each."""


@dataclass(frozen=True)
class Devices:
    """Devices that this machine has, and the backend that JAX is told to use ("": its own choice)."""

    gpus: int = 0
    tpus: int = 0
    told: str = ""
    visible: tuple[str, ...] = field(default=())
    """Entries of CUDA_VISIBLE_DEVICES, if it is set."""

    @property
    def backend(self) -> Backend:
        """Return what `cloud.backend=auto` means: what JAX is told, else the best that the machine has."""
        if self.told in JAX_NAMES:
            return JAX_NAMES[self.told]
        return "tpu" if self.tpus else "gpu" if self.gpus else "cpu"

    def count(self, backend: str) -> int:
        """Return how many devices of a backend there are; of virtual CPU devices there can be any number."""
        return {"gpu": self.gpus, "tpu": self.tpus}.get(backend, 0)


def find_devices(
    environment: Mapping[str, str] = os.environ, dev: Path = Path("/dev"), sysfs: Path = Path("/sys")
) -> Devices:
    """Look for device nodes of NVIDIA GPUs and of TPUs."""
    numbered = [path for path in dev.glob("nvidia[0-9]*") if path.name.removeprefix("nvidia").isdigit()]
    gpus, visible = len(numbered), environment.get("CUDA_VISIBLE_DEVICES")
    named = tuple(word.strip() for word in (visible or "").split(",") if word.strip() and word.strip() != "-1")
    if visible is not None:
        gpus = min(gpus, len(named))
    told = environment.get("JAX_PLATFORMS", "").partition(",")[0].strip().lower()
    return Devices(gpus, _tpu_devices(dev, sysfs), told, named)


def _tpu_devices(dev: Path, sysfs: Path) -> int:
    ids = [_pci_device(path) for path in sysfs.glob("bus/pci/devices/*/vendor")]
    nodes = [*dev.glob("accel[0-9]*")]
    if any(ids):  # other devices than TPUs are passed through VFIO too
        nodes += [path for path in dev.glob("vfio/[0-9]*") if path.name.isdigit()]
    return len(nodes) * (2 if TWO_CORES in ids else 1)


def _pci_device(vendor: Path) -> str:
    """Return the device id of a PCI device by Google, "" for others; Google's network card is none of its chips."""
    try:
        if vendor.read_text().strip() != GOOGLE:
            return ""
        found = vendor.with_name("device").read_text().strip()
    except OSError:
        return ""
    return "" if found == "0x0042" else found


def resolve_machine(config: Config, found: Devices | None = None) -> Config:
    """Return the config with the devices of this machine in place of `auto` and `null`, if `cloud=here`."""
    cloud = config.cloud
    if not isinstance(cloud, HereCloud):
        return config
    found = found or find_devices()
    backend = found.backend if cloud.backend == "auto" else cloud.backend
    devices = cloud.devices
    if not isinstance(devices, tuple):
        devices = tuple(range(devices or found.count(backend) or 1))
    return config.model_copy(update={"cloud": cloud.model_copy(update={"backend": backend, "devices": devices})})


def share_devices(cloud: HereCloud, part: int, parts: int) -> HereCloud:
    """Return the cloud with the devices of one of several runs at the same time.

    Virtual CPU devices are not shared: each run gets as many as one would.

    Args:
        cloud: resolved cloud.
        part: number of the part, from 1.
        parts: number of parts.

    Raises:
        ConfigError: there are fewer devices than parts.
    """
    indices, size = cloud.indices, len(cloud.indices)
    if cloud.backend == "cpu":
        return cloud.model_copy(update={"devices": tuple(range((part - 1) * size, part * size))})
    each = size // parts
    if not each or part * each > size:
        wanted = plural(max(part, parts), "run")
        raise ConfigError(f"sweep.pods: {wanted} at a time need a device each, but this machine offers {size}")
    if cloud.backend == "tpu" and 1 < each < size:
        raise ConfigError(f"sweep.pods: TPU chips are given to runs singly or all together; set it to {size} or 1")
    return cloud.model_copy(update={"devices": indices[(part - 1) * each : part * each]})

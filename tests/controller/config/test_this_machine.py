"""The devices of a machine, from its device nodes and variables, and their division among runs."""

from pathlib import Path
from typing import Any

import pytest

from conf.schema.config import Config
from conf.schema.infra.cloud import HereCloud
from controller.config.this_machine import Devices, find_devices, resolve_machine, share_devices
from controller.core.errors import ConfigError
from tests.composed import config_of, problems_of


def machine(root: Path, nodes: list[str] = [], pci: list[tuple[str, str]] = [], **environment: str) -> Devices:  # noqa: B006
    for name in nodes:
        (root / "dev" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "dev" / name).touch()
    for number, (vendor, device) in enumerate(pci):
        folder = root / "sys/bus/pci/devices" / str(number)
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "device").write_text(f"{device}\n")
    return find_devices(environment, root / "dev", root / "sys")


V5E, V3, NIC = ("0x1ae0", "0x0063"), ("0x1ae0", "0x0027"), ("0x1ae0", "0x0042")


@pytest.mark.parametrize(
    ("facts", "backend", "count"),
    [
        ({}, "cpu", 0),
        ({"nodes": ["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"]}, "gpu", 2),
        ({"nodes": ["nvidia0", "nvidia1"], "CUDA_VISIBLE_DEVICES": "1"}, "gpu", 1),
        ({"nodes": ["nvidia0"], "CUDA_VISIBLE_DEVICES": ""}, "cpu", 0),
        ({"nodes": ["nvidia0"], "CUDA_VISIBLE_DEVICES": "-1"}, "cpu", 0),
        ({"nodes": ["nvidia0"], "JAX_PLATFORMS": "cpu"}, "cpu", 0),
        ({"JAX_PLATFORMS": "cuda,cpu"}, "gpu", 0),
        ({"nodes": ["vfio/0", "vfio/1", "vfio/vfio"], "pci": [V5E, V5E, NIC]}, "tpu", 2),
        ({"nodes": ["vfio/0"], "pci": [("0x10de", "0x2684")]}, "cpu", 0),
        ({"nodes": ["vfio/0"], "pci": [NIC]}, "cpu", 0),
        ({"nodes": [f"accel{n}" for n in range(4)], "pci": [V3] * 4}, "tpu", 8),
    ],
)
def test_devices_are_counted_without_jax(tmp_path: Path, facts: Any, backend: str, count: int) -> None:
    found = machine(tmp_path, **facts)
    assert (found.backend, found.count(backend)) == (backend, count)


def here(*words: str, found: Devices = Devices()) -> Config:  # noqa: B008
    config = config_of("+experiment=quickstart", "cloud=here", *words)
    raw = config.cloud.model_copy(update={"backend": "auto", "devices": None} if not words else {})
    return resolve_machine(config.model_copy(update={"cloud": raw}), found)


def test_a_config_gets_the_devices_of_the_machine() -> None:
    config = here(found=Devices(gpus=2))
    assert (config.topology.accelerator_type, config.topology.devices, config.topology.workers) == ("gpu-2", 2, 1)
    assert config.pod_name == "here-gpu-0to1"
    assert here("cloud.backend=cpu", "cloud.devices=8").topology.accelerator_type == "cpu-8"
    assert here("cloud.backend=gpu", "cloud.devices=[0,2]").pod_name == "here-gpu-0-2"
    assert here("cloud.backend=gpu", "tpu=v4_64", "tpu.name=mine").pod_name == "here-gpu-0"
    elsewhere = config_of("+experiment=quickstart", "cloud=gcp")
    assert config.run_id("code", {}) == elsewhere.run_id("code", {}), "that of a pod"


def test_a_run_needs_devices() -> None:
    least = "at least one device"
    for devices, said in {"0": least, "[]": least, "[1,1]": "twice", "-2": least}.items():
        assert said in " ".join(problems_of("+experiment=quickstart", "cloud=here", f"cloud.devices={devices}"))


def cloud(backend: str, devices: int) -> HereCloud:
    made = here(f"cloud.backend={backend}", f"cloud.devices={devices}").cloud
    assert isinstance(made, HereCloud)
    return made


def test_runs_at_the_same_time_share_the_devices() -> None:
    assert [share_devices(cloud("gpu", 5), n, 2).indices for n in (1, 2)] == [(0, 1), (2, 3)]
    assert [share_devices(cloud("tpu", 4), n, 4).indices for n in (1, 4)] == [(0,), (3,)]
    assert share_devices(cloud("tpu", 4), 1, 1).indices == (0, 1, 2, 3)
    assert [share_devices(cloud("cpu", 2), n, 2).indices for n in (1, 2)] == [(0, 1), (2, 3)]
    with pytest.raises(ConfigError, match="3 runs at a time need a device each, but this machine offers 2"):
        share_devices(cloud("gpu", 2), 1, 3)
    with pytest.raises(ConfigError, match="3 runs at a time"):
        share_devices(cloud("gpu", 2), 3, 2)
    with pytest.raises(ConfigError, match="singly or all together; set it to 4 or 1"):
        share_devices(cloud("tpu", 4), 1, 2)

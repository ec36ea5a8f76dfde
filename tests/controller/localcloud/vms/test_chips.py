"""Chips of the emulated VMs: device nodes as each generation has them, and the faults that take or hold one."""

from __future__ import annotations

from pathlib import Path

import pytest

from controller.localcloud.apis.catalog import load_catalog
from controller.localcloud.vms.chips import first_chip, install_chips
from tests.controller.localcloud.harness import NODES, EmulatedCloud, is_alive, wait_for

LIST = "cd $SLIPWAY_DEV && find . -type f | sort | tr '\\n' ' '"


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("v2-8", "accel0 accel1 accel2 accel3"),
        ("v4-16", "accel0 accel1 accel2 accel3"),
        ("v5litepod-1", "vfio/0 vfio/vfio"),
        ("v5p-8", "vfio/0 vfio/1 vfio/2 vfio/3 vfio/vfio"),
        ("v6e-8", "vfio/0 vfio/1 vfio/2 vfio/3 vfio/4 vfio/5 vfio/6 vfio/7 vfio/vfio"),
    ],
)
def test_device_nodes_of_a_generation(tmp_path: Path, name: str, files: str) -> None:
    kind = load_catalog().types[name]
    install_chips(tmp_path, kind)
    dev, bus = tmp_path / "dev", tmp_path / "sys/bus/pci/devices"
    found = sorted(path.relative_to(dev).as_posix() for path in dev.rglob("*") if path.is_file())
    assert found == files.split()
    assert len(list(bus.iterdir())) == kind.chips
    assert first_chip(tmp_path).exists()
    install_chips(tmp_path, kind, missing=True)
    assert len(list(bus.iterdir())) == kind.chips - 1


def test_a_missing_chip_and_a_held_one(fresh_cloud: EmulatedCloud) -> None:
    held = {"kind": "chip_held", "worker": 2, "seconds": 600}
    fresh_cloud.script({"kind": "chip_missing", "worker": 1}, held)
    node = fresh_cloud.create_pod("v5litepod-16")
    found = [str(fresh_cloud.run_on_worker(node, LIST, worker).stdout).split() for worker in (0, 1)]
    assert [len(paths) for paths in found] == [5, 4]
    holder = "for fd in /proc/[0-9]*/fd/0; do [ $fd -ef $SLIPWAY_DEV/vfio/0 ] && echo $fd; done; true"

    def held_by(worker: int) -> list[int]:
        return [int(line.split("/")[2]) for line in str(fresh_cloud.run_on_worker(node, holder, worker).stdout).split()]

    [pid] = wait_for(lambda: held_by(2), "a process holds it")
    assert held_by(0) == []
    fresh_cloud.delete(f"{NODES}/pod")
    wait_for(lambda: not is_alive(pid), "it ends with the VM")
    again = fresh_cloud.create_node("pod", "net", "v5litepod-16")
    assert len(str(fresh_cloud.run_on_worker(again, LIST, 1).stdout).split()) == 5, "once"

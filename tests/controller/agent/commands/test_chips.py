"""What the agent says of a VM's chips: their device nodes, the PCI bus, and who holds them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from controller.agent import process
from tests.controller.agent.conftest import AgentWorker, ProgramRun


@pytest.fixture
def vm(worker: AgentWorker, tmp_path: Path) -> Path:
    """The folder whose `dev` and `sys` the worker takes for its own."""
    worker.extra_environment |= {
        "SLIPWAY_DEV": str(tmp_path / "dev"),
        "SLIPWAY_SYSFS": str(tmp_path / "sys"),
        "TMPDIR": str(tmp_path / "tmp"),
    }
    (tmp_path / "dev/vfio").mkdir(parents=True)
    (tmp_path / "tmp").mkdir()
    return tmp_path


def add_pci_device(vm: Path, slot: int, vendor: str, device: str) -> None:
    folder = vm / f"sys/bus/pci/devices/0000:00:{slot:02x}.0"
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(f"{vendor}\n")
    (folder / "device").write_text(f"{device}\n")


@pytest.mark.parametrize(
    ("files", "paths"),
    [
        (("accel0", "accel1", "accel10", "accel2"), ["/dev/accel0", "/dev/accel1", "/dev/accel2", "/dev/accel10"]),
        (("vfio/vfio", "vfio/1", "vfio/0"), ["/dev/vfio/0", "/dev/vfio/1"]),
        (("null", "accelerometer", "accel0x"), []),
    ],
)
def test_device_nodes(worker: AgentWorker, vm: Path, files: tuple[str, ...], paths: list[str]) -> None:
    for name in files:
        (vm / "dev" / name).touch()
    assert worker.call("observe", chips=True)["chips"] == {"paths": paths, "on_pci": 0, "holders": []}
    assert worker.call("observe")["chips"] is None


def test_the_pci_bus_counts_chips_without_a_driver_and_no_network_cards(worker: AgentWorker, vm: Path) -> None:
    add_pci_device(vm, 4, "0x1ae0", "0x0063")
    add_pci_device(vm, 5, "0x1ae0", "0x0042")  # gVNIC
    add_pci_device(vm, 6, "0x8086", "0x0063")
    assert worker.call("observe", chips=True)["chips"] == {"paths": [], "on_pci": 1, "holders": []}


def test_whoever_has_a_chip_or_the_lock_open_holds_it(run: ProgramRun, vm: Path) -> None:
    (vm / "dev/vfio/0").touch()
    (lock := vm / "tmp/libtpu_lockfile").touch()
    source = f"import sys; files = open({str(vm / 'dev/vfio/0')!r}), open({str(lock)!r}); print(); sys.stdin.read()"
    argv = [sys.executable, "-c", source]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as notebook:
        assert notebook.stdout
        notebook.stdout.readline()
        [holder] = run.worker.call("observe", chips=True)["chips"]["holders"]
        assert (holder["pid"], holder["paths"]) == (notebook.pid, sorted(["/dev/vfio/0", str(lock)]))
        assert holder["command"] == f"{sys.executable} -c"[:120], "later words may be secrets"
        assert holder["user"]
        run.start("import time; time.sleep(600)")
        assert run.worker.call("observe", chips=True)["chips"]["holders"] == [], "a program of ours may use them"
        run.worker.call("stop", run_id="run-1", grace_seconds=30)
        notebook.communicate(b"")
    assert run.worker.call("observe", chips=True)["chips"]["holders"] == []


def test_processes_of_others_are_seen_with_sudo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the tests may be root, to whom nothing is hidden: so the hidden folders are given."""
    sudo = tmp_path / "sudo"
    sudo.write_text('#!/bin/sh\n[ "$1 $2 $3" = "-n find /proc/1/fd" ] && echo "/proc/1/fd /dev/vfio/0"; exit 1\n')
    sudo.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert process._open_files_as_root(["/proc/1/fd"]) == [(1, "/dev/vfio/0")]
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert process._open_files_as_root(["/proc/1/fd"]) == []

"""What the agent says of a VM's chips: device nodes, PCI bus, holders; what JAX sees; peers; and the health check.

tests/scenarios/recovery/test_recovery.py has two workers that can finish the health check.
"""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import controller.agent.commands.observe
from controller.agent import worker_processes
from controller.agent.commands import chip_check
from controller.agent.commands.chip_check import ON_CPU, ON_TPU, Sizes
from controller.agent.commands.observe import STAGES
from tests.controller.agent.conftest import AgentWorker, ProgramRun
from tests.fakes.loopback import free_port


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


def add_pci_device(vm: Path, slot: int, vendor: str, device: str, function: int = 0) -> None:
    folder = vm / f"sys/bus/pci/devices/0000:00:{slot:02x}.{function}"
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
    add_pci_device(vm, 4, "0x1ae0", "0x0063", function=1)
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
    assert worker_processes._open_files_as_root(["/proc/1/fd"]) == [(1, "/dev/vfio/0")]
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert worker_processes._open_files_as_root(["/proc/1/fd"]) == []


FAKE_JAX = """
import pathlib
with open(pathlib.Path.home() / "asked", "a") as file:
    file.write("x")
class Device:
    device_kind = "TPU v5 lite"
def local_devices():
    print("a library that is talkative")
    return [Device()] * 4
def default_backend():
    return "tpu"
def device_count():
    return 16
"""


def with_jax(run: ProgramRun, source: str) -> ProgramRun:
    """Put a module in front of the image's jax, which would take seconds."""
    [site] = run.worker.root.glob("venv/*/lib/python*/site-packages")
    (site / "jax.py").write_text(source)
    return run


def test_devices_are_asked_for_once_per_boot(run: ProgramRun) -> None:
    worker = with_jax(run, FAKE_JAX).worker
    expected = {"boot_id": "boot-1", "backend": "tpu", "local_devices": 4, "devices": 16, "kind": "TPU v5 lite"}
    assert worker.call("observe")["devices"] is None
    for _ in range(2):
        assert worker.call("probe_devices", venv="image") == expected
    assert worker.call("observe")["devices"] == expected
    assert (worker.home / "asked").read_text() == "x"
    worker.boot_id = "boot-2"
    assert worker.call("observe")["devices"] is None
    assert worker.call("probe_devices", venv="image")["boot_id"] == "boot-2"
    assert (worker.home / "asked").read_text() == "xx"


def test_a_jax_that_fails_is_told_and_not_recorded(run: ProgramRun) -> None:
    worker = with_jax(run, "raise RuntimeError('no libtpu here')").worker
    refusal = worker.call_error("probe_devices", venv="image")
    assert "RuntimeError: no libtpu here" in refusal["error"]
    assert "Traceback" in refusal["detail"]
    assert worker.call("observe")["devices"] is None


ALONE: dict[str, Any] = {"processes": 1, "index": 0, "coordinator": "10.0.0.2:8482"}


def test_a_jax_that_hangs_is_ended_and_devices_that_a_run_holds_are_left_alone(run: ProgramRun) -> None:
    worker, words = with_jax(run, "import time\ntime.sleep(600)").worker, "did not finish within 0.5 s"
    asked = {"venv": "image", "timeout_seconds": 0.5}
    assert words in worker.call_error("probe_devices", **asked)["error"]
    answer = worker.call("check_health", **ALONE, **asked)
    assert answer["stage"] == "importing JAX"
    assert words in answer["problem"]
    run.start("import time; time.sleep(600)")
    for command, more in (("probe_devices", {}), ("check_health", ALONE)):
        assert "run-1 is using the devices" in worker.call_error(command, venv="image", **more)["error"]


@pytest.fixture
def port() -> int:
    return free_port()


def test_peers_find_worker_0(worker: AgentWorker, port: int) -> None:
    payload = {"addresses": ["127.0.0.1"] * 3, "port": port, "timeout_seconds": 300}
    asked = [worker.start_command("probe_peers", index=index, **payload) for index in (2, 1, 0)]
    found = {"boot_id": "boot-1", "reachable": True, "detail": ""}
    assert [worker.finish_command(process)[1] for process in asked] == [[found]] * 3
    assert worker.call("observe")["peers"] == found


def test_peers_that_cannot_reach_worker_0_say_so(worker: AgentWorker, port: int) -> None:
    worker.extra_environment = {
        "TPU_WORKER_HOSTNAMES": "127.0.0.1,127.0.0.1"
    }  # it counts more than what the caller knows
    alone = {"addresses": ["192.0.2.1", "192.0.2.1"], "port": port, "timeout_seconds": 0.3}
    assert f"does not answer at 127.0.0.1:{port}" in worker.call("probe_peers", index=1, **alone)["detail"]
    answer = worker.call("probe_peers", index=0, **alone)
    assert (answer["reachable"], answer["detail"]) == (False, "worker 0 received nothing from worker 1")
    worker.boot_id = "boot-2"
    assert worker.call("observe")["peers"] is None


def test_a_port_that_is_taken_is_told(worker: AgentWorker) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        number = server.getsockname()[1]
        answer = worker.call("probe_peers", index=0, addresses=["127.0.0.1"] * 2, port=number, timeout_seconds=30)
    assert "cannot listen" in answer["detail"]


PASSES = """
import json, sys
print(json.dumps({"backend": "tpu", "local_devices": 4, "devices": 4, "kind": "TPU v4", "process": 0,
                  "faults": %s, "tflops": 200.0, "hbm_gb": 26.0, "seconds": 9.0}))
sys.exit()
"""
FAULT = {"process": 0, "device": 1, "message": "broken"}


def test_stages_are_those_of_the_program() -> None:
    source = Path(controller.agent.commands.observe.__file__).with_name("chip_check.py").read_text()
    assert tuple(re.findall(r'begin\("([\w -]+)"', source)) == STAGES[1:]


def test_a_jax_that_fails_says_at_which_stage(run: ProgramRun) -> None:
    worker = with_jax(run, "raise RuntimeError('no libtpu here')").worker
    answer = worker.call("check_health", venv="image", **ALONE)
    assert (answer["stage"], answer["problem"]) == ("importing JAX", "RuntimeError: no libtpu here")
    assert worker.call("observe")["health"] is None


def test_the_stage_is_known_however_much_a_crash_prints(run: ProgramRun) -> None:
    crash = (
        "import sys\nopen(sys.argv[2], 'w').write('HBM')\nsys.exit('E0000 uncorrectable error\\n' + 9000 * ' frame\\n')"
    )
    worker = with_jax(run, crash).worker
    assert worker.call("check_health", venv="image", **ALONE)["stage"] == "HBM"


def test_success_counts_for_one_boot_and_a_fault_for_none(run: ProgramRun) -> None:
    worker = with_jax(run, PASSES % [FAULT]).worker
    assert worker.call("check_health", venv="image", **ALONE)["faults"] == [FAULT]
    assert worker.call("observe")["health"] is None
    with_jax(run, PASSES % [])
    answer = worker.call("check_health", venv="image", **ALONE)
    assert (answer["stage"], answer["boot_id"]) == ("done", "boot-1")
    seen = worker.call("observe")
    assert (seen["health"], seen["devices"]["local_devices"]) == (answer, 4)
    worker.boot_id = "boot-2"
    assert worker.call("observe")["health"] is None


SIDE, PRODUCTS, WORDS = 64, 4, 4096


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return Mesh(np.array(jax.local_devices()[:1]), ("chip",))


@pytest.fixture(scope="module")
def total() -> np.ndarray:
    a, b = (x.astype(jnp.bfloat16) for x in chip_check.factors(SIDE, PRODUCTS))
    return np.asarray(chip_check.sum_of_products(jnp.asarray(a), jnp.asarray(b), PRODUCTS))


@pytest.mark.parametrize("sizes", [ON_TPU, ON_CPU])
def test_sums_are_exact_in_float32(sizes: Sizes) -> None:
    assert sizes.side * sizes.products < 2**24
    assert sizes.block_words % chip_check.COLUMNS == 0


def test_a_right_product_passes(total: np.ndarray) -> None:
    a, b = chip_check.factors(SIDE, PRODUCTS)
    assert (total == sum(a[k : k + SIDE].astype(int) @ b.astype(int) for k in range(PRODUCTS))).all()
    assert chip_check.wrong_rows(a, b, total, PRODUCTS) == 0


@pytest.mark.parametrize("wrong", ["one bit", "one element", "a row of zeros", "a missing product", "not a number"])
def test_a_wrong_product_is_found(total: np.ndarray, wrong: str) -> None:
    a, b = chip_check.factors(SIDE, PRODUCTS)
    broken = total.copy()
    if wrong == "one bit":
        broken.view(np.uint32)[3, 5] ^= 1 << 20
    elif wrong == "one element":
        broken[3, 5] += 1
    elif wrong == "a row of zeros":
        broken[3] = 0
    elif wrong == "not a number":
        broken[3, 5] = np.nan
    else:
        broken -= a[:SIDE].astype(np.float32) @ b.astype(np.float32)
    assert chip_check.wrong_rows(a, b, broken, PRODUCTS) == (SIDE if wrong == "a missing product" else 1)


@pytest.mark.parametrize("changes", [(), ((0, 0, 0),), ((0, 3, 1023), (0, 2, 7))])
def test_words_that_changed_in_memory_are_counted(mesh: Mesh, changes: tuple[tuple[int, ...], ...]) -> None:
    rows = NamedSharding(mesh, PartitionSpec("chip"))
    block = chip_check.pattern(jnp.uint32(7), WORDS, rows)
    for place in changes:
        block = block.at[place].set(block[place] ^ 1)
    assert np.asarray(chip_check.wrong_words(block, jnp.uint32(7), rows)).tolist() == [len(changes)]


def test_a_block_that_holds_another_pattern_is_wrong_throughout(mesh: Mesh) -> None:
    """As when two addresses lead to the same place."""
    rows = NamedSharding(mesh, PartitionSpec("chip"))
    block = chip_check.pattern(jnp.uint32(7), WORDS, rows)
    assert np.asarray(chip_check.wrong_words(block, jnp.uint32(8), rows)).tolist() == [WORDS]


def test_every_chip_must_take_part_in_the_all_reduce() -> None:
    right = chip_check.expected_rows(4, 8)
    assert chip_check.all_reduce_faults({0: right, 1: right.copy()}, 4, 8) == []
    absent = right.copy()
    absent[2] = 0
    adds = "what it adds to the all-reduce is missing or wrong"
    assert chip_check.all_reduce_faults({0: absent, 1: absent.copy()}, 4, 8) == [(2, adds)], "told once"
    twice = right.copy()
    twice[1] *= 2
    assert chip_check.all_reduce_faults({3: twice}, 4, 8) == [(1, adds)]
    deaf = {0: right, 3: np.zeros_like(right)}
    assert chip_check.all_reduce_faults(deaf, 4, 8) == [(3, "its result of the all-reduce is wrong")]


def test_good_devices_pass(mesh: Mesh) -> None:
    small = Sizes(SIDE, PRODUCTS, WORDS, 8)
    faults, rate = chip_check.check_products(mesh, small)
    assert (faults, rate > 0) == ([], True)
    assert chip_check.check_memory(mesh, small) == ([], pytest.approx(2 * 4e-9 * WORDS))
    assert chip_check.check_all_reduce(mesh, small) == []

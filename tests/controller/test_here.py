"""This machine in place of a pod: the link to its agent, its devices and their division among runs."""

import os
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from conf.schema.cloud import HereCloud
from conf.schema.config import Config
from controller import here as here_module
from controller import here as link_module
from controller.agent.protocol import OBSERVE, STATE
from controller.config.this_machine import Devices, find_devices, resolve_machine, share_devices
from controller.core.errors import ConfigError
from controller.here import LocalLink, agent_environment, open_fleet, write_python
from controller.ssh import agent_link
from controller.ssh.agent_link import AgentBundle, WorkerError, build_bundle
from tests.composed import config_of, problems_of
from tests.controller.localcloud.harness import wait_for

Make = Callable[[str], LocalLink]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Return a link whose agent is the given program."""

    def made(program: str) -> LocalLink:
        bundle = AgentBundle(f"agent-{zlib.crc32(program.encode())}.py", program.encode())
        return LocalLink(tmp_path / "root", [sys.executable], dict(os.environ), bundle)

    return made


def test_the_real_agent_answers(tmp_path: Path) -> None:
    root = tmp_path / "root"
    environment = os.environ | {"SLIPWAY_AGENT_ROOT": str(root), "SLIPWAY_SYSFS": "/nonexistent"}
    link = LocalLink(root, [sys.executable], environment, build_bundle())
    assert link.call(OBSERVE, {})["active"] is None
    assert link.call(STATE, {"run_id": "run-1", "attempt": 1})["state"] == "absent"
    assert (root / "heartbeat").is_file(), "it keeps to its folder"
    with pytest.raises(WorkerError, match=r"worker 0 \(this machine\): .* is not a valid name"):
        link.call(STATE, {"run_id": "../x", "attempt": 1})


def test_lines_arrive_as_they_are_printed(make: Make) -> None:
    link = make('import time\nfor n in (1, 2): print(\'{"format": 1, "n": %d}\' % n, flush=True)\ntime.sleep(600)')
    lines = link.stream("watch", {})
    assert [next(lines)["n"], next(lines)["n"]] == [1, 2]
    link.close()
    with pytest.raises(WorkerError, match="was closed on this side"):
        next(lines)
    with pytest.raises(WorkerError) as late:
        link.call("observe", {})
    assert (late.value.kind, link.closed) == ("dropped", True)


def test_an_agent_that_fails_is_quoted(make: Make) -> None:
    with pytest.raises(WorkerError) as failed:
        make("import sys; sys.exit('no space left')").call("observe", {})
    assert (failed.value.kind, failed.value.detail) == ("agent", "no space left\n")
    with pytest.raises(WorkerError, match="did not return JSON"):
        make("print('hello')").call("observe", {})


def test_a_command_that_takes_too_long_is_ended(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(agent_link.COMMAND_TIMEOUTS, "observe", 0.05)
    with pytest.raises(WorkerError) as late:
        make("import time; time.sleep(600)").call("observe", {})
    assert late.value.kind == "timeout"


def test_what_a_command_leaves_running_goes_on(make: Make, tmp_path: Path) -> None:
    asked, answered = tmp_path / "asked", tmp_path / "answered"
    child = f"for i in $(seq 6000); do [ -e {asked} ] && exec touch {answered}; sleep 0.01; done"
    program = f"""
import subprocess
quiet = subprocess.DEVNULL
child = subprocess.Popen(["sh", "-c", {child!r}], stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)
print('{{"format": 1}}', flush=True)
"""
    make(program).call("anything", {})
    asked.touch()  # only a child that has outlived the command sees it
    wait_for(answered.exists, "the child's answer")


def test_a_shell_command_passes_its_output_on(make: Make) -> None:
    out, err = bytearray(), bytearray()
    assert make("").follow("echo here; echo there >&2; exit 3", out.extend, err.extend) == 3
    assert (bytes(out), bytes(err)) == (b"here\n", b"there\n")
    assert make("").follow("kill -9 $$", out.extend, err.extend) == 137
    assert make("").follow("cat; echo end of input", out.extend, err.extend) == 0
    assert bytes(out) == b"here\nend of input\n"


def test_a_command_that_prints_faster_than_it_is_read_waits(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the log of a run would pile up in the controller's memory."""
    made: list[Queue[bytes | None]] = []

    class Watched(Queue[bytes | None]):
        def __init__(self, size: int = 0) -> None:
            super().__init__(size)
            made.append(self)

    monkeypatch.setattr(link_module, "Queue", Watched)
    done, words = tmp_path / "done", "x" * 100_000
    print_all = f'for n in range(400): print(\'{{"format": 1, "n": %d, "log": "{words}"}}\' % n, flush=True)'
    lines = make(f"{print_all}\nopen({str(done)!r}, 'w').close()").stream("watch", {})
    assert next(lines)["n"] == 0
    wait_for(lambda: done.exists() or made[0].full(), "the agent waits")
    assert not done.exists()
    assert [line["n"] for line in lines] == list(range(1, 400))
    assert done.exists()


def cloud(*words: str) -> HereCloud:
    found = config_of("+experiment=quickstart", "cloud=here", *words).cloud
    assert isinstance(found, HereCloud)
    return found


def environment(words: list[str], found: Devices, **given: str) -> dict[str, str]:
    return agent_environment(cloud(*words), Path("/s/here/pod"), {"PATH": "/bin", "HF_HOME": "/hf", **given}, found)


def test_the_user_s_variables_stay() -> None:
    made = environment(["cloud.backend=cpu"], Devices(), MPLBACKEND="module://matplotlib_inline.backend_inline")
    assert (made["HF_HOME"], made["SLIPWAY_AGENT_ROOT"]) == ("/hf", "/s/here/pod")
    assert made["PATH"].split(":") == ["/s/here/pod/bin", str(Path(sys.executable).parent), "/bin"]
    assert "MPLBACKEND" not in made
    assert "SLIPWAY_DEVICE_LOCKS" not in made
    assert environment(["cloud.backend=cpu"], Devices(), MPLBACKEND="agg")["MPLBACKEND"] == "agg"


@pytest.mark.parametrize(
    ("words", "found", "given", "wanted"),
    [
        (["cloud.backend=cpu", "cloud.devices=4"], Devices(gpus=1), {},
         {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}),
        (["cloud.backend=gpu", "cloud.devices=2"], Devices(gpus=2), {},
         {"JAX_PLATFORMS": "cuda,cpu", "CUDA_VISIBLE_DEVICES": None}),
        (["cloud.backend=gpu", "cloud.devices=[0,2]"], Devices(gpus=4), {},
         {"CUDA_VISIBLE_DEVICES": "0,2", "SLIPWAY_DEVICE_LOCKS": "/s/here/locks/gpu-0:/s/here/locks/gpu-2"}),
        (["cloud.backend=gpu", "cloud.devices=[1]"], Devices(gpus=2, visible=("4", "7")),
         {"CUDA_VISIBLE_DEVICES": "4,7"}, {"CUDA_VISIBLE_DEVICES": "7"}),
        (["cloud.backend=gpu"], Devices(told="rocm"), {"JAX_PLATFORMS": "rocm"}, {"JAX_PLATFORMS": "rocm"}),
        (["cloud.backend=tpu", "cloud.devices=[3]"], Devices(tpus=4), {},
         {"JAX_PLATFORMS": "tpu,cpu", "TPU_VISIBLE_CHIPS": "3", "TPU_PROCESS_BOUNDS": "1,1,1"}),
        (["cloud.backend=tpu", "cloud.devices=4"], Devices(tpus=4), {},
         {"TPU_VISIBLE_CHIPS": None, "SLIPWAY_SYSFS": None}),
    ],
)  # fmt: skip
def test_a_program_sees_its_devices(
    words: list[str], found: Devices, given: dict[str, str], wanted: dict[str, str | None]
) -> None:
    made = environment(words, found, **given)
    assert {name: made.get(name) for name in wanted} == wanted


def test_devices_are_probed_again_after_jax_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And Python is the one that runs Slipway."""
    made = open_fleet(cloud("cloud.backend=cpu"), tmp_path)
    write_python(tmp_path, sys.executable)
    for name in ("python", "python3"):
        said = subprocess.run([tmp_path / name, "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True)
        assert said.stdout.strip() == sys.prefix
    (known := tmp_path / "here/here-cpu-0/devices.json").write_text("{}")
    open_fleet(cloud("cloud.backend=cpu"), tmp_path)
    assert known.is_file()
    monkeypatch.setattr(here_module, "distributions", lambda: ())
    open_fleet(cloud("cloud.backend=cpu"), tmp_path)
    assert not known.is_file()
    with pytest.raises(ConfigError, match="cloud=here: you are on the machine"):
        made.ssh_connection(0)


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


def sized(backend: str, devices: int) -> HereCloud:
    made = here(f"cloud.backend={backend}", f"cloud.devices={devices}").cloud
    assert isinstance(made, HereCloud)
    return made


def test_runs_at_the_same_time_share_the_devices() -> None:
    assert [share_devices(sized("gpu", 5), n, 2).indices for n in (1, 2)] == [(0, 1), (2, 3)]
    assert [share_devices(sized("tpu", 4), n, 4).indices for n in (1, 4)] == [(0,), (3,)]
    assert share_devices(sized("tpu", 4), 1, 1).indices == (0, 1, 2, 3)
    assert [share_devices(sized("cpu", 2), n, 2).indices for n in (1, 2)] == [(0, 1), (2, 3)]
    with pytest.raises(ConfigError, match="3 runs at a time need a device each, but this machine offers 2"):
        share_devices(sized("gpu", 2), 1, 3)
    with pytest.raises(ConfigError, match="3 runs at a time"):
        share_devices(sized("gpu", 2), 3, 2)
    with pytest.raises(ConfigError, match="singly or all together; set it to 4 or 1"):
        share_devices(sized("tpu", 4), 1, 2)

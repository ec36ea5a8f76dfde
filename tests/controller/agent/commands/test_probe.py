import socket

import pytest

from tests.controller.agent.conftest import AgentWorker, ProgramRun

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


def test_a_jax_that_hangs_is_ended_and_devices_that_a_run_holds_are_left_alone(run: ProgramRun) -> None:
    worker, words = with_jax(run, "import time\ntime.sleep(600)").worker, "did not finish within 0.5 s"
    asked = {"venv": "image", "timeout_seconds": 0.5}
    assert words in worker.call_error("probe_devices", **asked)["error"]
    answer = worker.call("check_health", processes=1, **asked)
    assert answer["stage"] == "importing JAX"
    assert words in answer["problem"]
    run.start("import time; time.sleep(600)")
    for command, more in (("probe_devices", {}), ("check_health", {"processes": 1})):
        assert "run-1 is using the devices" in worker.call_error(command, venv="image", **more)["error"]


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_peers_find_worker_0(worker: AgentWorker, port: int) -> None:
    payload = {"addresses": ["127.0.0.1"] * 3, "port": port, "timeout_seconds": 60}
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

"""Starting, stopping, killing and wiping the emulated cloud."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.conftest import deep
from tests.controller.localcloud.harness import COMPUTE, NODES, EmulatedCloud, is_alive, run_localcloud, wait_for


@pytest.mark.parametrize("command", ["start", *deep("serve")])  # `start` starts `serve`
def test_a_port_in_use_names_its_key(tmp_path: Path, command: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = run_localcloud(command, tmp_path / "state", f"--port={port}")
    assert done.returncode == 2
    assert done.stderr.startswith(f"cloud.port: cannot listen on 127.0.0.1:{port}")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["start", *deep("serve")])  # `start` starts `serve`
def test_a_state_folder_that_cannot_be_made_names_its_key(tmp_path: Path, command: str) -> None:
    (tmp_path / "file").write_text("in the way")
    done = run_localcloud(command, tmp_path / "file" / "state")
    assert done.returncode == 2
    assert done.stderr.startswith("run.state_dir: cannot write to ")
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_state_folder_names_its_key(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir(mode=0o500)
    done = run_localcloud("start", state)
    assert done.returncode == 2
    assert done.stderr.startswith("run.state_dir: cannot write to ")


@pytest.mark.parametrize("command", ["env", "requests"])
def test_commands_that_need_a_server_say_so(tmp_path: Path, command: str) -> None:
    done = run_localcloud(command, tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "no emulated cloud is running" in done.stderr


def test_stop_and_wipe_of_nothing_are_fine(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("not ours")
    assert run_localcloud("stop", tmp_path).returncode == 0
    assert run_localcloud("wipe", tmp_path).returncode == 0
    assert (tmp_path / "precious").exists()


def test_endpoint_file(fresh_cloud: EmulatedCloud) -> None:
    endpoint = fresh_cloud.endpoint
    assert endpoint["project"] == "slipway-local"
    assert {"tpu", "compute", "storage", "serviceusage", "cloudresourcemanager", "iam"} <= set(endpoint["roots"])
    assert stat.S_IMODE((fresh_cloud.state / "endpoint.json").stat().st_mode) == 0o600
    assert is_alive(endpoint["pid"])


def test_starting_twice_at_once_makes_one_server(tmp_path: Path) -> None:
    cloud = EmulatedCloud(tmp_path / "state")
    with ThreadPoolExecutor(3) as pool:
        codes = list(pool.map(lambda _: run_localcloud("start", cloud.state).returncode, range(3)))
    assert codes == [0, 0, 0]
    pid = cloud.endpoint["pid"]
    cloud.start()
    assert cloud.endpoint["pid"] == pid
    assert run_localcloud("stop", cloud.state).returncode == 0
    assert not is_alive(pid)
    assert not (cloud.state / "endpoint.json").exists()


def test_it_starts_wherever_it_is_called_from(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "__init__.py").write_text("raise ImportError('a user has a folder of that name')")
    words = [sys.executable, "-P", "-m", "controller.localcloud", "start", "--state", "state"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert run_localcloud("wipe", tmp_path / "state").returncode == 0


def test_state_survives_kill_9(fresh_cloud: EmulatedCloud) -> None:
    before = fresh_cloud.endpoint
    fresh_cloud.create_network("net")
    node = fresh_cloud.create_node("pod", "net")
    fresh_cloud.call_ok("POST", "storage/v1/b?project=slipway-local", {"name": "bucket"})
    fresh_cloud.send("POST", "upload/storage/v1/b/bucket/o?uploadType=media&name=a", b"bytes")
    pid = fresh_cloud.start_background(node)

    fresh_cloud.kill()
    assert is_alive(pid), "programs run on"
    fresh_cloud.start()

    after = fresh_cloud.endpoint
    assert (after["url"], after["token"]) == (before["url"], before["token"])
    assert fresh_cloud.call_ok("GET", f"{NODES}/pod") == node
    assert fresh_cloud.send("GET", "storage/v1/b/bucket/o/a?alt=media")[1] == b"bytes"
    # The same address, the same host key (the harness checks it), the same boot.
    assert fresh_cloud.run_on_worker(node, f"kill -0 {pid} && echo there").stdout == "there\n"


def test_an_operation_under_way_ends_after_a_restart(tmp_path: Path) -> None:
    cloud = EmulatedCloud(tmp_path / "state")
    cloud.start("--operation-seconds=1")
    operation = cloud.call_ok("POST", f"{COMPUTE}/global/networks", {"name": "net", "autoCreateSubnetworks": False})
    assert operation["status"] == "RUNNING"
    cloud.kill()
    cloud.start()
    assert cloud.wait_operation(operation)["status"] == "DONE"
    assert cloud.call("POST", f"{COMPUTE}/global/networks", {"name": "net"})[0] == 409
    assert run_localcloud("wipe", cloud.state).returncode == 0


def test_wipe_kills_programs_and_deletes_the_folder(fresh_cloud: EmulatedCloud) -> None:
    fresh_cloud.create_network("net")
    pid = fresh_cloud.start_background(fresh_cloud.create_node("pod", "net"))
    server = fresh_cloud.endpoint["pid"]
    assert run_localcloud("wipe", fresh_cloud.state).returncode == 0
    assert not is_alive(pid)
    assert not is_alive(server)
    assert not fresh_cloud.state.exists()


def test_idle_exit_waits_for_the_last_node(tmp_path: Path) -> None:
    cloud = EmulatedCloud(tmp_path / "state")
    cloud.start("--operation-seconds=0.02", "--idle-exit=1")
    server = cloud.endpoint["pid"]
    cloud.create_network("net", ssh=False, internal=False)
    cloud.create_node("pod", "net")
    with pytest.raises(AssertionError):
        wait_for(lambda: not is_alive(server), "an exit that must not come", seconds=2.0)
    cloud.call_and_wait("DELETE", f"{NODES}/pod")
    wait_for(lambda: not is_alive(server), "the idle server has left")
    assert not (cloud.state / "endpoint.json").exists()


def test_env_is_what_a_shell_needs(fresh_cloud: EmulatedCloud) -> None:
    exports = run_localcloud("env", fresh_cloud.state).stdout
    script = f'{exports} printf %s "$CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU $(cat "$CLOUDSDK_AUTH_ACCESS_TOKEN_FILE")"'
    done = subprocess.run(["/bin/sh", "-c", script], capture_output=True, text=True)
    assert done.stdout == f"{fresh_cloud.endpoint['roots']['tpu']} {fresh_cloud.endpoint['token']}"


def test_requests_prints_the_log(fresh_cloud: EmulatedCloud) -> None:
    fresh_cloud.call_ok("GET", f"{COMPUTE}/global/networks")
    *_, line = run_localcloud("requests", fresh_cloud.state).stdout.splitlines()
    assert json.loads(line)["call"] == "networks.list"

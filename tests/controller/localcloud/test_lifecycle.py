"""Starting, stopping, killing and wiping the emulated cloud."""

import contextlib
import json
import os
import socket
import sqlite3
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from controller.localcloud import lifecycle
from controller.localcloud.__main__ import main as localcloud
from controller.localcloud.store import database_problem
from tests.controller.localcloud.apis.test_buckets import QUANTUM, Bucket
from tests.controller.localcloud.harness import COMPUTE, NODES, EmulatedCloud, is_alive, run_localcloud, wait_for


def test_what_cannot_be_started_names_its_key(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = run_localcloud("start", tmp_path / "state", f"--port={port}")
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "read-only").mkdir(mode=0o500)
    ended = [(done, f"cloud.port: cannot listen on 127.0.0.1:{port}")]
    for place in ("file", *(["read-only"] if os.geteuid() else [])):  # root may write anywhere
        ended.append((run_localcloud("start", tmp_path / place / "state"), "run.state_dir: cannot write to "))
    for done, said in ended:
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert done.stderr.startswith(said)


def test_where_nothing_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "precious").write_text("not ours")
    for command in ("env", "requests"):
        assert localcloud([command, f"--state={tmp_path}"]) == 2
        assert "no emulated cloud is running" in capsys.readouterr().err
    for command in ("stop", "wipe"):
        assert localcloud([command, f"--state={tmp_path}"]) == 0
    assert (tmp_path / "precious").exists()


def test_started_twice_at_once_from_anywhere_there_is_one_server(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "__init__.py").write_text("raise ImportError('a user has a folder of that name')")
    words = [sys.executable, "-P", "-m", "controller.localcloud", "start", "--state", "state"]

    def start(_: int) -> int:
        return subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300).returncode

    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(start, range(2))] == [0, 0]
    cloud = EmulatedCloud(tmp_path / "state")
    pid = cloud.endpoint["pid"]
    cloud.start()
    assert cloud.endpoint["pid"] == pid
    assert run_localcloud("stop", cloud.state).returncode == 0
    assert not is_alive(pid)
    assert not (cloud.state / "endpoint.json").exists()


def test_state_survives_kill_9_and_no_program_a_wipe(fresh_cloud: EmulatedCloud) -> None:
    before = fresh_cloud.endpoint
    assert stat.S_IMODE((fresh_cloud.state / "endpoint.json").stat().st_mode) == 0o600
    node = fresh_cloud.create_pod()
    fresh_cloud.call_ok("POST", "storage/v1/b?project=slipway-local", {"name": "bucket"})
    bucket, part = Bucket(fresh_cloud, "bucket"), b"x" * QUANTUM
    upload = bucket.begin("r")
    assert bucket.chunk(upload, part, f"bytes 0-{QUANTUM - 1}/{QUANTUM + 1}")[0] == 308
    pid = fresh_cloud.start_background(node)
    with fresh_cloud.settings(operation_seconds=1):
        network = {"name": "late", "autoCreateSubnetworks": False}
        operation = fresh_cloud.call_ok("POST", f"{COMPUTE}/global/networks", network)
        assert operation["status"] == "RUNNING"
        fresh_cloud.kill()
        assert is_alive(pid), "programs run on"
        fresh_cloud.start()

    after = fresh_cloud.endpoint
    assert (after["url"], after["token"]) == (before["url"], before["token"])
    assert fresh_cloud.wait_operation(operation)["status"] == "DONE"
    assert fresh_cloud.call("POST", f"{COMPUTE}/global/networks", network)[0] == 409
    assert fresh_cloud.call_ok("GET", f"{NODES}/pod") == node
    assert bucket.chunk(upload, b"y", f"bytes {QUANTUM}-{QUANTUM}/{QUANTUM + 1}")[0] == 200
    assert bucket.read("r") == (200, part + b"y")
    # The same address, the same host key (the harness checks it), the same boot.
    assert fresh_cloud.run_on_worker(node, f"kill -0 {pid} && echo there").stdout == "there\n"

    assert run_localcloud("wipe", fresh_cloud.state).returncode == 0
    assert not is_alive(pid)
    assert not is_alive(after["pid"])
    assert not fresh_cloud.state.exists()


def test_wipe_goes_on_where_files_vanish_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, rmtree = tmp_path / "state", lifecycle.shutil.rmtree
    (state / "nodes").mkdir(parents=True)
    (state / "state.db").touch()

    def vanishing(folder: Path) -> None:
        if (state / "nodes").exists():
            (state / "nodes").rmdir()
            raise FileNotFoundError(state / "nodes")
        rmtree(folder)

    monkeypatch.setattr(lifecycle.shutil, "rmtree", vanishing)
    lifecycle.wipe(state)
    assert not state.exists()


@pytest.mark.deep
def test_idle_exit_waits_for_the_last_node(tmp_path: Path) -> None:
    cloud = EmulatedCloud(tmp_path / "state")
    cloud.start("--operation-seconds=0.02", "--idle-exit=1")
    server = cloud.endpoint["pid"]
    cloud.create_network("net", ssh=False, internal=False)
    cloud.create_node("pod", "net")
    with pytest.raises(AssertionError):
        wait_for(lambda: not is_alive(server), "an exit that must not come", seconds=2.0)
    cloud.delete(f"{NODES}/pod")
    wait_for(lambda: not is_alive(server), "the idle server has left")
    assert not (cloud.state / "endpoint.json").exists()


def test_env_is_what_a_shell_needs_and_requests_prints_the_log(
    fresh_cloud: EmulatedCloud, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint, state = fresh_cloud.endpoint, f"--state={fresh_cloud.state}"
    assert {"tpu", "compute", "storage", "serviceusage", "cloudresourcemanager", "iam"} <= set(endpoint["roots"])
    assert localcloud(["env", state]) == 0
    script = 'printf %s "$CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU $(cat "$CLOUDSDK_AUTH_ACCESS_TOKEN_FILE")"'
    done = subprocess.run(["/bin/sh", "-c", capsys.readouterr().out + script], capture_output=True, text=True)
    assert done.stdout == f"{endpoint['roots']['tpu']} {endpoint['token']}"
    fresh_cloud.call_ok("GET", f"{COMPUTE}/global/networks")
    assert localcloud(["requests", state]) == 0
    *_, line = capsys.readouterr().out.splitlines()
    assert json.loads(line)["call"] == "networks.list"


@pytest.mark.parametrize("damage", ["garbage", "cut", "other"])
def test_a_damaged_state_is_one_line_that_says_what_mends_it(damage: str, tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    file = state / "state.db"
    if damage == "garbage":
        file.write_bytes(b"\xff\x00no database" * 1000)
    else:
        with contextlib.closing(sqlite3.connect(file)) as database:
            columns = "kind TEXT, name TEXT, body TEXT" if damage == "cut" else "another TEXT"
            database.execute(f"CREATE TABLE documents ({columns})")
            database.executemany(
                f"INSERT INTO documents VALUES ({', '.join('?' * (columns.count(',') + 1))})",
                [["setting"] * (columns.count(",") + 1)] * 5000,
            )
            database.commit()
    if damage == "cut":
        os.truncate(file, 8192)
    done = run_localcloud("start", state)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith(f"run.state_dir: {file} cannot be used: ")
    assert ("`slipway localcloud wipe`" in done.stderr) == (damage != "other")


@pytest.mark.parametrize("kind", [sqlite3.OperationalError, sqlite3.ProgrammingError, sqlite3.IntegrityError])
def test_nobody_is_told_to_delete_a_state_that_is_not_damaged(kind: type[sqlite3.DatabaseError]) -> None:
    assert database_problem(Path("state"), kind("no")) == "run.state_dir: state/state.db cannot be used: no"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"url": 5}', '{"url": "http://127.0.0.1:1/"}'])
def test_a_damaged_endpoint_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "endpoint.json").write_text(text)
    assert lifecycle.find_endpoint(tmp_path) is None

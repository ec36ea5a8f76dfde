"""`ssh`, `exec` and `forward` on a pod of the emulated cloud; and workers that are late, refuse or want OS Login."""

import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from conf.schema.cloud import LocalCloud
from controller import emulator
from controller.cli import main
from controller.connect import open_context
from controller.emulator import ensure_running, state_folder
from tests.controller.cli.verbs.test_up import until
from tests.controller.conftest import ECHO_COMMAND, ONE_WORKER, SlipwayCli
from tests.controller.localcloud.harness import EmulatedCloud
from tests.emulators import Emulators
from tests.fakes.loopback import free_port

pytestmark = pytest.mark.e2e
WORDS = [ECHO_COMMAND, "cloud=local", "program=command", "env.packages=image",
         "tpu.external_ip=true", "ssh.connect_timeout_seconds=240"]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, emulators: Emulators) -> Iterator[Path]:
    """A folder whose last `up` has left a pod of four workers."""
    place = tmp_path_factory.mktemp("reach")
    (place / "hello.txt").write_text("hello\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulator, "run_emulator_verb", emulators.run_emulator_verb)
        patch.chdir(place)
        patch.setenv("SLIPWAY_HOME", str(place.parent / "home"))
        assert main.run(["up", "cleanup.on_success=keep", *WORDS]) == 0
        yield place
        status, words = emulator.run_emulator_verb(["wipe"], state_folder(str(place.parent / "home")))
        assert status == 0, words


@pytest.fixture
def here(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> pytest.CaptureFixture[str]:
    monkeypatch.chdir(place)
    monkeypatch.setenv("SLIPWAY_HOME", str(place.parent / "home"))
    capsys.readouterr()
    return capsys


def started(*words: str, **options) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "controller", *words]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def tunnels(place: Path) -> int:
    config = main.parse(["plan", *WORDS]).options.config()[0]
    assert isinstance(config.cloud, LocalCloud)
    cloud = ensure_running(config.cloud, str(place.parent / "home"))
    return sum(request["api"] == "iap" for request in cloud.requests())


def test_where_a_rule_admits_this_machine_the_way_is_direct(here, place: Path) -> None:
    assert tunnels(place) == 0
    assert main.run(["exec", *WORDS, "ssh.method=iap", "--worker=0", "--", "echo there"]) == 0
    assert here.readouterr().out == "there\n"
    assert tunnels(place) == 1


def test_a_command_runs_on_all_workers_and_says_who_said_what(here) -> None:
    assert main.run(["exec", "--", "echo", "a b", "$HOME;", "'"]) == 0
    out = here.readouterr().out
    assert sorted(out.splitlines()) == [f"worker {worker}| a b $HOME; '" for worker in range(4)]


def test_one_worker_prints_as_it_is_and_in_json(here) -> None:
    words = ["--worker", "2", "--", "echo $SLIPWAY_WORKER; [ -r hello.txt ] && echo err >&2; exit 5"]
    assert main.run(["exec", *words]) == 5
    out, err = here.readouterr()
    assert out == "2\n"
    assert err.endswith("err\n")
    assert main.run(["exec", "--json", *words]) == 5
    lines = [json.loads(line) for line in here.readouterr().out.splitlines()]
    assert sorted(lines, key=str) == [
        {"worker": 2, "exit_code": 5},
        {"worker": 2, "stderr": "err"},
        {"worker": 2, "stdout": "2"},
    ]
    assert main.run(["exec", "--worker", "0", "--", "kill -KILL $$"]) == 128, "a signal has ended it"


def test_one_word_is_a_line_for_the_shell(here) -> None:
    line = "echo $TPU_WORKER_ID; printf unfinished >&2; exit $TPU_WORKER_ID"
    assert main.run(["exec", "--worker", "all", "--", line]) == 3
    out, err = here.readouterr()
    assert sorted(out.splitlines()) == [f"worker {worker}| {worker}" for worker in range(4)]
    assert err.count("| unfinished\n") == 4
    assert "exit codes: worker 1: 1, worker 2: 2, worker 3: 3" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["exec"], "exec: needs a command after --"),
        (["exec", "--worker", "4", "--", "true"], "--worker 4: the pod has workers 0 to 3"),
        (["ssh", "--worker", "x"], "--worker x: the pod has workers 0 to 3"),
        (["status", "--", "true"], "status: takes no command after --"),
        *((["forward", wrong], f"invalid port '{wrong}'") for wrong in ("http", "70000", "1:0")),
    ],
)
def test_what_makes_no_sense_is_said(here, words: list[str], said: str) -> None:
    assert main.run(words) == 2
    assert said in here.readouterr().err


def test_a_shell_fed_from_a_pipe(here) -> None:
    process = started("ssh", "--worker", "1", stdin=subprocess.PIPE)
    out, err = process.communicate("echo I am $TPU_WORKER_ID\necho err >&2\nexit 7\n", timeout=300)
    assert (process.returncode, out) == (7, "I am 1\n")
    assert "err\n" in err


def on_a_terminal(*words: str) -> tuple[int, subprocess.Popen[bytes]]:
    master, slave = pty.openpty()
    argv = [sys.executable, "-m", "controller", "ssh", *words]
    process = subprocess.Popen(argv, stdin=slave, stdout=slave, stderr=slave, start_new_session=True)
    os.close(slave)
    return master, process


def test_a_shell_on_a_terminal(here) -> None:
    master, process = on_a_terminal("--worker", "3")
    os.write(master, b"test -t 0 && echo on a $TERM of worker $TPU_WORKER_ID; exit 6\n")
    seen = _read(master, process)
    os.close(master)
    assert process.returncode == 6
    assert "of worker 3\r\n" in seen


def test_a_command_on_a_terminal_is_interrupted_there(here) -> None:
    # short sleeps: an interruption just before a long one would be heard only after it
    master, process = on_a_terminal(
        "--", "sh", "-c", "trap 'echo caught; exit 9' INT; echo on; while :; do sleep 0.1; done"
    )
    seen = _read(master, process, until="on\r\n")
    os.write(master, b"\x03")
    seen += _read(master, process)
    os.close(master)
    assert "caught" in seen
    assert process.returncode == 9


def _read(master: int, process: subprocess.Popen, until: str = "") -> str:
    """What comes out of a terminal until the process ends, or has said that."""
    seen, end = "", time.monotonic() + 240
    while time.monotonic() < end and not (until and until in seen):
        ready, _, _ = select.select([master], [], [], 0.1)
        try:
            data = os.read(master, 4096) if ready else b""
        except OSError:  # the other side is closed
            data = b""
        seen += data.decode()
        if not data and process.poll() is not None:
            break
    return seen


@pytest.fixture
def website(tmp_path: Path) -> Iterator[int]:
    """What a worker serves on its loopback, which here is ours."""
    (tmp_path / "index.html").write_text("from the worker")
    port = free_port()
    argv = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", "--directory", str(tmp_path), str(port)]
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    yield port
    process.kill()
    process.wait()


def test_a_port_of_a_worker_is_reached_on_this_machine(here, website: int) -> None:
    process = started("forward", f"0:{website}", "--json")
    assert process.stdout
    opened = json.loads(process.stdout.readline())
    assert (opened["worker"], opened["remote"]) == (0, website)
    url = f"http://127.0.0.1:{opened['port']}/"

    def fetch(_: int) -> bytes | str:
        try:
            with urllib.request.urlopen(url, timeout=300) as page:
                return page.read()
        except OSError as error:
            return str(error)

    until(lambda: fetch(0) == b"from the worker")  # the website is up
    with ThreadPoolExecutor(8) as pool:
        found = [*pool.map(fetch, range(8))]
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert found == [b"from the worker"] * 8, err
    assert process.returncode == 0, err
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", opened["port"]), timeout=5)


def test_a_port_where_nothing_listens_is_told_of(here) -> None:
    closed = free_port()
    process = started("forward", f"0:{closed}", "--json")
    assert process.stdout
    port = json.loads(process.stdout.readline())["port"]
    with socket.create_connection(("127.0.0.1", port), timeout=300) as connection:
        assert connection.recv(1) == b""
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert f"cannot connect to port {closed} of the worker" in err


def test_a_port_in_use_is_said(here) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main.run(["forward", f"{port}:8888"]) == 2
    assert "Address already in use; to use another port: `slipway forward OTHER:8888`" in here.readouterr().err


KEEP = [ECHO_COMMAND, ONE_WORKER, "cleanup.on_success=keep"]


def fault(slipway: SlipwayCli, **spec: object) -> None:
    slipway.cloud().post("faults", {"key": json.dumps(spec, sort_keys=True), "faults": [spec]})


LATE = [
    ("laptop", "POST .*/compute/v1/.*/global/networks$", 403),  # an API enabled a moment ago
    ("laptop", "GET .*/serviceAccounts/slipway-runner@.*", 404),  # an account created a moment ago
    ("laptop", "POST .*:getGuestAttributes", 404),  # a VM that has just booted
    (".*/0", "GET .*/storage/v1/.*/code%2F.*", 403),  # roles bound a moment ago, asked for by a worker
    ("laptop", "POST .*/upload/storage/.*", 429),  # a second write of one object within a second
]
"""Requests that are refused on the way, as (client, method and path, status)."""


@pytest.mark.deep
def test_up_in_a_fresh_project_waits_for_everything_that_is_late(slipway: SlipwayCli) -> None:
    fault(slipway, kind="ssh_refused", seconds=2)
    code, out, err = slipway("up", ECHO_COMMAND, "cleanup.on_success=keep")
    assert (code, err) == (0, "")
    assert "hello from worker 0" in out
    requests = [
        (r["client"], f"{r['method']} {r['path'].partition('?')[0]}", r["status"]) for r in slipway.cloud().requests()
    ]
    late_ones = {
        (client, path, status)
        for client, path, status in LATE
        for r in requests
        if re.fullmatch(client, r[0]) and re.fullmatch(path, r[1]) and r[2] == status
    }
    # All of them on an idle machine; on a busy one, some are no longer late when they are asked for.
    assert late_ones


NO_ATTRIBUTES = {"kind": "http", "match": "POST .*:getGuestAttributes", "times": 1000}


@pytest.mark.deep
def test_a_pod_whose_guest_attributes_are_refused_can_be_deleted_and_reached_without_them(
    slipway: SlipwayCli,
) -> None:
    fault(slipway, **NO_ATTRIBUTES, status=403, message="constraints/compute.disableGuestAttributesAccess")
    code, out, err = slipway("up", *KEEP)
    assert code != 0
    assert "Traceback" not in err
    assert "ssh.host_keys=trust_on_first_use" in err
    assert "is kept; `slipway down` deletes it" in out  # the emulated cloud has no price
    assert slipway("status", *KEEP)[0] == 0
    assert slipway("down", *KEEP, "--yes")[0] == 0
    assert not slipway.cloud().get("state").get("node")
    code, out, err = slipway("up", *KEEP, "ssh.host_keys=trust_on_first_use", "ssh.method=external")
    assert code == 0, err
    assert "hello from worker 0" in out


@pytest.mark.deep
def test_os_login_where_the_project_wants_it(slipway: SlipwayCli) -> None:
    cloud = slipway.cloud()
    EmulatedCloud(cloud.state).establish()
    with open_context(main.parse(slipway.line("plan", *KEEP)).options.config()[0], keep_awake=True) as (context, _):
        told = context.google.call("compute", "projects.get", project="slipway-local")["commonInstanceMetadata"]
        body = {"items": [{"key": "enable-oslogin", "value": "TRUE"}], "fingerprint": told["fingerprint"]}
        context.google.call("compute", "projects.setCommonInstanceMetadata", project="slipway-local", body=body)
    code, out, err = slipway("up", *KEEP)
    assert (code, err) == (0, "")
    assert "hello from worker 0" in out
    assert main.run(["exec", "--worker", "0", "--", "echo $USER"]) == 0
    assert slipway.capsys.readouterr().out == "you_example_com\n"
    [profile] = cloud.get("state")["loginProfile"].values()
    assert len(profile["sshPublicKeys"]) == 1
    before = slipway.mutations()
    assert slipway("up", *KEEP)[0] == 0
    assert slipway.mutations() == before
    assert main.run(["exec", *KEEP, *slipway.base_overrides, "ssh.os_login=false", "--worker", "0", "--", "true"]) != 0
    assert "does not accept user slipway" in slipway.capsys.readouterr().err

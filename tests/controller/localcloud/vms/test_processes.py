"""What finds the processes of a worker."""

import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from controller.localcloud.vms import processes
from controller.localcloud.vms.processes import (
    MARKER,
    Client,
    kill_client,
    kill_marked,
    runs_slipway,
    signal_programs,
    wait_ended,
)

ASLEEP = [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"]


def test_one_thread_looks_for_processes_while_another_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """An emulated pod is deleted while another's programs are told of it."""
    child = subprocess.Popen(ASLEEP, stdout=subprocess.PIPE)
    plain = psutil.Process.as_dict

    def interrupted(process: psutil.Process, *arguments: Any, **named: Any) -> dict[str, Any]:
        if process.pid == child.pid:
            monkeypatch.undo()
            assert signal_programs("nobody", signal.SIGTERM) == 0
        return plain(process, *arguments, **named)

    try:
        assert signal_programs("nobody", signal.SIGTERM) == 0
        monkeypatch.setattr(psutil.Process, "as_dict", interrupted)
        assert kill_marked("nobody") == 0
        assert psutil.Process.as_dict is plain
    finally:
        child.kill()
        child.communicate()


def test_only_the_marked_are_killed() -> None:
    marked, other = (
        subprocess.Popen(ASLEEP, env=os.environ | {MARKER: worker}, stdout=subprocess.PIPE)
        for worker in ("here:1", "there:1")
    )
    try:
        for process in (marked, other):
            assert process.stdout is not None
            process.stdout.readline()  # it has its environment by now
        assert kill_marked("here:") == 1
        assert marked.wait() == -signal.SIGKILL
        assert other.poll() is None
    finally:
        for process in (marked, other):
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


CONNECT = """
import socket, sys, time
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
print(connection.getsockname()[1], flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("name", "age", "to_server", "killed"),
    [
        ("slipway", 0.0, True, True),
        ("innocent", 0.0, True, False),  # another program that talks to the emulator
        ("slipway", -3600.0, True, False),  # it got the port after the request
        ("slipway", 0.0, False, False),  # it uses the port for something else
    ],
)
def test_only_the_controller_that_sent_the_request_is_killed(
    tmp_path: Path, name: str, age: float, to_server: bool, killed: bool
) -> None:
    (tmp_path / name).write_text(CONNECT)
    with socket.create_server(("127.0.0.1", 0)) as server:
        listens = server.getsockname()[1]
        client = subprocess.Popen(
            [sys.executable, str(tmp_path / name), str(listens)], stdout=subprocess.PIPE, text=True
        )
        try:
            assert client.stdout is not None
            port = int(client.stdout.readline())
            sent = Client(port, listens if to_server else listens + 1, time.time() + 1 + age)
            assert kill_client([sent]) == (client.pid if killed else None)
            assert (client.poll() if not killed else client.wait()) == (-signal.SIGKILL if killed else None)
        finally:
            client.kill()
            client.communicate()


def test_processes_may_take_as_long_as_they_do_however_late_it_gets_in_the_cloud(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the tests' virtual time ten seconds may pass between two looks."""
    late, looks = itertools.count(0.0, 100.0), itertools.count()
    child = subprocess.Popen(ASLEEP)
    dying = psutil.Process(child.pid)
    monkeypatch.setattr(time, "monotonic", lambda: next(late))
    monkeypatch.setattr(processes, "_find_processes", lambda prefix: [dying] if next(looks) < 5 else [])
    assert kill_marked("nobody") == 1
    assert wait_ended(dying, 60.0)
    assert child.wait() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("argv", "ours"),
    [
        (["/venv/bin/python", "-m", "controller", "up"], True),
        (["/venv/bin/python3", "-Im", "slipway"], False),
        (["/venv/bin/python3", "/venv/bin/slipway", "up"], True),
        (["/usr/local/bin/slipway"], True),
        (["python", "-m", "pytest", "controller"], False),
        (["vim", "-R", "x", "controller"], False),
        ([], False),
    ],
)
def test_the_command_line_tells_a_controller_from_other_programs(argv: list[str], ours: bool) -> None:
    assert runs_slipway(argv) == ours

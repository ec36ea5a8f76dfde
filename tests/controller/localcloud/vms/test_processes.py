"""What finds the processes of a worker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import psutil
import pytest

from controller.localcloud.vms.processes import MARKER, kill_marked, signal_programs

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

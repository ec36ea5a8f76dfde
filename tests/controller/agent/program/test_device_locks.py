"""Two agents of one machine never start programs on the same device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from controller.agent.fs import AgentError
from controller.agent.program.device_locks import VARIABLE, lock_devices, release_devices


def test_without_the_variable_nothing_is_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert lock_devices("run-1") == []


def test_a_device_belongs_to_one_run_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = [str(tmp_path / "locks" / name) for name in ("gpu-0", "gpu-1")]
    monkeypatch.setenv(VARIABLE, both[1])
    held = lock_devices("run-1")
    monkeypatch.setenv(VARIABLE, os.pathsep.join(both))
    with pytest.raises(AgentError, match=r"gpu-1 is in use by run-1: .*slipway cancel --run run-1.*cloud.devices"):
        lock_devices("run-2")
    monkeypatch.setenv(VARIABLE, both[0])
    release_devices(lock_devices("run-2"))
    release_devices(held)
    monkeypatch.setenv(VARIABLE, os.pathsep.join(both))
    release_devices(lock_devices("run-2"))


def test_the_lock_lives_as_long_as_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "gpu-0"))
    held = lock_devices("run-1")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False) as program:
        release_devices(held)
        with pytest.raises(AgentError, match="in use by run-1"):
            lock_devices("run-2")
        program.communicate(b"\n")
    release_devices(lock_devices("run-2"))

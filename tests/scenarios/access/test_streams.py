"""A program that is watched over SSH: to its end, across a broken connection, and left early."""

from __future__ import annotations

import threading

import pytest

from controller.ssh.fleet import Fleet, WorkerError
from tests.controller.ssh.sshserver import SshPod

TALK = "import os, time\nprint('one', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.02)\nprint('two')"


@pytest.fixture
def program(make_pod) -> tuple[SshPod, Fleet]:
    """A program that says one, and when it is told to go, two."""
    pod, fleet = make_pod()
    code = "1" * 64
    (pod.workers[0].home / ".slipway/code" / code).mkdir(parents=True)
    fleet.call(0, "install_venv", {"packages": "image", "fingerprint": "image"})
    order = {"run_id": "r", "attempt": 1, "argv": ["python", "-c", TALK], "code": code, "venv": "image"}
    assert fleet.call(0, "start", order)["state"] in ("running", "exited")
    return pod, fleet


def go(pod: SshPod) -> None:
    (pod.workers[0].home / ".slipway/runs/r/work/go").write_text("")


def test_a_program_goes_on_without_us_and_is_taken_up_again(program: tuple[SshPod, Fleet]) -> None:
    pod, fleet = program
    lines = fleet.stream(0, "watch", {"run_id": "r"})
    seen = next(lines)
    assert seen == {"log": "one\n", "offset": 4}
    assert fleet.call(0, "state", {"run_id": "r"})["state"] == "running", "other channels work beside it"
    pod.run_coroutine(pod.workers[0].drop_connections())
    with pytest.raises(WorkerError) as caught:
        list(lines)
    assert caught.value.kind == "dropped"
    go(pod)
    pod.run_coroutine(pod.workers[0].listen())
    rest = list(fleet.stream(0, "watch", {"run_id": "r", "log_offset": seen["offset"]}))
    assert (rest[0]["log"], rest[-1]["end"]["code"]) == ("two\n", 0)


def test_a_stream_that_is_left_early_leaves_the_connection_usable(program: tuple[SshPod, Fleet]) -> None:
    _, fleet = program
    lines = fleet.stream(0, "watch", {"run_id": "r"})
    next(lines)
    lines.close()
    assert fleet.call(0, "stop", {"run_id": "r", "grace_seconds": 60})["signal"] == "SIGTERM"


def test_closing_ends_a_stream(program: tuple[SshPod, Fleet]) -> None:
    _, fleet = program
    lines = fleet.stream(0, "watch", {"run_id": "r"})
    next(lines)
    threading.Timer(0.1, fleet.close).start()
    with pytest.raises(WorkerError):
        list(lines)

"""`up` on chips that are missing, held by somebody or healthy: what is said, and that nothing starts on bad ones."""

from __future__ import annotations

import json
import re

import psutil
import pytest

from controller.resources.workers import chips
from tests.controller.conftest import ECHO_COMMAND, SlipwayCli

pytestmark = pytest.mark.e2e
TWO_WORKERS = ("tpu.accelerator_type=v4-16", "tpu.zone=us-central2-b")
KEEP = "cleanup.on_success=keep"


@pytest.mark.deep
def test_a_held_chip_stops_up_and_free_ones_pass_the_health_check(
    slipway: SlipwayCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chips, "PAUSE_SECONDS", 0.01)
    held = "cloud.faults=[{kind: chip_held, worker: 1, seconds: 600}]"
    run = (ECHO_COMMAND, KEEP, *TWO_WORKERS, "cloud.health_check=true")
    code, out, err = slipway("up", *run, held)
    assert code == 3
    [(worker, pid)] = re.findall(r"worker (\d): /dev/accel0 is held by process (\d+) of \w+ \(sleep 600\.0\)", err)
    assert worker == "1"
    assert "launched" not in out
    code, out, _ = slipway("verify", "--json", *run)
    assert code == 3
    first, second = json.loads(out)["workers"]
    assert (first["chips"], f"process {pid}" in second["chips"]) == ("ok", True)
    psutil.Process(int(pid)).kill()
    code, out, err = slipway("up", *run)
    assert code == 0, err
    assert "health check passed" in out
    assert "all-reduce over 8 devices (cpu)" in out
    assert out.index("health check passed") < out.index("launched")


@pytest.mark.deep
def test_a_pod_with_a_missing_chip_is_replaced(slipway: SlipwayCli) -> None:
    code, out, err = slipway("up", ECHO_COMMAND, *TWO_WORKERS, "cloud.faults=[{kind: chip_missing, worker: 1}]")
    assert code == 0, err
    assert "unhealthy host: worker 1 has 3 of 4 chips (/dev/accel0, /dev/accel1, /dev/accel2; 3 on its PCI bus)" in out
    assert "replacing the pod" in out
    missing = "cloud.faults=[{kind: chip_missing, times: 1}]"
    assert slipway("up", ECHO_COMMAND, missing, "program.needs_chips=false", "run.name=other")[0] == 0

"""kill -9 of the controller between any two requests of an `up`: the next `up` converges.

By default some points, spread over the whole; with SLIPWAY_KILL_POINTS=all every one, with a number so many.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from controller import emulator
from tests.controller.conftest import Slipway

pytestmark = pytest.mark.e2e
WORDS = ["tpu=v5litepod_8", 'program.command=[sh,-c,"echo once >> $SLIPWAY_RUN_DIR/starts; echo hello"]']
DIES = """
import os, signal, sys
from controller import cli, google
made, last, once = 0, int(sys.argv[1]), google.Google._once
def counted(self, *request):
    global made
    made += 1
    if made > last:
        os.kill(os.getpid(), signal.SIGKILL)
    return once(self, *request)
google.Google._once = counted
code = cli.run(sys.argv[2:])
print("requests:", made)
sys.exit(code)
"""
"""`slipway`, dead after so many requests of its own; those of other threads may be under way."""
DEFAULT_POINTS = 3


def killed_after(slipway: Slipway, requests: int) -> int | None:
    """How many requests it made in all; None where it was killed."""
    command = [sys.executable, "-c", DIES, str(requests), "up", *WORDS, *slipway.base]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return None if done.returncode else int(done.stdout.split()[-1])


def left_behind(slipway: Slipway) -> dict[str, Any]:
    """What an `up` leaves, without the names that differ from run to run."""
    state = slipway.cloud().get("state")
    kinds = ("node", "queued", "worker", "serviceAccount", "bucket")
    objects = {
        re.sub(r"/[0-9a-f]{12}(-\d+)?\.json", "/ID.json", name) for names in state["objects"].values() for name in names
    }
    runs = {name for name in objects if not name.startswith("pods/")}
    return {
        **{kind: sorted(state[kind]) for kind in kinds},
        "compute": sorted(state["compute"]),
        "objects": sorted(runs),
    }


def points(total: int) -> list[int]:
    wanted = os.environ.get("SLIPWAY_KILL_POINTS", str(DEFAULT_POINTS))
    if wanted == "all":
        return list(range(total))
    return [round(total * (i + 0.5) / int(wanted)) for i in range(int(wanted))]


def test_killed_between_any_two_requests_up_again_converges(slipway: Slipway) -> None:
    total = killed_after(slipway, 10_000)
    assert total is not None
    undisturbed = left_behind(slipway)
    for point in points(total):
        wipe(slipway)
        if killed_after(slipway, point) is not None:
            assert point > 0.9 * total  # how often something is polled differs a little
            continue
        code, out, err = slipway("up", *WORDS)
        assert (code, err) == (0, ""), (point, out)
        assert slipway.json("status", *WORDS)["run"]["attempts"] == 1, point
        found = left_behind(slipway)
        assert {kind: found[kind] for kind in found if found[kind] != undisturbed[kind]} == {}, point


def wipe(slipway: Slipway) -> None:
    status, words = emulator.command(["wipe"], emulator.state_folder(str(slipway.home)))
    assert status == 0, words

"""What the agent has started, found by what it has put on record."""

import json
import os
import signal
from pathlib import Path

from controller.agent.process import is_alive


def end_programs(home: Path) -> None:
    """Kill the supervisors and programs of a worker whose home is this folder."""
    for path in home.glob(".slipway/runs/*/attempt-*/pid.json"):
        record = json.loads(path.read_bytes())
        for who in ("supervisor", "program"):
            if is_alive(record[who]):
                os.kill(record[who]["pid"], signal.SIGKILL)

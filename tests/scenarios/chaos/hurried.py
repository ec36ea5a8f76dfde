"""`slipway`, hurried: pauses are short, patience is little, heartbeats come often, and the clock may jump.

Run as `python -m tests.scenarios.chaos.hurried JUMP VERB …` where the controller is to be killed.
"""

import itertools
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from controller.cli import main
from controller.core.this_process import Clock
from controller.ssh import agent_link

SPEEDUP = 20.0
"""What the controller sleeps is so many times shorter."""
JUMPS = (-3600.0, 3600.0, 86400.0)


class FastClock(Clock):
    """Sleeps little."""

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds / SPEEDUP)


def time_that_jumps(jump: int) -> Callable[[], float]:
    """Return a time of day that is set once, before or at a moment drawn from `jump`, if that is not 0."""
    draw, read = random.Random(jump), time.time
    left, seconds = (draw.choice([0, draw.randrange(200)]), draw.choice(JUMPS)) if jump else (0, 0.0)
    asked = itertools.count()
    return lambda: read() + (seconds if next(asked) >= left else 0.0)


@contextmanager
def use_fast_clock(jump: int) -> Iterator[None]:
    """While this lasts, this process is in a hurry."""
    read = Path.read_bytes

    def with_more_heartbeats(path: Path) -> bytes:
        content = read(path)
        if path.name != "stream.py":
            return content
        assert b"HEARTBEAT_SECONDS = 5.0" in content
        return content.replace(b"HEARTBEAT_SECONDS = 5.0", b"HEARTBEAT_SECONDS = 0.5")

    with (
        mock.patch("controller.connect.Clock", FastClock),
        mock.patch("time.time", time_that_jumps(jump)),
        mock.patch("controller.connect.LOCAL_POLL_SECONDS", 0.5),
        mock.patch("controller.resources.pod.search.ALONE_POLLS", 1),
        mock.patch("controller.resources.pod.search.FIRST_PROGRESS_SECONDS", 1.0),
        mock.patch("controller.run.follow.STRAGGLER_SECONDS", 0.3),
        mock.patch("controller.recovery.diagnosis.STOPPED_SECONDS", 1.0),
        mock.patch.object(agent_link.Path, "read_bytes", with_more_heartbeats),
    ):
        yield


if __name__ == "__main__":
    with use_fast_clock(int(sys.argv[1])):
        sys.exit(main.run(sys.argv[2:]))

"""How far a transfer is: now and then, in words and in figures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from controller.core.events import Event, Events
from controller.progress import Progress, format_size
from tests.fakes.clock import ManualClock


def test_it_tells_bytes_and_rate_once_a_second() -> None:
    clock, told = ManualClock(), list[Event]()
    events = Events(clock)
    events.add_listener(told.append)
    progress = Progress(cast(Any, SimpleNamespace(clock=clock, events=events)), "model/gemma", 4_000_000_000)
    for _ in range(10):
        clock.elapsed += 0.25
        progress.advance(100_000_000)
    assert [event.message for event in told] == ["400 MB of 4 GB, 400 MB/s", "800 MB of 4 GB, 400 MB/s"]
    assert told[0].data == {"bytes": 400_000_000, "total": 4_000_000_000, "bytes_per_second": 400_000_000}
    assert (told[0].kind, told[0].subject) == ("progress", "model/gemma")


def test_sizes() -> None:
    assert [format_size(n) for n in (0, 999, 1e3, 1.5e6, 2.34e9)] == ["0 B", "999 B", "1 kB", "1.5 MB", "2.34 GB"]

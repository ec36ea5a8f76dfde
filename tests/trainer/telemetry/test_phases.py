"""Where the time of a run goes; tests/trainer/test_main.py reads the lines of two workers."""

import time

import jax
import pytest

from trainer.telemetry import phases
from trainer.telemetry.phases import PhaseTimes


@pytest.fixture
def clock(monkeypatch):
    """Seconds of the wall and of the CPU, which the test sets."""
    now = {"wall": 0.0, "cpu": 3.0}
    monkeypatch.setattr(phases.time, "perf_counter", lambda: now["wall"])
    monkeypatch.setattr(phases.time, "process_time", lambda: now["cpu"])
    assert phases.time is time
    return now


def test_time_counts_for_the_innermost_phase(clock, monkeypatch):
    monkeypatch.setattr(phases, "gather_texts", lambda text: [text, text])  # another worker with the same times
    times = PhaseTimes()
    times.listen()
    times.enter("updates")
    clock |= {"wall": 10.0, "cpu": 5.0}
    with times.measure("evaluations"):
        jax.monitoring.record_event_duration_secs("/jax/core/compile/jaxpr_trace_duration", 1.5)
        clock |= {"wall": 14.0, "cpu": 5.5}
    clock |= {"wall": 15.0, "cpu": 6.0}
    assert times.close() == [
        "seconds of worker 0 (CPU seconds of all workers): start 0.0 (6.0), updates 11.0 (5.0), evaluations 4.0 (1.0)",
        "seconds of compilation, by worker: trace 1.5 1.5, lower 0.0 0.0, compile or load 0.0 0.0",
    ]


def test_an_error_ends_the_phase_it_leaves(clock):
    times = PhaseTimes()

    def fail() -> None:
        with times.measure("evaluations"):
            clock["wall"] = 1.0
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    clock["wall"] = 3.0
    times.listen()
    assert "start 2.0 (3.0), evaluations 1.0 (0.0)" in times.close()[0]

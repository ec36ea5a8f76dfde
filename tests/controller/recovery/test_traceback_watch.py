"""Exceptions on any worker are found while the program runs, and workers that say nothing after one are named."""

from __future__ import annotations

from controller.recovery.traceback_watch import KEPT_CHARACTERS, MAX_SHOWN, SILENT_SECONDS, TracebackWatch

BROKEN = 'Traceback (most recent call last):\n  File "/w/train.py", line 21, in <module>\n    x\nValueError: {}\n'
PEER = BROKEN.format("UNKNOWN: Gloo AllGather failed: Connection closed by peer")


def test_a_traceback_in_pieces_is_shown_once_when_it_is_complete() -> None:
    watch, text = TracebackWatch(), "step 1\n" + BROKEN.format("x")
    shown = [watch.record(2, text[i : i + 7], float(i)) for i in range(0, len(text), 7)]
    [found] = [one for one in shown if one]
    assert (found.message, shown[-1]) == ("ValueError: x (train.py:21)", found)
    assert watch.record(2, "step 2\n", 100.0) is None


def test_the_same_exception_of_all_workers_is_shown_once_and_few_in_all() -> None:
    watch = TracebackWatch()
    assert [bool(watch.record(worker, BROKEN.format("x"), 0.0)) for worker in range(3)] == [True, False, False]
    assert sum(bool(watch.record(0, BROKEN.format(n), 0.0)) for n in range(9)) == MAX_SHOWN - 1


def test_a_lost_peer_is_neither_shown_nor_named() -> None:
    watch = TracebackWatch()
    assert watch.record(0, PEER, 0.0) is None
    assert watch.newly_silent(SILENT_SECONDS) == []


def test_silence_after_a_traceback_is_named_once() -> None:
    watch = TracebackWatch()
    watch.record(1, BROKEN.format("x"), 5.0)
    watch.record(0, "step 1\n", 5.0)
    assert watch.newly_silent(5.0 + SILENT_SECONDS - 1) == []
    assert [worker for worker, _ in watch.newly_silent(5.0 + SILENT_SECONDS)] == [1]
    assert watch.newly_silent(99.0) == []
    watch.record(1, BROKEN.format("y"), 100.0)
    assert [found.message for _, found in watch.newly_silent(200.0)] == ["ValueError: y (train.py:21)"]


def test_a_program_that_went_on_is_not_named() -> None:
    watch = TracebackWatch()
    watch.record(1, BROKEN.format("x"), 0.0)
    watch.record(1, "step 2\n", 1.0)
    assert watch.newly_silent(99.0) == []


def test_long_logs_are_not_kept() -> None:
    watch = TracebackWatch()
    assert watch.record(1, BROKEN.format("x"), 0.0) is not None
    for _ in range(5):
        assert watch.record(1, "step\n" * KEPT_CHARACTERS, 1.0) is None
    assert watch.record(1, BROKEN.format("y"), 2.0) is not None

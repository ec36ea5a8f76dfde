"""A limit interrupts once, and only while its block is open; a clean-up outlives one Ctrl-C."""

import os
import signal
import sys
import threading

import pytest

from controller.witness.drill import TimeLimit, ended_in_order, shielded


def test_the_time_limit_and_stop_interrupt_once_and_not_after_the_block() -> None:
    calls: list[str] = []
    with TimeLimit(3600, lambda: calls.append("x")) as limit:
        limit.stop("first")
        limit.stop("second")
    assert (limit.reason, calls) == ("first", ["x"])
    with TimeLimit(3600, lambda: calls.append("y")) as late:
        pass
    late.stop("too late")
    assert (late.reason, calls) == ("", ["x"])
    interrupted = threading.Event()
    with TimeLimit(0.001, interrupted.set) as limit:
        assert interrupted.wait(240)
    assert limit.reason == "the limit of 1.66667e-05 minutes is reached"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_closed_terminal_is_like_ctrl_c(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(sys, stream, getattr(sys, stream))  # puts it back

    def work() -> None:
        with ended_in_order():
            os.kill(os.getpid(), number)
            threading.Event().wait(240)

    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt):
        work()
    assert signal.getsignal(number) is before
    if number == signal.SIGHUP:
        assert sys.stdout.name == os.devnull
        sys.stdout.close()


def test_the_clean_up_answers_one_ctrl_c_and_obeys_the_second() -> None:
    said: list[str] = []

    def clean_up() -> None:
        with shielded(said.append):
            signal.raise_signal(signal.SIGINT)
            assert len(said) == 1
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        clean_up()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

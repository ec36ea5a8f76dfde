"""What a program said last, in recorded logs of four real JAX processes of which one fails.

They are in `tests/fixtures/jax_exits/`, recorded with jax 0.10, without the exit hook of `controller/agent/exit_hook/`:
after an exception the processes waited five minutes for each other. `==== worker N: exit CODE after SECONDS` precedes
each log.
"""

import re

import pytest

from controller.recovery.diagnosis import diagnose
from controller.recovery.policy import Observation, VerdictKind, WorkerStatus
from controller.recovery.tracebacks import (
    Traceback,
    cause_of_exit,
    first_at_barrier,
    last_traceback,
    last_words,
    log_excerpt,
)
from controller.recovery.watches import KEPT_CHARACTERS, MAX_SHOWN, SILENT_SECONDS, TracebackWatch
from controller.resources.pod.provisioner import PodStatus
from tests.paths import ROOT

SIGNALS = {134: "SIGABRT", 137: "SIGKILL", 139: "SIGSEGV"}
RECORDED = ROOT / "tests" / "fixtures" / "jax_exits"
CAUGHT = 'Traceback (most recent call last):\n  File "/w/data.py", line 7, in read\n    x\nOSError: try again\n'
ABORT = "F1122 20:09:37.212622    4908 client.h:80] Terminating process\nFatal Python error: Aborted\n"
CAUSED_BY = "\nThe above exception was the direct cause of the following exception:\n\n"
IN_THREAD = "Exception in thread loader (load):\n"
BROKEN = 'Traceback (most recent call last):\n  File "/w/train.py", line 21, in <module>\n    x\nValueError: {}\n'
BLAMED = "RuntimeError: broken on purpose (train.py:21)"


def found(log: str) -> Traceback:
    last = last_traceback(log)
    assert last is not None
    return last


def recorded(name: str) -> tuple[WorkerStatus, ...]:
    parts = re.split(r"^==== worker \d: exit (\d+) after (\d+) s\n", (RECORDED / f"{name}.txt").read_text(), flags=re.M)
    return tuple(
        WorkerStatus(ended=True, code=None, signal=SIGNALS[int(code)], ended_at=float(seconds), log_tail=log)
        for code, seconds, log in zip(parts[1::3], parts[2::3], parts[3::3], strict=True)
    )


@pytest.mark.parametrize(
    ("name", "kind", "worker", "evidence"),
    [
        ("raise_on_0", VerdictKind.PROGRAM_ERROR, 0, ("worker 0: its program raised an exception", BLAMED)),
        ("raise_on_2", VerdictKind.PROGRAM_ERROR, 2, ("worker 2: its program raised an exception", BLAMED)),
        ("exit_on_2", VerdictKind.PROGRAM_ERROR, 2, ("worker 2: its program ended while the others were running",
                                                     "JAX's shutdown waited for them until it timed out")),
        ("segfault_on_2", VerdictKind.PROGRAM_ERROR, 2, ("worker 2: its program was terminated by SIGSEGV",
                                                         "in broken (train.py:25)")),
        ("killed_1", VerdictKind.WORKER_LOST, 1, ("worker 1: its program was terminated by SIGKILL from outside",)),
    ],
)  # fmt: skip
def test_who_failed_is_named_in_its_words(name: str, kind: VerdictKind, worker: int, evidence: tuple[str, ...]) -> None:
    verdict = diagnose(Observation(PodStatus(), recorded(name)))
    assert (verdict.kind, verdict.worker, verdict.evidence) == (kind, worker, evidence)
    for end in recorded(name):
        for text in (log_excerpt(end.log_tail, end.code), last_words(end.log_tail, end.code)):
            assert not re.search(r"Extension modules|Fatal Python error|\*\*\* Check failure|\.cc:\d+\] \[?\d", text)


def test_the_traceback_alone_is_shown_or_the_stack_of_the_thread_that_crashed() -> None:
    [first, *_, last] = log_excerpt(recorded("raise_on_2")[2].log_tail).splitlines()
    assert (first, last) == ("Traceback (most recent call last):", "RuntimeError: broken on purpose")
    assert log_excerpt(recorded("segfault_on_2")[2].log_tail).splitlines()[-2:] == [
        '  File "/home/me/.slipway/runs/r/work/train.py", line 25 in broken',
        '  File "/home/me/.slipway/runs/r/work/train.py", line 31 in <module>',
    ]


def test_neither_a_lost_peer_nor_what_the_program_survived_is_a_cause() -> None:
    assert cause_of_exit(f"{CAUGHT}step 6\n{ABORT}") is None
    assert cause_of_exit(f"{CAUGHT}{ABORT}")
    assert cause_of_exit("step 6\n" + CAUGHT)
    end = recorded("killed_1")[0]
    assert found(end.log_tail).is_peer_loss
    assert cause_of_exit(end.log_tail) is None


def test_a_worker_that_was_stopped_may_hold_the_cause_and_who_is_connected_has_lost_no_peer() -> None:
    workers = list(recorded("killed_1"))
    log = f"step 5\n{CAUGHT}"
    workers[1] = WorkerStatus(ended=True, stop_requested=True, signal="SIGTERM", ended_at=120, log_tail=log)
    verdict = diagnose(Observation(PodStatus(), tuple(workers)))
    assert (verdict.kind, verdict.worker) == (VerdictKind.PROGRAM_ERROR, 1)
    assert verdict.evidence[1] == "OSError: try again (data.py:7)"
    log = "[Gloo] Rank 2 is connected to 3 peer ranks. Expected number of connected peer ranks is : 3\nno data\n"
    failed = WorkerStatus(ended=True, code=2, ended_at=1.0, log_tail=log)
    verdict = diagnose(Observation(PodStatus(), (failed, WorkerStatus())))
    assert (verdict.kind, verdict.worker) == (VerdictKind.PROGRAM_ERROR, 0)


def test_chained_exceptions_are_shown_together_and_the_last_one_is_named() -> None:
    log = f"step 1\n{CAUGHT}{CAUSED_BY}" + CAUGHT.replace("OSError: try again", "ValueError: no data")
    assert (found(log).text.count("Traceback"), found(log).message) == (2, "ValueError: no data (data.py:7)")
    assert log_excerpt(log, 1).startswith("Traceback")
    prefixed = "".join(f"[rank1]: {line}\n" for line in CAUGHT.splitlines())  # by PyTorch
    last = found(f"step 1\n{prefixed}")
    assert (last.text, last.message, last.is_final) == (CAUGHT, "OSError: try again (data.py:7)", True)
    lost = prefixed.replace("try again", "[pair.cc:553] Connection closed by peer [127.0.0.1]:44737.")
    assert cause_of_exit(lost) is None


def test_an_exception_that_ended_a_thread_is_known_as_such() -> None:
    assert found(f"step 1\n{IN_THREAD}{CAUGHT}").ended_thread
    assert found(f"{IN_THREAD}{CAUGHT}{CAUSED_BY}{CAUGHT}").ended_thread
    assert not found(f"{IN_THREAD}{CAUGHT}step 2\n{CAUGHT}").ended_thread


def test_last_words_are_of_the_program_and_neither_of_a_library_nor_of_exit_handlers() -> None:
    frames = '  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at\n'
    own = '  File "/w/runs/r/work/train.py", line 8 in load\n'
    head = "Fatal Python error: Segmentation fault\n\nCurrent thread 0x01 (most recent call first):\n"
    assert last_words(head + frames + own) == "in load (train.py:8)"
    assert last_words(head + frames) == "in string_at (__init__.py:519)"
    assert last_words(f"{CAUGHT}wandb: find logs at ./wandb\n", 1) == "OSError: try again (data.py:7)"
    assert last_words(f"{CAUGHT}step 7\nbye\n", 2) == "bye"


def test_what_is_no_traceback_and_no_process_is_not_named() -> None:
    assert last_traceback('Traceback (most recent call last):\n  File "/w/data.py", line 7, in read\n') is None
    assert last_traceback("he said: Traceback (most recent call last):\nX: y\n") is None
    assert first_at_barrier(["Shutdown::1::0. The first task at the barrier: 7. Some", ""]) is None
    assert log_excerpt("".join(f"{i}\n" for i in range(100))).splitlines()[0] == "75", "the last lines instead"


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


def test_silence_after_a_traceback_is_named_once_unless_it_went_on_or_lost_its_peer() -> None:
    watch = TracebackWatch()
    watch.record(1, BROKEN.format("x"), 5.0)
    watch.record(0, "step 1\n", 5.0)
    watch.record(2, BROKEN.format("z") + "step 2\n", 5.0)
    assert watch.record(3, BROKEN.format("UNKNOWN: Gloo AllGather failed: Connection closed by peer"), 0.0) is None
    assert watch.newly_silent(5.0 + SILENT_SECONDS - 1) == []
    assert [worker for worker, _ in watch.newly_silent(5.0 + SILENT_SECONDS)] == [1]
    assert watch.newly_silent(99.0) == []
    watch.record(1, BROKEN.format("y"), 100.0)
    assert [found.message for _, found in watch.newly_silent(200.0)] == ["ValueError: y (train.py:21)"]


def test_long_logs_are_not_kept() -> None:
    watch = TracebackWatch()
    assert watch.record(1, BROKEN.format("x"), 0.0)
    assert [watch.record(1, "step\n" * KEPT_CHARACTERS, 1.0) for _ in range(5)] == [None] * 5
    assert watch.record(1, BROKEN.format("y"), 2.0)

"""The verdict, case by case; and what a program said last, in recorded logs of four real JAX processes.

The logs are in `tests/fixtures/jax_exits/`, recorded with jax 0.10, without the exit hook of
`controller/agent/exit_hook/`: after an exception the processes waited five minutes for each other.
`==== worker N: exit CODE after SECONDS` precedes each log.
"""

import re
from dataclasses import dataclass, replace
from typing import Any

import pytest

from controller.recovery.diagnosis import TRAINER_EXIT_CODES, diagnose
from controller.recovery.responses import Observation, VerdictKind, WorkerStatus
from controller.recovery.watches import (
    KEPT_CHARACTERS,
    MAX_SHOWN,
    SILENT_SECONDS,
    Traceback,
    TracebackWatch,
    cause_of_exit,
    first_at_barrier,
    last_traceback,
    last_words,
    log_excerpt,
)
from controller.resources.pod.provisioner import PodStatus, Symptom
from tests.paths import ROOT

K = VerdictKind
OK = WorkerStatus()
DONE = WorkerStatus(ended=True, code=0)
AWAY = WorkerStatus(unreachable=True)
READY = PodStatus()
PREEMPTED = PodStatus("PREEMPTED")
MAINTAINED = PodStatus(maintenance="ONGOING")
HANGS = {"idle_seconds": 400.0, "hang_seconds": 300.0}
TRAINER = {"exit_codes": TRAINER_EXIT_CODES}
TORCH_MEMORY = (
    '[rank1]: Traceback (most recent call last):\n[rank1]:   File "/w/train.py", line 4, in <module>\n'
    "[rank1]: MemoryError\n"
)
PEERLESS = "jaxlib.XlaRuntimeError: UNKNOWN: Gloo AllReduce failed: Connection reset by peer"
HBM = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.8G of 15.7G"
NO_ROOM = "OSError: [Errno 28] No space left on device"
HALTED = "FAILED_PRECONDITION: Accelerator device halted prematurely"
BROKEN_POOL = "concurrent.futures.process.BrokenProcessPool: A process"
NO_PING = PodStatus(health="TIMEOUT", health_description="no ping")
RESCHEDULED = PodStatus(health="UNHEALTHY_MAINTENANCE")
SAVED = "worker 0 received a preemption notice; its program saved its state"
FLIPPED = WorkerStatus(ended=True, code=5, ended_at=60)
SENT_HOME = WorkerStatus(ended=True, code=0, ended_at=10)
SICK, FEWER = ("4 tpu", "3 tpu", "4 tpu"), ("4 chips", "3 chips")
BAD, LACKS = "worker 1, chip 2: HBM", "worker 1 has 3 of 4 chips"
ENDED_CHECK = "the health check of the chips stopped: TPU initialization failed"
LITTLE = "env.min_free_gb: worker 1 has 0.3 GB free"
IN_THREAD = WorkerStatus(thread_exception="OSError: no shard (data.py:7)")
ENDED_THREAD = "worker 1: an exception ended a thread of its program; OSError: no shard (data.py:7); no step and"
TOLD: dict[str, Any] = {"notice": "preemption"}


def failed(code: int | None = 1, tail: str = "ValueError: x", at: float = 10.0, **more: Any) -> WorkerStatus:
    return WorkerStatus(ended=True, code=code, log_tail=tail, ended_at=at, **more)


def killed(signal: str = "SIGKILL", at: float = 10.0, **more: Any) -> WorkerStatus:
    return failed(None, "step 12", at, signal=signal, **more)


def silent(seconds: float = 30.0, trouble: str = "") -> WorkerStatus:
    return WorkerStatus(silent_seconds=seconds, ssh_error=trouble)


def showing(symptom: str) -> PodStatus:
    return PodStatus(symptoms=(Symptom(symptom),))


@dataclass(frozen=True)
class Case:
    name: str
    kind: K
    words: str
    seen: Observation
    worker: int | None
    unreachable: tuple[int, ...]


def case(name: str, kind: K, words: str, *workers: WorkerStatus, **more: Any) -> Case:
    """A case, with `worker` and `away` as the verdict names them, and `pod` and the rest of what is observed."""
    worker, away = more.pop("worker", None), more.pop("away", ())
    return Case(name, kind, words, Observation(more.pop("pod", READY), workers, **more), worker, away)


def in_state(name: str, state: str, kind: K, words: str, worker: WorkerStatus = OK) -> Case:
    return case(name, kind, words, worker, pod=PodStatus(state))


def in_setup(name: str, kind: K, words: str, error: str, *workers: WorkerStatus, **more: Any) -> Case:
    return case(name, kind, words, *(workers or (OK, OK)), setup_error=error, **more)


CASES = [
    case("all well", K.RUNNING, "", OK, OK),
    case("one is done", K.RUNNING, "", DONE, OK),
    case("all done", K.FINISHED, "exited with code 0", DONE, DONE),
    case("done, and the pod went", K.FINISHED, "", DONE, DONE, pod=PREEMPTED),
    case("cancelled", K.CANCELLED, "on request", killed("SIGTERM"), cancelled=True),
    case("too dear", K.OVER_BUDGET, "12 h", OK, over_budget="12 h"),
    # the pod
    in_state("preempted", "PREEMPTED", K.PREEMPTED, "the node is preempted"),
    case("its programs die first", K.PREEMPTED, "preempted", killed(), OK, pod=PREEMPTED),
    in_state("deleted", "ABSENT", K.PREEMPTED, "the node is gone"),
    in_state("being deleted", "DELETING", K.PREEMPTED, "the node is deleting"),
    case("another one", K.PREEMPTED, "the node was replaced", OK, pod=PodStatus(replaced=True)),
    in_state("its request is suspended", "SUSPENDING", K.PREEMPTED, "suspending"),
    in_state("its request has no node", "GONE", K.PREEMPTED, "gone", silent()),
    in_state("terminated", "TERMINATED", K.PREEMPTED, "terminated"),
    in_state("stopped by hand", "STOPPED", K.PREEMPTED, "the node is stopped", silent()),
    in_state("under repair", "REPAIRING", K.MAINTENANCE, "the node is repairing", silent()),
    in_state("restarting", "RESTARTING", K.MAINTENANCE, "restarting"),
    in_state("a state nobody knows", "STATE_UNSPECIFIED", K.RUNNING, ""),
    case("maintenance that hurts", K.MAINTENANCE, "performing maintenance", killed(), pod=MAINTAINED),
    case("rescheduled", K.MAINTENANCE, "performing maintenance", silent(), pod=RESCHEDULED, away=(0,)),
    case("maintenance that does not", K.RUNNING, "is ongoing", OK, pod=MAINTAINED),
    case("maintenance to come", K.RUNNING, "is pending", OK, pod=PodStatus(maintenance="PENDING")),
    case("ill, and it works", K.RUNNING, "reports the pod as timeout", OK, pod=NO_PING),
    case("ill", K.UNHEALTHY_HOST, "timeout (no ping)", silent(), OK, pod=NO_PING, away=(0,)),
    case("no mesh", K.UNHEALTHY_HOST, "MESH_BUILD_FAIL", failed(), OK, pod=showing("MESH_BUILD_FAIL")),
    case("Google saw HBM run out", K.OUT_OF_HBM, "HBM", failed(), pod=showing("HBM_OUT_OF_MEMORY")),
    case("Google saw RAM run out", K.OUT_OF_RAM, "LOW_MEMORY", killed(), pod=showing("LOW_MEMORY")),
    case("a symptom that does not hurt", K.RUNNING, "LOW_MEMORY", OK, pod=showing("LOW_MEMORY")),
    case("libtpu calls the host sick", K.UNHEALTHY_HOST, "halted", failed(tail=HALTED), OK, worker=0),
    # a notice
    case("told, and saved", K.PREEMPTED, SAVED, failed(75, "", 11, **TOLD), failed(75, "", 10), worker=0),
    case("told, and did not listen", K.PREEMPTED, "terminated by SIGTERM", killed("SIGTERM", **TOLD), OK, worker=0),
    case("told, and it went", K.PREEMPTED, "is preempted", killed(**TOLD), pod=PREEMPTED),
    case("told, and it goes on", K.RUNNING, "", WorkerStatus(notice="preemption"), OK),
    case("told, and done", K.FINISHED, "", replace(DONE, notice="preemption"), DONE),
    case("told of maintenance", K.WORKER_LOST, "maintenance notice; it saved", failed(75, "", notice="maintenance")),
    case("maintenance has come", K.MAINTENANCE, "performing", failed(75, "", notice="maintenance"), pod=MAINTAINED),
    case("shut down from inside", K.WORKER_LOST, "shutdown notice; it saved", failed(75, "", notice="shutdown"), OK),
    case("told to end by somebody", K.WORKER_LOST, "stop request; it saved", failed(75, ""), OK, worker=0),
    # the network
    case("nothing is reachable", K.NETWORK_LOST, "Google's API", silent(40), silent(50), pod=None),
    case("nothing was ever reachable", K.NETWORK_LOST, "", AWAY, pod=None),
    case("only Google is away", K.RUNNING, "the workers do", OK, OK, pod=None),
    case("one worker and Google are away", K.RUNNING, "", silent(40), OK, pod=None),
    case("it ended before Google went away", K.PROGRAM_ERROR, "ValueError", failed(), silent(5), pod=None),
    # workers
    case("silent", K.WORKER_LOST, "worker 1 has not responded for 30 s", OK, silent(), OK, worker=1, away=(1,)),
    case("silent for a moment", K.RUNNING, "", OK, silent(10)),
    case("all silent may be the way", K.RUNNING, "", silent(30), silent(30)),
    case("all silent for long", K.WORKER_LOST, "0, 1", silent(70), silent(61), away=(0, 1)),
    case("the only one", K.WORKER_LOST, "", silent(30), away=(0,)),
    case(
        "others ended for want of it", K.WORKER_LOST, "worker 1", failed(tail=PEERLESS), silent(25), worker=1, away=(1,)
    ),
    case("killed from outside", K.WORKER_LOST, "SIGKILL from outside", OK, killed(), worker=1),
    case("noticed by others", K.WORKER_LOST, "SIGKILL", failed(tail=PEERLESS, at=9.9), killed(), worker=1),
    case("restarted", K.WORKER_LOST, "was restarted", failed(None, "", error="the worker was restarted"), OK, worker=0),
    case("its peers are gone", K.WORKER_LOST, "lost the other workers", failed(tail=PEERLESS), OK, worker=0),
    case("killed by its kernel", K.OUT_OF_RAM, "memory ran out", killed(oom_kills=1), OK, worker=0),
    # the program
    case("an error", K.PROGRAM_ERROR, "code 1; ValueError: x", failed(), OK, worker=0),
    case("the first one counts", K.PROGRAM_ERROR, "code 7", failed(tail="b", at=20), failed(7, "a", at=10), worker=1),
    case("not its echo", K.PROGRAM_ERROR, "ValueError", failed(tail=PEERLESS, at=9), failed(at=10), worker=1),
    case("a fault of its own", K.PROGRAM_ERROR, "SIGSEGV", killed("SIGSEGV")),
    case("HBM", K.OUT_OF_HBM, "", failed(tail=HBM)),
    case("a quota of the bucket is no memory", K.PROGRAM_ERROR, "", failed(tail="RESOURCE_EXHAUSTED: rate limit")),
    case("RAM", K.OUT_OF_RAM, "", failed(tail="Traceback\nMemoryError")),
    case("the disk", K.DISK_FULL, "", failed(tail=NO_ROOM)),
    case("the disk, so full that no log says so", K.DISK_FULL, "0.0 GB left", failed(tail="", free_gb=0.0)),
    case("devices", K.DEVICE_MISMATCH, "", failed(3), failed(3), **TRAINER),
    case("workers disagree", K.WORKERS_DISAGREE, "", failed(4), failed(4), **TRAINER),
    case("no sampler", K.WORKER_LOST, "", failed(6), failed(6), worker=0, **TRAINER),
    case("flipped bits", K.CORRUPTION, "", failed(5), failed(5), worker=0, **TRAINER),
    case(
        "flipped bits, without samplers", K.CORRUPTION, "", FLIPPED, FLIPPED, SENT_HOME, SENT_HOME, worker=0, **TRAINER
    ),
    case("an error, after the sampler left", K.PROGRAM_ERROR, "", failed(at=60), SENT_HOME),
    case("the sampler was sent home, and the trainer ends", K.RUNNING, "", OK, DONE),
    case("an own exit code 3", K.PROGRAM_ERROR, "code 3; no data", OK, failed(3, "no data"), worker=1),
    case("an own code with a meaning", K.WORKER_LOST, "33", failed(33), OK, exit_codes={33: K.WORKER_LOST}),
    case("PyTorch's RAM", K.OUT_OF_RAM, "MemoryError (train.py:4)", OK, failed(tail=TORCH_MEMORY), worker=1),
    case("numpy's RAM", K.OUT_OF_RAM, "", failed(tail="numpy._core._exceptions._ArrayMemoryError: Unable to")),
    case("a script's child crashed", K.PROGRAM_ERROR, "code 139 (SIGSEGV)", OK, failed(139, ""), worker=1),
    case("a script's child was killed", K.WORKER_LOST, "killed from outside", failed(137, "Killed"), OK, worker=0),
    case("by the kernel", K.OUT_OF_RAM, "SIGKILL", OK, failed(137, "Killed", oom_kills=1), worker=1),
    case("so was a loader", K.OUT_OF_RAM, "memory ran out", failed(tail=BROKEN_POOL, oom_kills=1), OK, worker=0),
    case("so was somebody else", K.PROGRAM_ERROR, "ValueError: x", failed(oom_kills=1), OK),
    # the way there
    in_setup("a sick chip", K.UNHEALTHY_HOST, "worker 1 has different", "4 tpu", OK, OK, OK, devices=SICK, worker=1),
    in_setup("a bad chip", K.UNHEALTHY_HOST, BAD, f"faulty chips: {BAD}", wrong_devices=True, faulty=(1,), worker=1),
    in_setup(
        "one lacks a chip", K.UNHEALTHY_HOST, LACKS, LACKS, wrong_devices=True, devices=FEWER, faulty=(1,), worker=1
    ),
    in_setup("a chip is held", K.DEVICE_MISMATCH, "by process 7", "vfio/0 is held by process 7", wrong_devices=True),
    in_setup("a health check that libtpu ends", K.UNHEALTHY_HOST, "stopped", ENDED_CHECK),
    in_setup("others everywhere", K.DEVICE_MISMATCH, "expected 4", "expected 4 tpu", devices=("8 tpu", "8 tpu")),
    in_setup("setup", K.SETUP_FAILURE, "pip", "pip failed", WorkerStatus(error="exit 1"), OK, worker=0),
    in_setup("setup, no room", K.DISK_FULL, "", NO_ROOM, OK),
    in_setup(
        "little room",
        K.DISK_FULL,
        "env.min_free_gb",
        LITTLE,
        OK,
        WorkerStatus(error="0.3 GB free"),
        disk_full=True,
        worker=1,
    ),
    in_setup("not reached", K.WORKER_LOST, "timed out", "worker 0: timed out", AWAY, OK, worker=0, away=(0,)),
    in_setup("setup, preempted", K.PREEMPTED, "", "x", AWAY, pod=PREEMPTED),
    # time
    case("stopped", K.HUNG, "stopped by a signal", OK, WorkerStatus(stopped_seconds=12), worker=1),
    case("stopped for a moment", K.RUNNING, "", OK, WorkerStatus(stopped_seconds=5)),
    case("no step", K.HUNG, "no step and no output for 400 s; the last step was 12", OK, OK, step=12, **HANGS),
    case("no step since an exception in a thread", K.PROGRAM_ERROR, ENDED_THREAD, OK, IN_THREAD, worker=1, **HANGS),
    case("on after an exception in a thread", K.RUNNING, "", WorkerStatus(thread_exception="OSError: x"), OK),
    case("a long step", K.RUNNING, "", OK, idle_seconds=200.0, hang_seconds=300.0),
    case("no step, who knows what is long", K.RUNNING, "", OK, idle_seconds=9000.0),
    case("no step, under maintenance", K.MAINTENANCE, "performing maintenance", OK, pod=MAINTAINED, **HANGS),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_case(case: Case) -> None:
    verdict = diagnose(case.seen)
    assert verdict.kind == case.kind, verdict
    assert case.words in str(verdict), verdict
    assert verdict.unreachable == case.unreachable
    if case.worker is not None:
        assert verdict.worker == case.worker
    if verdict.kind is not K.RUNNING:
        assert verdict.evidence


def test_every_verdict_has_a_case() -> None:
    assert {case.kind for case in CASES} == set(K)


def test_what_is_not_certain_before_the_last_has_spoken() -> None:
    saved, lost = failed(75, "", **TOLD), failed(tail=PEERLESS)
    verdict = diagnose(Observation(READY, (saved, OK)))
    assert (verdict.kind, verdict.from_notice, verdict.certain) == (K.PREEMPTED, True, False)
    assert diagnose(Observation(READY, (saved, failed(75, "")))).certain
    assert not diagnose(Observation(READY, (lost, OK))).certain
    assert diagnose(Observation(READY, (lost, lost))).certain


SIGNALS = {134: "SIGABRT", 137: "SIGKILL", 139: "SIGSEGV"}
RECORDED = ROOT / "tests" / "fixtures" / "jax_exits"
CAUGHT = 'Traceback (most recent call last):\n  File "/w/data.py", line 7, in read\n    x\nOSError: try again\n'
ABORT = "F1122 20:09:37.212622    4908 client.h:80] Terminating process\nFatal Python error: Aborted\n"
CAUSED_BY = "\nThe above exception was the direct cause of the following exception:\n\n"
THREAD_HEAD = "Exception in thread loader (load):\n"
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
    assert found(f"step 1\n{THREAD_HEAD}{CAUGHT}").ended_thread
    assert found(f"{THREAD_HEAD}{CAUGHT}{CAUSED_BY}{CAUGHT}").ended_thread
    assert not found(f"{THREAD_HEAD}{CAUGHT}step 2\n{CAUGHT}").ended_thread


def test_last_words_are_of_the_program_and_neither_of_a_library_nor_of_exit_handlers() -> None:
    frames = '  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at\n'
    own = '  File "/w/runs/r/work/train.py", line 8 in load\n'
    head = "Fatal Python error: Segmentation fault\n\nCurrent thread 0x01 (most recent call first):\n"
    assert last_words(head + frames + own) == "in load (train.py:8)"
    assert last_words(head + frames) == "in string_at (__init__.py:519)"
    assert last_words(f"{CAUGHT}wandb: find logs at ./wandb\n", 1) == "OSError: try again (data.py:7)"
    assert last_words(f"{CAUGHT}step 7\nbye\n", 2) == "bye"
    fatal = "F1129 02:27:41.889600   28707 parse_flags_from_env.cc:234] Unknown flag in XLA_FLAGS: --xla_a=1\n"
    stack = f"*** Check failure stack trace: ***\n    @     0x7fac78640634  absl::Die()\n{head}{own}"
    assert last_words(f"hello\n{fatal}{stack}") == "Unknown flag in XLA_FLAGS: --xla_a=1"


def test_what_is_no_traceback_and_no_process_is_not_named() -> None:
    assert last_traceback('Traceback (most recent call last):\n  File "/w/data.py", line 7, in read\n') is None
    assert last_traceback("he said: Traceback (most recent call last):\nX: y\n") is None
    assert first_at_barrier(["Shutdown::1::0. The first task at the barrier: 7. Some", ""]) is None
    assert log_excerpt("".join(f"{i}\n" for i in range(100))).splitlines()[0] == "75", "the last lines instead"
    gloo = "[Gloo] Rank {} is connected to 3 peer ranks. Expected number of connected peer ranks is : 3\n"
    log = "mine\n" + "".join(gloo.format(rank) for rank in range(40))
    assert (log_excerpt(log), last_words(log)) == ("mine", "mine")


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

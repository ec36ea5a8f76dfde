"""The verdict, case by case: what is observed, what it is called, and a word of the evidence."""

from dataclasses import dataclass, replace
from typing import Any

import pytest

from controller.recovery.diagnosis import TRAINER_EXIT_CODES, diagnose
from controller.recovery.policy import Observation, VerdictKind, WorkerStatus
from controller.resources.pod.provisioner import PodStatus, Symptom

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

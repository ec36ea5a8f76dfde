"""The verdict, case by case: what is observed, what it is called, and a word of the evidence."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from controller.recovery.diagnosis import TRAINER_EXIT_CODES, diagnose
from controller.recovery.verdict import Observation, VerdictKind, WorkerStatus
from controller.resources.pod.provisioner import PodStatus, Symptom

K = VerdictKind
OK = WorkerStatus()
DONE = WorkerStatus(ended=True, code=0)
READY = PodStatus()
TORCH_MEMORY = (
    '[rank1]: Traceback (most recent call last):\n[rank1]:   File "/w/train.py", line 4, in <module>\n'
    "[rank1]: MemoryError\n"
)
PEERLESS = "jaxlib.XlaRuntimeError: UNKNOWN: Gloo AllReduce failed: Connection reset by peer"


def failed(code: int | None = 1, tail: str = "ValueError: x", at: float = 10.0, **more: object) -> WorkerStatus:
    return WorkerStatus(ended=True, code=code, log_tail=tail, ended_at=at, **more)  # type: ignore[arg-type]


def killed(signal: str = "SIGKILL", at: float = 10.0, **more: object) -> WorkerStatus:
    return failed(None, "step 12", at, signal=signal, **more)


def silent(seconds: float = 30.0, trouble: str = "") -> WorkerStatus:
    return WorkerStatus(silent_seconds=seconds, ssh_error=trouble)


@dataclass(frozen=True)
class Case:
    name: str
    workers: tuple[WorkerStatus, ...]
    kind: K
    words: str = ""
    pod: PodStatus | None = READY
    more: dict[str, object] = field(default_factory=dict)
    worker: int | None = None
    unreachable: tuple[int, ...] = ()


CASES = [
    Case("all well", (OK, OK), K.RUNNING),
    Case("one is done", (DONE, OK), K.RUNNING),
    Case("all done", (DONE, DONE), K.FINISHED, "exited with code 0"),
    Case("done, and the pod went", (DONE, DONE), K.FINISHED, pod=PodStatus("PREEMPTED")),
    Case("cancelled", (killed("SIGTERM"),), K.CANCELLED, "on request", more={"cancelled": True}),
    Case("too dear", (OK,), K.OVER_BUDGET, "12 h", more={"over_budget": "12 h"}),
    # the pod
    Case("preempted", (OK, OK), K.PREEMPTED, "the node is preempted", PodStatus("PREEMPTED")),
    Case("its programs die first", (killed(), OK), K.PREEMPTED, "preempted", PodStatus("PREEMPTED")),
    Case("deleted", (OK,), K.PREEMPTED, "the node is gone", PodStatus("ABSENT")),
    Case("being deleted", (OK,), K.PREEMPTED, "the node is deleting", PodStatus("DELETING")),
    Case("another one", (OK,), K.PREEMPTED, "the node was replaced", PodStatus(replaced=True)),
    Case("its request is suspended", (OK,), K.PREEMPTED, "suspending", PodStatus("SUSPENDING")),
    Case("its request has no node", (silent(),), K.PREEMPTED, "gone", PodStatus("GONE")),
    Case("terminated", (OK,), K.PREEMPTED, "terminated", PodStatus("TERMINATED")),
    Case("stopped by hand", (silent(),), K.PREEMPTED, "the node is stopped", PodStatus("STOPPED")),
    Case("under repair", (silent(),), K.MAINTENANCE, "the node is repairing", PodStatus("REPAIRING")),
    Case("restarting", (OK,), K.MAINTENANCE, "restarting", PodStatus("RESTARTING")),
    Case("a state nobody knows", (OK,), K.RUNNING, pod=PodStatus("STATE_UNSPECIFIED")),
    Case(
        "maintenance that hurts", (killed(),), K.MAINTENANCE, "performing maintenance", PodStatus(maintenance="ONGOING")
    ),
    Case(
        "rescheduled",
        (silent(),),
        K.MAINTENANCE,
        "performing maintenance",
        PodStatus(health="UNHEALTHY_MAINTENANCE"),
        unreachable=(0,),
    ),
    Case("maintenance that does not", (OK,), K.RUNNING, "is ongoing", PodStatus(maintenance="ONGOING")),
    Case("maintenance to come", (OK,), K.RUNNING, "is pending", PodStatus(maintenance="PENDING")),
    Case("ill, and it works", (OK,), K.RUNNING, "reports the pod as timeout", PodStatus(health="TIMEOUT")),
    Case(
        "ill",
        (silent(), OK),
        K.UNHEALTHY_HOST,
        "timeout (no ping)",
        PodStatus(health="TIMEOUT", health_description="no ping"),
        unreachable=(0,),
    ),
    Case(
        "no mesh",
        (failed(), OK),
        K.UNHEALTHY_HOST,
        "MESH_BUILD_FAIL",
        PodStatus(symptoms=(Symptom("MESH_BUILD_FAIL"),)),
    ),
    Case(
        "Google saw HBM run out",
        (failed(),),
        K.OUT_OF_HBM,
        "HBM",
        PodStatus(symptoms=(Symptom("HBM_OUT_OF_MEMORY", "w-1"),)),
    ),
    Case(
        "Google saw RAM run out", (killed(),), K.OUT_OF_RAM, "LOW_MEMORY", PodStatus(symptoms=(Symptom("LOW_MEMORY"),))
    ),
    Case("a symptom that does not hurt", (OK,), K.RUNNING, "LOW_MEMORY", PodStatus(symptoms=(Symptom("LOW_MEMORY"),))),
    Case(
        "libtpu calls the host sick",
        (failed(tail="FAILED_PRECONDITION: Accelerator device halted prematurely"), OK),
        K.UNHEALTHY_HOST,
        "halted",
        worker=0,
    ),
    # a notice
    Case(
        "told that it is taken away, and saved",
        (failed(75, "", 11, notice="preemption"), failed(75, "", 10)),
        K.PREEMPTED,
        "worker 0 received a preemption notice; its program saved its state",
        worker=0,
    ),
    Case(
        "told that it is taken away, and did not listen",
        (killed("SIGTERM", notice="preemption"), OK),
        K.PREEMPTED,
        "terminated by SIGTERM",
        worker=0,
    ),
    Case("told, and it went", (killed(notice="preemption"),), K.PREEMPTED, "is preempted", PodStatus("PREEMPTED")),
    Case("told, and it goes on", (WorkerStatus(notice="preemption"), OK), K.RUNNING),
    Case("told, and done", (replace(DONE, notice="preemption"), DONE), K.FINISHED),
    Case("told of maintenance", (failed(75, "", notice="maintenance"),), K.WORKER_LOST, "maintenance notice; it saved"),
    Case(
        "maintenance has come",
        (failed(75, "", notice="maintenance"),),
        K.MAINTENANCE,
        "performing maintenance",
        PodStatus(maintenance="ONGOING"),
    ),
    Case("shut down from inside", (failed(75, "", notice="shutdown"), OK), K.WORKER_LOST, "shutdown notice; it saved"),
    Case("told to end by somebody", (failed(75, ""), OK), K.WORKER_LOST, "stop request; it saved", worker=0),
    # the network
    Case("nothing is reachable", (silent(40), silent(50)), K.NETWORK_LOST, "Google's API", None),
    Case("nothing was ever reachable", (WorkerStatus(unreachable=True),), K.NETWORK_LOST, pod=None),
    Case("only Google is away", (OK, OK), K.RUNNING, "the workers do", None),
    Case("one worker and Google are away", (silent(40), OK), K.RUNNING, pod=None),
    Case("it ended before Google went away", (failed(), silent(5)), K.PROGRAM_ERROR, "ValueError", None),
    # workers
    Case(
        "silent",
        (OK, silent(30, "it has not answered"), OK),
        K.WORKER_LOST,
        "worker 1 has not responded for 30 s",
        worker=1,
        unreachable=(1,),
    ),
    Case("silent for a moment", (OK, silent(10)), K.RUNNING),
    Case("all silent may be the way", (silent(30), silent(30)), K.RUNNING),
    Case("all silent for long", (silent(70), silent(61)), K.WORKER_LOST, "0, 1", unreachable=(0, 1)),
    Case("the only one", (silent(30),), K.WORKER_LOST, unreachable=(0,)),
    Case(
        "one is silent, the others ended for want of it",
        (failed(tail=PEERLESS), silent(25)),
        K.WORKER_LOST,
        "worker 1 has not responded",
        worker=1,
        unreachable=(1,),
    ),
    Case("killed from outside", (OK, killed()), K.WORKER_LOST, "SIGKILL from outside", worker=1),
    Case(
        "killed first, noticed by others",
        (failed(tail=PEERLESS, at=9.9), killed(at=10)),
        K.WORKER_LOST,
        "SIGKILL",
        worker=1,
    ),
    Case(
        "restarted", (failed(None, "", error="the worker was restarted"), OK), K.WORKER_LOST, "was restarted", worker=0
    ),
    Case(
        "its peers are gone, who knows why",
        (failed(tail=PEERLESS), OK),
        K.WORKER_LOST,
        "lost the other workers",
        worker=0,
    ),
    Case("killed by its kernel", (killed(oom_kills=1), OK), K.OUT_OF_RAM, "memory ran out", worker=0),
    # the program
    Case("an error", (failed(), OK), K.PROGRAM_ERROR, "code 1; ValueError: x", worker=0),
    Case("the first one counts", (failed(tail="b", at=20), failed(7, "a", at=10)), K.PROGRAM_ERROR, "code 7", worker=1),
    Case(
        "an error, noticed by others before",
        (failed(tail=PEERLESS, at=9), failed(at=10)),
        K.PROGRAM_ERROR,
        "ValueError",
        worker=1,
    ),
    Case("a fault of its own", (killed("SIGSEGV"),), K.PROGRAM_ERROR, "SIGSEGV"),
    Case(
        "HBM",
        (failed(tail="RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.8G of 15.7G"),),
        K.OUT_OF_HBM,
    ),
    Case("a quota of the bucket is no memory", (failed(tail="RESOURCE_EXHAUSTED: rate limit"),), K.PROGRAM_ERROR),
    Case("RAM", (failed(tail="Traceback\nMemoryError"),), K.OUT_OF_RAM),
    Case("the disk", (failed(tail="OSError: [Errno 28] No space left on device"),), K.DISK_FULL),
    Case("the disk, so full that no log says so", (failed(tail="", free_gb=0.0),), K.DISK_FULL, "0.0 GB left"),
    Case("devices", (failed(3), failed(3)), K.DEVICE_MISMATCH, more={"exit_codes": TRAINER_EXIT_CODES}),
    Case("workers disagree", (failed(4), failed(4)), K.WORKERS_DISAGREE, more={"exit_codes": TRAINER_EXIT_CODES}),
    Case("no sampler", (failed(6), failed(6)), K.WORKER_LOST, more={"exit_codes": TRAINER_EXIT_CODES}, worker=0),
    Case("flipped bits", (failed(5), failed(5)), K.CORRUPTION, more={"exit_codes": TRAINER_EXIT_CODES}, worker=0),
    Case(
        "flipped bits, after the samplers were sent home",
        (failed(5, at=60), failed(5, at=60), replace(DONE, ended_at=10), replace(DONE, ended_at=10)),
        K.CORRUPTION,
        more={"exit_codes": TRAINER_EXIT_CODES},
        worker=0,
    ),
    Case("an error, after the sampler was sent home", (failed(at=60), replace(DONE, ended_at=10)), K.PROGRAM_ERROR),
    Case("the sampler was sent home, and the trainer ends", (OK, DONE), K.RUNNING),
    Case("an own exit code 3", (OK, failed(3, "no data")), K.PROGRAM_ERROR, "code 3; no data", worker=1),
    Case(
        "an own exit code with a meaning",
        (failed(33), OK),
        K.WORKER_LOST,
        "33",
        more={"exit_codes": {33: K.WORKER_LOST}},
    ),
    Case(
        "PyTorch runs out of memory",
        (OK, failed(tail=TORCH_MEMORY)),
        K.OUT_OF_RAM,
        "MemoryError (train.py:4)",
        worker=1,
    ),
    Case(
        "numpy runs out of memory", (failed(tail="numpy._core._exceptions._ArrayMemoryError: Unable to"),), K.OUT_OF_RAM
    ),
    Case("a script's child crashed", (OK, failed(139, "")), K.PROGRAM_ERROR, "code 139 (SIGSEGV)", worker=1),
    Case("a script's child was killed", (failed(137, "Killed"), OK), K.WORKER_LOST, "killed from outside", worker=0),
    Case(
        "the kernel killed a script's child",
        (OK, failed(137, "Killed", oom_kills=1)),
        K.OUT_OF_RAM,
        "SIGKILL",
        worker=1,
    ),
    Case(
        "the kernel killed a loader",
        (failed(tail="concurrent.futures.process.BrokenProcessPool: A process", oom_kills=1), OK),
        K.OUT_OF_RAM,
        "memory ran out",
        worker=0,
    ),
    Case("an error, and the kernel killed somebody else", (failed(oom_kills=1), OK), K.PROGRAM_ERROR, "ValueError: x"),
    # the way there
    Case(
        "a sick chip",
        (OK, OK, OK),
        K.UNHEALTHY_HOST,
        "worker 1 has different devices",
        worker=1,
        more={"devices": ("4 tpu", "3 tpu", "4 tpu"), "setup_error": "expected 4 tpu devices"},
    ),
    Case(
        "a chip that failed the health check",
        (OK, OK),
        K.UNHEALTHY_HOST,
        "worker 1, chip 2: HBM",
        worker=1,
        more={"wrong_devices": True, "faulty": (1,), "setup_error": "faulty chips: worker 1, chip 2: HBM"},
    ),
    Case(
        "one of two workers lacks a chip",
        (OK, OK),
        K.UNHEALTHY_HOST,
        "worker 1 has 3 of 4 chips",
        worker=1,
        more={
            "wrong_devices": True,
            "devices": ("4 chips", "3 chips"),
            "faulty": (1,),
            "setup_error": "worker 1 has 3 of 4 chips",
        },
    ),
    Case(
        "somebody holds a chip",
        (OK, OK),
        K.DEVICE_MISMATCH,
        "held by process 7",
        more={"wrong_devices": True, "setup_error": "worker 1: /dev/vfio/0 is held by process 7"},
    ),
    Case(
        "a health check that libtpu ends",
        (OK, OK),
        K.UNHEALTHY_HOST,
        "stopped",
        more={"setup_error": "the health check of the chips stopped: TPU initialization failed"},
    ),
    Case(
        "other devices everywhere",
        (OK, OK),
        K.DEVICE_MISMATCH,
        "expected 4",
        more={"devices": ("8 tpu", "8 tpu"), "setup_error": "expected 4 tpu devices"},
    ),
    Case(
        "setup",
        (WorkerStatus(error="exit 1"), OK),
        K.SETUP_FAILURE,
        "pip",
        worker=0,
        more={"setup_error": "pip failed"},
    ),
    Case("setup, no room", (OK,), K.DISK_FULL, more={"setup_error": "OSError: [Errno 28] No space left on device"}),
    Case(
        "setup, less room than asked for",
        (OK, WorkerStatus(error="0.3 GB free")),
        K.DISK_FULL,
        "env.min_free_gb",
        worker=1,
        more={"setup_error": "env.min_free_gb: worker 1 has 0.3 GB free", "disk_full": True},
    ),
    Case(
        "setup, not reached",
        (WorkerStatus(unreachable=True), OK),
        K.WORKER_LOST,
        "timed out",
        worker=0,
        unreachable=(0,),
        more={"setup_error": "worker 0: timed out"},
    ),
    Case(
        "setup, preempted",
        (WorkerStatus(unreachable=True),),
        K.PREEMPTED,
        pod=PodStatus("PREEMPTED"),
        more={"setup_error": "x"},
    ),
    # time
    Case("stopped", (OK, WorkerStatus(stopped_seconds=12)), K.HUNG, "stopped by a signal", worker=1),
    Case("stopped for a moment", (OK, WorkerStatus(stopped_seconds=5)), K.RUNNING),
    Case(
        "no step",
        (OK, OK),
        K.HUNG,
        "no step and no output for 400 s; the last step was 12",
        more={"idle_seconds": 400.0, "hang_seconds": 300.0, "step": 12},
    ),
    Case(
        "no step since an exception in a thread",
        (OK, WorkerStatus(thread_exception="OSError: no shard (data.py:7)")),
        K.PROGRAM_ERROR,
        "worker 1: an exception ended a thread of its program; OSError: no shard (data.py:7); no step and",
        more={"idle_seconds": 400.0, "hang_seconds": 300.0},
        worker=1,
    ),
    Case("it goes on after an exception in a thread", (WorkerStatus(thread_exception="OSError: x"), OK), K.RUNNING),
    Case("a long step", (OK,), K.RUNNING, more={"idle_seconds": 200.0, "hang_seconds": 300.0}),
    Case("no step, who knows what is long", (OK,), K.RUNNING, more={"idle_seconds": 9000.0}),
    Case(
        "no step, under maintenance",
        (OK,),
        K.MAINTENANCE,
        "performing maintenance",
        PodStatus(maintenance="ONGOING"),
        {"idle_seconds": 400.0, "hang_seconds": 300.0},
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_case(case: Case) -> None:
    verdict = diagnose(Observation(case.pod, case.workers, **case.more))  # type: ignore[arg-type]
    assert verdict.kind == case.kind, verdict
    assert case.words in str(verdict), verdict
    assert verdict.unreachable == case.unreachable
    if case.worker is not None:
        assert verdict.worker == case.worker
    if verdict.kind is not K.RUNNING:
        assert verdict.evidence


def test_every_verdict_has_a_case() -> None:
    assert {case.kind for case in CASES} == set(K)


def test_while_a_program_still_saves_a_preemption_that_was_announced_is_not_certain() -> None:
    verdict = diagnose(Observation(READY, (failed(75, "", notice="preemption"), OK)))
    assert (verdict.kind, verdict.from_notice, verdict.certain) == (K.PREEMPTED, True, False)
    assert diagnose(Observation(READY, (failed(75, "", notice="preemption"), failed(75, "")))).certain


def test_who_lost_its_peers_may_not_be_the_last_to_speak() -> None:
    assert not diagnose(Observation(READY, (failed(tail=PEERLESS), OK))).certain
    assert diagnose(Observation(READY, (failed(tail=PEERLESS), failed(tail=PEERLESS)))).certain

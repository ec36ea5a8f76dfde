"""The verdict and the response to it, which is chosen purely.

The config sets responses and three budgets, the pod limits the choice. First the types of the diagnosis: what was
observed, the verdict, and how an attempt ended.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Self

from conf.schema.run_sections import Recovery
from controller.agent.protocol import State
from controller.core.json_documents import Document
from controller.core.text import plural
from controller.resources.pod.provisioner import PodStatus


class VerdictKind(StrEnum):
    """All verdicts; docs/recovery.md shows each."""

    RUNNING = "running"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    OVER_BUDGET = "over_budget"
    PREEMPTED = "preempted"
    MAINTENANCE = "maintenance"
    UNHEALTHY_HOST = "unhealthy_host"
    CORRUPTION = "corruption"
    WORKER_LOST = "worker_lost"
    NETWORK_LOST = "network_lost"
    HUNG = "hung"
    OUT_OF_HBM = "out_of_hbm"
    OUT_OF_RAM = "out_of_ram"
    DISK_FULL = "disk_full"
    PROGRAM_ERROR = "program_error"
    DEVICE_MISMATCH = "device_mismatch"
    WORKERS_DISAGREE = "workers_disagree"
    SETUP_FAILURE = "setup_failure"

    @property
    def label(self) -> str:
        return self.value.replace("_", " ")


@dataclass(frozen=True)
class WorkerStatus:
    """Status of one worker: how long it has been silent, and what its agent last reported."""

    silent_seconds: float = 0.0
    ssh_error: str = ""
    """Why SSH fails; empty while it works."""
    unreachable: bool = False
    """Whether the last connection attempt failed."""
    ended: bool = False
    stop_requested: bool = False
    """Whether we stopped it because another worker had ended."""
    code: int | None = None
    signal: str = ""
    error: str = ""
    """Error of the agent, if something other than the program failed there."""
    ended_at: float = 0.0
    log_tail: str = ""
    oom_kills: int = 0
    """Number of processes that its kernel has OOM-killed since the attempt began."""
    free_gb: float | None = None
    thread_exception: str = ""
    """Exception that ended a thread of its running program, if the program has printed nothing since."""
    stopped_seconds: float = 0.0
    """How long a signal has kept its program stopped."""
    notice: str = ""
    """Notice to its VM: preemption, maintenance or shutdown."""


@dataclass(frozen=True)
class Observation:
    """Input of the diagnosis. `pod` is None while Google's API does not answer."""

    pod: PodStatus | None
    workers: tuple[WorkerStatus, ...]
    idle_seconds: float = 0.0
    """Seconds since any worker reported a step or printed anything."""
    step: int | None = None
    hang_seconds: float | None = None
    """Seconds without a step that count as a hang; None: not known (yet)."""
    lost_seconds: float = 20.0
    exit_codes: Mapping[int, VerdictKind] = field(default_factory=dict)
    """Exit codes by which the program tells what is wrong."""
    cancelled: bool = False
    over_budget: str = ""
    setup_error: str = ""
    """Why the workers could not be set up."""
    setup_details: str = ""
    """Full output of the failed setup."""
    wrong_devices: bool = False
    """Whether `setup_error` is about the devices: their number, who holds them, or their health."""
    disk_full: bool = False
    """Whether `setup_error` is a full disk, however its message puts it."""
    devices: tuple[str, ...] = ()
    """Devices of each worker, if their number differs from the plan."""
    faulty: tuple[int, ...] = ()
    """Workers whose chips are missing or failed the health check, while others are as planned."""

    @property
    def silent_workers(self) -> tuple[int, ...]:
        return tuple(i for i, w in enumerate(self.workers) if not w.ended and w.silent_seconds >= self.lost_seconds)


@dataclass(frozen=True)
class Verdict:
    """Diagnosis. `worker` is the worker concerned, if any; `certain` is False if running workers may add evidence."""

    kind: VerdictKind
    evidence: tuple[str, ...] = ()
    worker: int | None = None
    unreachable: tuple[int, ...] = ()
    whole_pod: bool = False
    """Whether no worker answers."""
    certain: bool = True
    from_notice: bool = False
    """Whether the only evidence is a notice to the VM, so that everything still exists."""
    ended: bool = True
    """Whether the program of `worker` had ended by itself."""

    @property
    def summary(self) -> str:
        return "; ".join(self.evidence)

    def __str__(self) -> str:
        return f"{self.kind.label}: {self.summary}" if self.evidence else self.kind.label


@dataclass(frozen=True)
class AttemptOutcome:
    """How an attempt ended. `ends` holds the last state of each worker that ended, in the order they ended."""

    verdict: Verdict
    ends: tuple[tuple[int, State], ...] = ()
    step: int | None = None


SHELL_SIGNALS = {
    129: "SIGHUP", 132: "SIGILL", 134: "SIGABRT", 135: "SIGBUS", 136: "SIGFPE", 137: "SIGKILL", 139: "SIGSEGV",
    143: "SIGTERM",
}  # fmt: skip
"""Exit codes of a shell whose last command was ended by a signal (128 and its number on Linux)."""


def code_text(code: int | None) -> str:
    """Return an exit code, with the signal that it stands for."""
    name = SHELL_SIGNALS.get(code or 0)
    return f"code {code} ({name})" if name else f"code {code}"


INFRASTRUCTURE_KINDS = frozenset(
    {
        VerdictKind.PREEMPTED,
        VerdictKind.MAINTENANCE,
        VerdictKind.UNHEALTHY_HOST,
        VerdictKind.CORRUPTION,
        VerdictKind.WORKER_LOST,
        VerdictKind.HUNG,
    }
)
"""Verdicts that count against max_preemptions; all others but NETWORK_LOST count against max_program_failures."""
CRASH_LOOP_EXEMPT_KINDS = frozenset({VerdictKind.PREEMPTED, VerdictKind.MAINTENANCE, VerdictKind.NETWORK_LOST})
"""Verdicts that say nothing about the program, since Google or the network caused them: no sign of a crash loop."""
WAIT, RESTART_PROGRAM, RESTART_WORKER = "wait", "restart_program", "restart_worker"
REPLACE_NODE, MOVE_ZONE, GIVE_UP = "replace_node", "move_zone", "give_up"
DESCRIPTIONS = {
    WAIT: "waiting",
    RESTART_PROGRAM: "restarting the program on every worker from the last checkpoint",
    RESTART_WORKER: "restarting the worker's VM and resuming from the last checkpoint",
    REPLACE_NODE: "replacing the pod and resuming from the last checkpoint",
    MOVE_ZONE: "moving elsewhere and resuming from the last checkpoint",
}


@dataclass(frozen=True)
class Incident(Document):
    """One failed attempt and the response to it, as recorded in the bucket.

    `progress` is the newest checkpoint, or the last step if the program has no known checkpoint. `worker` is the
    worker that caused it, if that is known.
    """

    KEYS: ClassVar = {"words": "message"}

    attempt: int
    kind: str
    words: str
    response: str
    progress: int | None
    time: float
    evidence: tuple[str, ...] = ()
    worker: int | None = None

    @classmethod
    def from_json(cls, body: Any, where: str = "") -> Self:
        """Parse what `to_json` wrote, also before it wrote the worker."""
        return super().from_json({"worker": None, **body} if isinstance(body, dict) else body, where)


def describe(response: str, verdict: Verdict) -> str:
    """Describe the response for display."""
    if response == RESTART_PROGRAM and verdict.whole_pod:
        return "restoring the connection; a program that is still alive is re-attached"
    return DESCRIPTIONS[response]


@dataclass(frozen=True)
class PodCapabilities:
    """Possible responses on the pod. `places`: number of places for it; `restartable`: its VMs can be restarted."""

    replaceable: bool = True
    restartable: bool = False
    places: int = 1


@dataclass(frozen=True)
class Decision:
    """Response to a verdict. `reason` explains a give-up and names the key to change; empty if it is the policy."""

    response: str
    reason: str = ""
    retries_exhausted: bool = False
    """Whether the budget of preemptions is used up."""


def decide(
    verdict: Verdict, past: Sequence[Incident], progress: int | None, recovery: Recovery, possible: PodCapabilities
) -> Decision:
    """Choose the response to a verdict.

    `past` holds the incidents of the run, oldest first: a user who restarts a run resets its budgets, while the
    successor of a killed controller keeps counting. `progress` is the newest checkpoint (or step).
    """
    wanted: str = getattr(recovery.policy, verdict.kind)
    if wanted in (WAIT, GIVE_UP):
        return Decision(wanted)
    ends = [i for i, incident in enumerate(past) if incident.response == GIVE_UP]
    since = list(past[ends[-1] + 1 :] if ends else past)
    stuck = _since_last_progress(since, progress)
    if verdict.kind in INFRASTRUCTURE_KINDS:
        losses = sum(incident.kind in INFRASTRUCTURE_KINDS for incident in since)
        if losses >= recovery.max_preemptions:
            key = "raise recovery.max_preemptions, and `up` resumes from the last checkpoint"
            told = f"the pod was lost or hung more than {recovery.max_preemptions} times"
            return Decision(GIVE_UP, f"{told}; {key}", True)
    else:
        excused = INFRASTRUCTURE_KINDS | CRASH_LOOP_EXEMPT_KINDS
        failures = sum(VerdictKind(e.kind) not in excused for e in stuck)
        if failures >= recovery.max_program_failures:
            key = f"recovery.max_program_failures is {recovery.max_program_failures}"
            return Decision(GIVE_UP, key if recovery.max_program_failures else "")
    if verdict.kind not in CRASH_LOOP_EXEMPT_KINDS:
        in_vain = 1 + sum(VerdictKind(e.kind) not in CRASH_LOOP_EXEMPT_KINDS for e in stuck)
        if in_vain >= recovery.max_without_progress:
            times = f"{plural(in_vain, 'time')} in a row"
            message = f"it failed {times} without a newer checkpoint (recovery.max_without_progress)"
            return Decision(GIVE_UP, message)
    if wanted in (RESTART_PROGRAM, RESTART_WORKER) and _corrupts_again(verdict, since):
        wanted = REPLACE_NODE
    response = wanted  # or the next stronger one, if it is impossible
    # where no worker answers for the first time, try the network first, which harms no program
    maybe_network = verdict.whole_pod and not (stuck and stuck[-1].kind == VerdictKind.WORKER_LOST)
    if response == RESTART_PROGRAM and verdict.unreachable and not maybe_network:
        response = RESTART_WORKER
    if response == RESTART_WORKER and not verdict.unreachable and verdict.kind is not VerdictKind.UNHEALTHY_HOST:
        response = RESTART_PROGRAM
    if response == RESTART_WORKER and not possible.restartable:
        response = REPLACE_NODE
    if response == MOVE_ZONE and possible.places < 2:
        response = REPLACE_NODE
    if response in (REPLACE_NODE, MOVE_ZONE) and not possible.replaceable:
        return Decision(
            GIVE_UP, "an adopted pod or this machine is never replaced; recreate the pod, or set tpu.adopt=false"
        )
    return Decision(response)


def _corrupts_again(verdict: Verdict, past: Sequence[Incident]) -> bool:
    """Return whether hardware of this pod has changed bits before, on the same worker as far as that is known."""
    if verdict.kind is not VerdictKind.CORRUPTION:
        return False
    for incident in reversed(past):
        if incident.response in (REPLACE_NODE, MOVE_ZONE):
            return False
        if incident.kind == VerdictKind.CORRUPTION and None in (incident.worker, verdict.worker):
            return True
        if incident.kind == VerdictKind.CORRUPTION and incident.worker == verdict.worker:
            return True
    return False


def _since_last_progress(past: Sequence[Incident], progress: int | None) -> list[Incident]:
    """Return the latest incidents since which nothing newer was saved."""
    same: list[Incident] = []
    for incident in reversed(past):
        if progress is not None and (incident.progress is None or incident.progress < progress):
            break
        same.insert(0, incident)
    return same

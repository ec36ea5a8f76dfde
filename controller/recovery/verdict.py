"""Types of the diagnosis: what was observed, the verdict, and how an attempt ended."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from controller.agent.protocol import State
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

"""Choose the response to a verdict: pure. The config sets responses and three budgets, the pod limits the choice."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from conf.schema.run.lifecycle import Recovery
from controller.core.formats import Document
from controller.recovery.verdict import Verdict, VerdictKind

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
"""Verdicts that count against max_preemptions; all others count against max_program_failures."""
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
    since = _since_last_give_up(past)
    if verdict.kind in INFRASTRUCTURE_KINDS:
        losses = sum(episode.kind in INFRASTRUCTURE_KINDS for episode in since)
        if losses >= recovery.max_preemptions:
            key = "raise recovery.max_preemptions, and `up` resumes from the last checkpoint"
            return Decision(GIVE_UP, f"the pod was lost more than {recovery.max_preemptions} times; {key}", True)
    else:
        excused = INFRASTRUCTURE_KINDS | CRASH_LOOP_EXEMPT_KINDS
        failures = sum(VerdictKind(e.kind) not in excused for e in _since_last_progress(since, progress))
        if failures >= recovery.max_program_failures:
            key = f"recovery.max_program_failures is {recovery.max_program_failures}"
            return Decision(GIVE_UP, key if recovery.max_program_failures else "")
    if verdict.kind not in CRASH_LOOP_EXEMPT_KINDS:
        in_vain = 1 + sum(
            VerdictKind(e.kind) not in CRASH_LOOP_EXEMPT_KINDS for e in _since_last_progress(since, progress)
        )
        if in_vain >= recovery.max_without_progress:
            message = f"it failed {in_vain} times in a row without a newer checkpoint (recovery.max_without_progress)"
            return Decision(GIVE_UP, message)
    if wanted in (RESTART_PROGRAM, RESTART_WORKER) and _corrupts_again(verdict, since):
        wanted = REPLACE_NODE
    return _strongest_possible(wanted, verdict, _since_last_progress(since, progress), possible)


def _corrupts_again(verdict: Verdict, past: Sequence[Incident]) -> bool:
    """Return whether hardware of this pod has changed bits before, on the same worker as far as that is known."""
    if verdict.kind is not VerdictKind.CORRUPTION:
        return False
    for episode in reversed(past):
        if episode.response in (REPLACE_NODE, MOVE_ZONE):
            return False
        if episode.kind == VerdictKind.CORRUPTION and None in (episode.worker, verdict.worker):
            return True
        if episode.kind == VerdictKind.CORRUPTION and episode.worker == verdict.worker:
            return True
    return False


def _strongest_possible(wanted: str, verdict: Verdict, past: Sequence[Incident], possible: PodCapabilities) -> Decision:
    """Escalate to the next stronger response if the wanted one is impossible."""
    response = wanted
    if response == RESTART_PROGRAM and verdict.unreachable and not _maybe_unreachable_pod(verdict, past):
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


def _maybe_unreachable_pod(verdict: Verdict, past: Sequence[Incident]) -> bool:
    """Return whether no worker answers for the first time; then try the network first, which harms no program."""
    return verdict.whole_pod and not (past and past[-1].kind == VerdictKind.WORKER_LOST)


def _since_last_give_up(past: Sequence[Incident]) -> list[Incident]:
    ends = [i for i, episode in enumerate(past) if episode.response == GIVE_UP]
    return list(past[ends[-1] + 1 :] if ends else past)


def _since_last_progress(past: Sequence[Incident], progress: int | None) -> list[Incident]:
    """Return the latest incidents since which nothing newer was saved."""
    same: list[Incident] = []
    for episode in reversed(past):
        if progress is not None and (episode.progress is None or episode.progress < progress):
            break
        same.insert(0, episode)
    return same

"""Machines: the workers of a pod, with SSH, the agent and the watchdog; and this machine in place of a pod.

Each resource has one value per worker, and an unreachable worker is a value too. Only workers that differ are changed,
all at once.

For `cloud=here` this machine is always there, never created, changed or deleted.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Self

from controller.agent.protocol import (
    OBSERVE,
    SET_WATCHDOG,
    TIDY,
    WATCHDOG_STATE,
    A,
    Command,
    Observation,
    ObserveRequest,
    Q,
)
from controller.agent.watchdog_protocol import SetWatchdogRequest
from controller.agent.worker_processes import boot_id
from controller.context import Context
from controller.core.text import plural
from controller.gcp.google_errors import GoogleError
from controller.reconcile import Absent, Diff, ObservedResources, Resource, Scope
from controller.resources.pod.node import Node
from controller.resources.pod.provisioner import Endpoint, PodStatus, SliceStatus, pod_object
from controller.ssh.fleet import DiskFullError, Fleet, SshTarget, WorkerError, WorkersFailedError, failures


@dataclass(frozen=True, kw_only=True)
class WorkerResource(Resource):
    """A resource that every worker of a node has."""

    scope: ClassVar[Scope] = "pod"
    node: str = field(compare=False)

    def fleet(self, context: Context, observed: ObservedResources) -> Fleet:
        return observed[self.node].fleet(context)

    def observe_workers(
        self, context: Context, observed: ObservedResources, read: Callable[[Observation], Any], **payload: Any
    ) -> tuple[Any, ...]:
        """Apply `read` to every worker's observation; a worker that does not answer yields its error."""
        question: Any = payload
        answers = self.fleet(context, observed).observe(self.id, question)
        return tuple(read(a) if isinstance(a, dict) else str(a) for a in answers)

    def apply_to_workers(
        self, context: Context, observed: ObservedResources, command: Command[Q, A], payload: Q, diff: Diff
    ) -> list[A]:
        """Send `command` to the workers that differ; return their answers. Raises WorkersFailedError."""
        [change] = diff.changes  # the only compared field has a value per worker
        old = change.old or (None,) * len(change.new)
        differing = [i for i, (was, wanted) in enumerate(zip(old, change.new, strict=True)) if was != wanted]
        answers = self.fleet(context, observed).call_all(command, payload, workers=differing)
        return require_answers(answers, f"{self.title}: {command}")

    def ask(
        self, context: Context, observed: ObservedResources, command: Command[Q, A], payload: Q | Sequence[Q]
    ) -> list[A]:
        """Send `command` to every worker, with one payload for all or one for each; return their answers.

        Raises WorkersFailedError if a worker has none.
        """
        return require_answers(self.fleet(context, observed).call_all(command, payload), self.title)


def require_answers(answers: Sequence[A | WorkerError], what: str) -> list[A]:
    """Return the answers. Raises WorkersFailedError, which says what failed on which workers, if one is an error."""
    if failed := failures(answers):
        said: dict[str, list[str]] = {}
        for error in failed:
            said.setdefault(error.message, []).append(str(error.worker))
        reasons = "; ".join(f"worker {', '.join(who)}: {message}" for message, who in said.items())
        raise WorkersFailedError(f"{what} failed: {reasons}", failed)
    return [answer for answer in answers if not isinstance(answer, WorkerError)]


def active_runs(answers: Iterable[Observation | WorkerError]) -> set[str]:
    """Return the runs whose program is alive, from the workers' answers to `observe`; errors count as none."""
    return {a["active"]["run_id"] for a in answers if isinstance(a, dict) and a["active"]}


OBSERVE_SECONDS = 5.0
"""Interval at which Google is asked whether the pod still exists while workers do not answer."""


@dataclass(frozen=True, kw_only=True)
class SshAccess(WorkerResource):
    """Every worker answers over SSH with the host key that Google reports, and has this version of the agent."""

    kind: ClassVar[str] = "ssh"
    probe_payload: ObserveRequest = field(compare=False)
    """Question that later resources ask every worker, sent here once for all of them."""
    here: bool = field(default=False, compare=False)
    """Whether the worker is this machine, which needs no SSH."""
    reachable: tuple[str, ...]

    @property
    def title(self) -> str:
        if self.here:
            return "agent on this machine"
        return f"SSH to {plural(len(self.reachable), 'worker')}"

    def observe(self, context: Context, observed: ObservedResources) -> Absent | Self:
        if not observed[self.node].accepts_our_key(context):
            return Absent()
        answers = self.fleet(context, observed).prefetch(self.probe_payload)
        return replace(self, reachable=tuple("yes" if isinstance(a, dict) else str(a) for a in answers))

    def apply(self, context: Context, observed: ObservedResources, diff: Diff) -> None:
        self.authorize_key(context, observed[self.node])
        require_answers(
            self.fleet(context, observed).warm_up(partial(_pod_is_gone, context, observed[self.node], [])), self.title
        )

    def authorize_key(self, context: Context, node: Node) -> None:
        """Authorize our key on the workers, as the pod may have been created by someone else."""
        if not node.accepts_our_key(context):
            context.ssh_login.authorize(node.vms(context))


def _pod_is_gone(context: Context, node: Node, looks: list[float]) -> bool:
    """Return whether the pod is no longer READY, which ends the wait. `looks` holds the times of earlier queries."""
    now = context.clock.monotonic()
    if looks and now - looks[-1] < OBSERVE_SECONDS:
        return False
    looks.append(now)
    try:
        current = node.pod_seen(context)
    except GoogleError:
        return False
    return not current.is_usable


@dataclass(frozen=True, kw_only=True)
class Watchdog(WorkerResource):
    """A running watchdog. Its orders are not compared but sent at each launch, as another run may have the pod."""

    kind: ClassVar[str] = "watchdog"
    bucket: str = field(compare=False)
    idle_seconds: float | None = field(compare=False)
    running: bool = True

    @property
    def title(self) -> str:
        if self.idle_seconds is None:
            return "watchdog: heartbeat, and the end of the budget"
        return f"watchdog: the pod deletes itself after {self.idle_seconds / 60:g} idle minutes"

    def observe(self, context: Context, observed: ObservedResources) -> Absent | Self:
        [answer] = self.fleet(context, observed).call_all(WATCHDOG_STATE, {}, workers=[0])
        return self if isinstance(answer, dict) and answer["running"] else Absent()

    def apply(self, context: Context, observed: ObservedResources, diff: Diff) -> None:
        self.update_limits(context, observed[self.node], None)

    def update_limits(self, context: Context, node: Node, seconds_left: float | None) -> None:
        """Replace the watchdog's orders and restart the idle timer.

        Raises WorkersFailedError if the orders did not reach worker 0.

        Args:
            context: the run's context.
            node: the pod.
            seconds_left: until the watchdog deletes the pod, whatever runs; None: never.
        """
        permission = node.plane.delete_permission(node.place.provisioner)
        payload: SetWatchdogRequest = {
            "project": context.project,
            "deletes": node.plane.deletions(context, node.name, node.place.zone),
            "delete_permission": permission,
            "projects_api": context.google.root("cloudresourcemanager"),
            "idle_seconds": self.idle_seconds,
            "seconds_left": seconds_left,
            "bucket": self.bucket,
            "note_object": pod_object("ends", node.name, node.status.uid),
        }
        [answer] = require_answers(node.fleet(context).call_all(SET_WATCHDOG, payload, workers=[0]), self.title)
        if answer["allowed"] is False:
            message = (
                "the pod cannot delete itself yet: Google takes up to seven minutes to see a new role. If it stays so, "
                f"grant the workers' service account {permission} (docs/costs.md), or set cleanup.idle_minutes=null "
                "and cleanup.heartbeat_timeout_hours=null"
            )
            context.events.note(self.id, message)


TIDY_STATE = "tidy"


@dataclass(frozen=True, kw_only=True)
class WorkerHygiene(WorkerResource):
    """No stale TPU lock, no process of an earlier attempt, huge pages where possible, and free disk space."""

    kind: ClassVar[str] = "tidied"
    min_free_gb: float = field(compare=False)
    here: bool = field(default=False, compare=False)
    state: tuple[str, ...]

    @property
    def title(self) -> str:
        return f"tidy {plural(len(self.state), 'worker')}: locks, leftover processes, disk space"

    def observe(self, context: Context, observed: ObservedResources) -> Self:
        return replace(self, state=self.observe_workers(context, observed, self._state))

    def apply(self, context: Context, observed: ObservedResources, diff: Diff) -> None:
        for worker, answer in enumerate(self.ask(context, observed, TIDY, {})):
            for message in (*answer["done"], *answer["not_done"]):
                context.events.note(self.id, f"worker {worker}: {message}")
        looks = self.ask(context, observed, OBSERVE, {})
        full = [(worker, look["free_gb"]) for worker, look in enumerate(looks) if self._is_full(look)]
        if full:
            listed = "; ".join(f"worker {worker} has {free:.1f} GB free" for worker, free in full)
            fresh = "" if self.here else "run `slipway down` to get fresh disks, "
            raise DiskFullError(
                f"env.min_free_gb: {listed}, but {self.min_free_gb:g} GB are required; free some space, {fresh}or "
                "lower the key",
                [WorkerError(worker, "", "agent", f"{free:.1f} GB free") for worker, free in full],
            )

    def _state(self, answer: Observation) -> str:
        message = [*answer["untidy"], *([f"{answer['free_gb']:.1f} GB free"] if self._is_full(answer) else [])]
        return "; ".join(message) or TIDY_STATE

    def _is_full(self, answer: Observation) -> bool:
        """Return whether the disk is too full; never while a program runs, which may fill its disk."""
        return answer["active"] is None and answer["free_gb"] < self.min_free_gb


NOUNS = {"cpu": "virtual CPU device", "gpu": "GPU", "tpu": "TPU device"}


@dataclass(frozen=True, kw_only=True)
class ThisMachine(Node):
    """This machine since its last boot, as a pod of one worker that is READY."""

    @property
    def title(self) -> str:
        backend, _, devices = self.spec.accelerator_type.rpartition("-")
        return f"this machine: {plural(int(devices), NOUNS[backend])}"

    def observe(self, context: Context, observed: ObservedResources) -> Self:
        return self.find(context)

    def find(self, context: Context, uids: Collection[str] = (), *, surely: bool = False) -> Self:
        return replace(self, status=self._status())

    def _status(self) -> SliceStatus:
        return SliceStatus(
            spec=self.spec,
            place=self.places[0],
            state="READY",
            uid=boot_id(),
            endpoints=(Endpoint(0, "127.0.0.1", None),),
        )

    def diff(self, current: Any) -> Diff:
        return Diff("create") if isinstance(current, Absent) else Diff("none")

    def apply(self, context: Context, observed: ObservedResources, diff: Diff) -> None:
        raise AssertionError("this machine never differs")

    def pod_seen(self, context: Context, since: float = 0.0) -> PodStatus:
        return self._status().pod_seen(self.status.uid, since)

    def may_be(self, status: SliceStatus) -> bool:
        return False

    def ssh_target(self, context: Context) -> SshTarget:
        return SshTarget(self.name, self.vms(context), self.status.uid, "", "", (), (("127.0.0.1", None),))

    def accepts_our_key(self, context: Context) -> bool:
        return True

    def destroy(self, context: Context) -> None:
        return

    def delete_all(self, context: Context, *, elsewhere: bool = False) -> None:
        return

    @property
    def cannot_stop(self) -> str:
        return "cloud=here: Slipway does not stop the machine that it runs on"

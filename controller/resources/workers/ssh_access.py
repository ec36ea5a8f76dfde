"""SSH to every worker of the pod."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, Self

from controller.agent.protocol import ObserveRequest
from controller.context import Context
from controller.core.text import plural
from controller.gcp.errors import GoogleError
from controller.reconcile.resource import Absent, Diff, ObservedResources
from controller.resources.pod.node import Node
from controller.resources.workers.base import WorkerResource, raise_failures

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
        raise_failures(
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

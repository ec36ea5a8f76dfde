"""Base class of resources on the workers of a pod, with one value per worker.

An unreachable worker is a value too. Only workers that differ are changed, all at once.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from controller.agent.protocol import A, Command, Observation, Q
from controller.context import Context
from controller.reconcile.resource import Diff, ObservedResources, Resource, Scope
from controller.ssh.fleet import Fleet, WorkerError, WorkersFailedError, failures


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
        self, context: Context, observed: ObservedResources, command: Command[Q, A], payload: Q, diff: Diff, name: str
    ) -> list[A]:
        """Send `command` to the workers on which `name` differs; return their answers. Raises WorkersFailedError."""
        change = next(c for c in diff.changes if c.field == name)
        old = change.old or (None,) * len(change.new)
        differing = [i for i, (was, wanted) in enumerate(zip(old, change.new, strict=True)) if was != wanted]
        answers = self.fleet(context, observed).call_all(command, payload, workers=differing)
        raise_failures(answers, f"{self.title}: {command}")
        return [a for a in answers if not isinstance(a, WorkerError)]


def raise_failures(answers: Sequence[object], what: str) -> None:
    if failed := failures(answers):
        said: dict[str, list[str]] = {}
        for error in failed:
            said.setdefault(error.message, []).append(str(error.worker))
        reasons = "; ".join(f"worker {', '.join(who)}: {message}" for message, who in said.items())
        raise WorkersFailedError(f"{what} failed: {reasons}", failed)


def active_runs(answers: Iterable[Observation | WorkerError]) -> set[str]:
    """Return the runs whose program is alive, from the workers' answers to `observe`; errors count as none."""
    return {a["active"]["run_id"] for a in answers if isinstance(a, dict) and a["active"]}

"""run.yaml and the program's environment on every worker."""

import hashlib
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from controller.agent.protocol import WRITE_CONFIG, WriteConfigRequest
from controller.context import Context
from controller.core.text import plural
from controller.reconcile.resource import Diff, ObservedResources
from controller.resources.workers.base import WorkerResource


@dataclass(frozen=True, kw_only=True)
class RunConfig(WorkerResource):
    """run.yaml and the program's environment, byte for byte the same on every worker."""

    kind: ClassVar[str] = "run config"
    text: str = field(compare=False)
    variables: tuple[tuple[str, str], ...] = field(compare=False)
    sha256: tuple[str, ...]

    @classmethod
    def for_workers(cls, run_id: str, text: str, variables: dict[str, str], workers: int, **placing: Any) -> Self:
        sha256 = hashlib.sha256(text.encode()).hexdigest()
        pairs = tuple(sorted(variables.items()))
        return cls(name=run_id, text=text, variables=pairs, sha256=(sha256,) * workers, **placing)

    @property
    def title(self) -> str:
        return f"run.yaml on {plural(len(self.sha256), 'worker')}"

    def observe(self, context: Context, observed: ObservedResources) -> Self:
        return replace(self, sha256=self.observe_workers(context, observed, lambda a: a["config"], run_id=self.name))

    def apply(self, context: Context, observed: ObservedResources, diff: Diff) -> None:
        payload: WriteConfigRequest = {"run_id": self.name, "text": self.text, "env": dict(self.variables)}
        self.apply_to_workers(context, observed, WRITE_CONFIG, payload, diff, "sha256")

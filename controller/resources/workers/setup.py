"""Setup commands that run once on each worker before the program: `program.setup`."""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from conf.schema.config import digest
from controller.agent.protocol import RUN_SETUP, RunSetupRequest
from controller.context import Context
from controller.core.errors import WorkersDisagreeError
from controller.core.text import plural
from controller.inputs.secrets import Vault
from controller.reconcile.resource import Diff, ObservedResources
from controller.resources.workers.base import WorkerResource
from controller.ssh.fleet import WorkersFailedError


@dataclass(frozen=True, kw_only=True)
class Setup(WorkerResource):
    """Setup commands that have run on each worker with the same arguments, code and venv."""

    kind: ClassVar[str] = "setup"
    commands: tuple[tuple[str, ...], ...] = field(compare=False)
    code: str = field(compare=False)
    venv: str = field(compare=False)
    vault: Vault = field(compare=False, repr=False)
    done: tuple[str, ...]

    @classmethod
    def for_workers(cls, run_id: str, commands: Any, code: str, venv: str, workers: int, **placing: Any) -> Self:
        key = digest([commands, code, venv])
        return cls(name=run_id, commands=commands, code=code, venv=venv, done=(key,) * workers, **placing)

    @property
    def title(self) -> str:
        return f"setup: {plural(len(self.commands), 'command')} on {plural(len(self.done), 'worker')}"

    def observe(self, context: Context, observed: ObservedResources) -> Self:
        current = self.observe_workers(
            context, observed, lambda a: (a["setup"], a["venv"]), run_id=self.name, venv=self.venv
        )
        done = tuple(pair[0] if isinstance(pair, tuple) else pair for pair in current)
        if done == self.done:
            _refuse_differences([pair[1]["versions"] for pair in current])
        return replace(self, done=done)

    def apply(self, context: Context, observed: ObservedResources, diff: Diff) -> None:
        payload: RunSetupRequest = {
            "run_id": self.name,
            "key": self.done[0],
            "commands": [list(argv) for argv in self.commands],
            "code": self.code,
            "venv": self.venv,
            "secrets": self.vault.values(),
        }
        try:
            self.apply_to_workers(context, observed, RUN_SETUP, payload, diff, "done")
        except WorkersFailedError as failed:
            first = failed.errors[0]
            raise WorkersFailedError(
                f"worker {first.worker} printed:\n{first.detail.rstrip()}\n{failed}", failed.errors
            ) from None


def _refuse_differences(versions: list[dict[str, str]]) -> None:
    """Reject different package versions: such workers would compute different things, or hang."""
    for worker, found in enumerate(versions):
        if found != versions[0]:
            name = min(found.items() ^ versions[0].items())[0]
            here, there = found.get(name, "none"), versions[0].get(name, "none")
            message = f"{name} is {here} on worker {worker} and {there} on worker 0; pin its version in program.setup"
            raise WorkersDisagreeError(message)

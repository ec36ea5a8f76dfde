"""What a program needs on every worker: the code, its packages, run.yaml, and what `program.setup` prepares."""

import hashlib
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self, TypedDict

from conf.schema.config import digest
from conf.schema.program import Program
from controller.agent.protocol import (
    INSTALL_CODE,
    INSTALL_VENV,
    RUN_SETUP,
    WRITE_CONFIG,
    InstallCodeRequest,
    InstallVenvRequest,
    RunSetupRequest,
    VenvState,
    WriteConfigRequest,
)
from controller.context import Context
from controller.core.errors import WorkersDisagreeError
from controller.core.json_documents import DamagedRecordError, dump, load, type_problem
from controller.core.text import is_folder, plural
from controller.gcp.google_errors import ConflictError
from controller.inputs.env_inputs import Vault
from controller.reconcile import Diff, ObservedResources
from controller.resources.machines import WorkerResource
from controller.resources.uploads.archives import CodeArchive
from controller.ssh.fleet import WorkersFailedError


@dataclass(frozen=True, kw_only=True)
class WorkerCode(WorkerResource):
    """Unpacked code, hashed at every observation, so that a single altered byte shows."""

    kind: ClassVar[str] = "worker code"
    archive: CodeArchive = field(compare=False)
    tree: tuple[str, ...]

    @property
    def title(self) -> str:
        return f"code on {plural(len(self.tree), 'worker')}"

    def observe(self, context: Context, observed: ObservedResources) -> Self:
        return replace(self, tree=self.observe_workers(context, observed, lambda a: a["code"], code=self.name))

    def apply(self, context: Context, observed: ObservedResources, diff: Diff) -> None:
        payload: InstallCodeRequest = {
            "bucket": self.archive.bucket,
            "object": self.archive.object,
            "sha256": self.archive.snapshot.archive_sha256,
            "tree": self.name,
        }
        self.apply_to_workers(context, observed, INSTALL_CODE, payload, diff)


@dataclass(frozen=True, kw_only=True)
class Venv(WorkerResource):
    """A venv from a lock, from a requirements file or from the image's packages, or none.

    A requirements file leaves versions open. The versions that the first worker got are recorded in the bucket, and all
    other workers get the same, then and later.
    """

    kind: ClassVar[str] = "venv"
    packages: str = field(compare=False)
    python: str = field(compare=False)
    requirements: str = field(compare=False)
    bucket: str = field(compare=False)
    vault: Vault = field(compare=False, repr=False)
    wheels: str | None = field(default=None, compare=False)
    intact: tuple[bool, ...]

    @property
    def title(self) -> str:
        count = sum(1 for line in self.requirements.splitlines() if line[:1].isalnum())
        here = is_folder(self.bucket)
        kinds = {
            "none": "no venv: the Python that runs Slipway" if here else "no venv: the image's Python",
            "image": "venv: Python with the packages of this one" if here else "venv: Python with the image's packages",
            "lock": f"venv: Python with {count} packages",
            "requirements": f"venv: Python with {count} requirements" if count else "venv: empty",
        }
        return kinds[self.packages]

    def observe(self, context: Context, observed: ObservedResources) -> Self:
        if self.packages == "none":
            return self
        frozen = self._recorded_versions(context)
        return replace(
            self, intact=self.observe_workers(context, observed, lambda a: _intact(a["venv"], frozen), venv=self.name)
        )

    def apply(self, context: Context, observed: ObservedResources, diff: Diff) -> None:
        frozen = self._recorded_versions(context)
        payload: InstallVenvRequest = {
            "packages": self.packages,
            "fingerprint": self.name,
            "python": self.python,
            "requirements": self.requirements,
            "constraints": frozen,
            "wheels": list(observed[self.wheels].built) if self.wheels else [],
            "secrets": self.vault.values() if self.packages == "requirements" else {},
        }
        made = self.apply_to_workers(context, observed, INSTALL_VENV, payload, diff)
        if self.packages == "requirements" and frozen is None:
            text = dump({"packages": dict(sorted(made[0]["installed"].items()))}, indent=1)
            try:
                context.google.upload(self.bucket, self._record, text.encode(), generation=0)
            except ConflictError:
                return  # another controller was faster; the next observation compares with its record

    @property
    def _record(self) -> str:
        return f"venvs/{self.name}.json"

    def _recorded_versions(self, context: Context) -> dict[str, str] | None:
        """Return the recorded versions by name; None if there is no record yet, or a lock makes it unnecessary."""
        if self.packages != "requirements":
            return None
        if (content := context.google.read(self.bucket, self._record)) is None:
            return None
        body = load(content, self._record)
        if problem := type_problem(body, VenvKeys, "it"):
            raise DamagedRecordError(f"gs://{self.bucket}/{self._record} is damaged: {problem}; delete it")
        return body["packages"]


class VenvKeys(TypedDict):
    """The record of what a venv without a lock has installed."""

    packages: dict[str, str]


def fingerprint(packages: str, python: str, requirements: str, program: Program, wheels: str | None) -> str:
    """Return the venv's name on a worker. Setup commands may install packages, so such a venv is not shared."""
    setup = digest(program.setup)[:12] if program.setup else ""
    if packages == "none":
        return "none"
    if packages == "image":
        return f"image-{setup}" if setup else "image"
    further = [part for part in (wheels, setup) if part]
    return hashlib.sha256("\n".join([python, requirements, *further]).encode()).hexdigest()


def _intact(venv: VenvState | None, frozen: dict[str, str] | None) -> bool:
    return venv is not None and venv["ok"] and frozen in (None, venv["installed"])


@dataclass(frozen=True, kw_only=True)
class RunConfig(WorkerResource):
    """run.yaml and the program's environment, byte for byte the same on every worker."""

    kind: ClassVar[str] = "run config"
    text: str = field(compare=False)
    variables: tuple[tuple[str, str], ...] = field(compare=False)
    sha256: tuple[str, ...]

    @property
    def title(self) -> str:
        return f"run.yaml on {plural(len(self.sha256), 'worker')}"

    def observe(self, context: Context, observed: ObservedResources) -> Self:
        return replace(self, sha256=self.observe_workers(context, observed, lambda a: a["config"], run_id=self.name))

    def apply(self, context: Context, observed: ObservedResources, diff: Diff) -> None:
        payload: WriteConfigRequest = {"run_id": self.name, "text": self.text, "env": dict(self.variables)}
        self.apply_to_workers(context, observed, WRITE_CONFIG, payload, diff)


@dataclass(frozen=True, kw_only=True)
class Setup(WorkerResource):
    """Setup commands that have run on each worker with the same arguments, code and venv."""

    kind: ClassVar[str] = "setup"
    commands: tuple[tuple[str, ...], ...] = field(compare=False)
    code: str = field(compare=False)
    venv: str = field(compare=False)
    vault: Vault = field(compare=False, repr=False)
    done: tuple[str, ...]

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
            self.apply_to_workers(context, observed, RUN_SETUP, payload, diff)
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

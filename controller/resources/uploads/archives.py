"""What a program needs besides data, before a TPU is billed: its secrets, the code archive, wheels from git.

Wheels are built on this machine: it has the keys of the repositories, the workers do not.
"""

import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self, TypedDict

from controller.context import Context
from controller.core.errors import CloudError, ConfigError
from controller.core.finding import Finding, Rule
from controller.core.json_documents import DamagedRecordError, dump, load, type_problem
from controller.core.text import is_folder
from controller.gcp.google_errors import ConflictError
from controller.inputs.code import CodeSnapshot
from controller.inputs.env_inputs import GitRequirement, Vault
from controller.inputs.git import clone, strip_password
from controller.reconcile import Absent, Diff, ObservedResources, Resource, Scope, Unknown


@dataclass(frozen=True, kw_only=True)
class Secrets(Resource):
    """All secrets of the run, in the places that the config names. Nothing is created: the stores are the user's."""

    kind: ClassVar[str] = "secrets"
    scope: ClassVar[Scope] = "run"
    vault: Vault = field(compare=False, repr=False)

    @property
    def title(self) -> str:
        return f"secrets {', '.join(self.vault.names)}"

    def observe(self, context: Context, observed: ObservedResources) -> Unknown | Self:
        try:
            self.vault.load(context.google)
        except ConfigError as error:
            return Unknown(str(error))
        return self

    def apply(self, context: Context, observed: ObservedResources, diff: Diff) -> None:
        """Do nothing: secrets never differ."""


@dataclass(frozen=True, kw_only=True)
class CodeArchive(Resource):
    """Archive of the code. The object never changes: its name is the hash of the tree inside."""

    kind: ClassVar[str] = "code"
    scope: ClassVar[Scope] = "run"
    bucket: str = field(compare=False)
    snapshot: CodeSnapshot = field(compare=False)

    @property
    def title(self) -> str:
        where = "folder" if is_folder(self.bucket) else "bucket"
        return f"code {self.name[:12]} in the {where} ({self.snapshot.size})"

    @property
    def object(self) -> str:
        return f"code/{self.name}.tar.gz"

    def observe(self, context: Context, observed: ObservedResources) -> Absent | Self:
        found = context.google.find("storage", "objects.get", bucket=self.bucket, object=self.object)
        return Absent() if found is None else self

    def apply(self, context: Context, observed: ObservedResources, diff: Diff) -> None:
        try:
            context.google.upload(self.bucket, self.object, self.snapshot.archive, generation=0)
        except ConflictError:
            return  # someone uploaded the same bytes meanwhile


GIT_PIN = Rule(
    "git_pin", ("warning",), ("env.requirements",),
    "A wheel is built once from a git requirement and then reused, so without a commit it soon becomes outdated.",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Wheels(Resource):
    """Wheels of some requirement lines and `manifest.json` in the bucket, named after the lines: each is built once."""

    kind: ClassVar[str] = "wheels"
    scope: ClassVar[Scope] = "run"
    bucket: str = field(compare=False)
    python: str = field(compare=False)
    lines: tuple[GitRequirement, ...] = field(compare=False)
    # set only when observed
    built: tuple[dict[str, str], ...] = field(default=(), compare=False)

    @property
    def _asset_manifest(self) -> str:
        return f"wheels/{self.name}/manifest.json"

    @property
    def title(self) -> str:
        return f"wheels of {len(self.lines)} git repositories in the bucket"

    def observe(self, context: Context, observed: ObservedResources) -> Absent | Self:
        if (content := context.google.read(self.bucket, self._asset_manifest)) is None:
            return Absent()
        manifest = load(content, self._asset_manifest)
        if problem := type_problem(manifest, WheelsKeys, "it"):
            where = f"gs://{self.bucket}/{self._asset_manifest}"
            raise DamagedRecordError(f"{where} is damaged: {problem}; delete it, and they are built again")
        return replace(self, built=tuple(manifest["wheels"]))

    def apply(self, context: Context, observed: ObservedResources, diff: Diff) -> None:
        built: list[dict[str, str]] = []
        with tempfile.TemporaryDirectory() as folder:
            for number, line in enumerate(self.lines):
                place = Path(folder) / str(number)
                wheel, commit = build_wheel(line, place, self.python)
                entry = {
                    "bucket": self.bucket,
                    "object": f"wheels/{self.name}/{wheel.name}",
                    "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
                    "name": wheel.name,
                    "before": wheel.name.partition("-")[0].replace("_", "-").lower() + line.extras,
                    "after": line.marker,
                    "commit": commit,
                }
                context.google.upload(self.bucket, entry["object"], wheel.read_bytes())
                built.append(entry)
        context.google.upload(self.bucket, self._asset_manifest, dump({"wheels": built}, indent=1).encode())

    def findings(self, current: Any) -> Iterator[Finding]:
        for line in self.lines:
            if not line.pinned:
                message = f"{strip_password(line.url)} is built once and then reused; append @COMMIT to the line"
                yield GIT_PIN.finding(message)


class WheelsKeys(TypedDict):
    """Keys of the manifest of wheels."""

    wheels: list[dict[str, str]]


def build_wheel(line: GitRequirement, folder: Path, python: str) -> tuple[Path, str]:
    """Clone and build one line; returns the wheel and the commit.

    Raises:
        ConfigError: there is no such repository or commit, or the wheel only fits this machine.
        CloudError: the build failed.
    """
    source, out = folder / "source", folder / "out"
    source.mkdir(parents=True)
    commit = clone(line.url, line.ref, source, "env.requirements")
    beside = Path(sys.executable).with_name("uv")  # the uv that Slipway depends on
    argv = [
        str(beside) if beside.exists() else "uv",
        "build",
        "--quiet",
        "--wheel",
        "--no-config",
        f"--out-dir={out}",
        str(source / line.subdirectory),
    ]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        tail = "\n".join(done.stderr.splitlines()[-12:])
        raise CloudError(f"env.requirements: cannot build a wheel of {strip_password(line.url)}:\n{tail}")
    [wheel] = out.glob("*.whl")
    tags = wheel.stem.split("-")[-3:]
    fits = tags[2] == "any" or (tags[2].endswith("linux_x86_64") and f"cp{''.join(python.split('.')[:2])}" in tags)
    if not fits:
        message = "install it with program.setup, from an index or from the shipped code"
        raise ConfigError(f"env.requirements: {wheel.name} has compiled code that cannot run on the workers; {message}")
    return wheel, commit

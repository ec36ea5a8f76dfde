"""The program on the workers, its code and its Python."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StringConstraints, field_validator, model_validator

from conf.reference import Reference
from conf.schema.base import VOLATILE, LocalPath, Strict, check_home
from conf.schema.topology import Topology, tpu_type_table

EnvName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
SecretSource = Annotated[
    str,
    StringConstraints(
        pattern=r"^(env|env:[A-Za-z_][A-Za-z0-9_]*|file:.+|"
        r"secretmanager:projects/[a-z0-9.:-]+/secrets/[A-Za-z0-9_-]+(/versions/[A-Za-z0-9_-]+)?)$"
    ),
    AfterValidator(check_home),
]
"""Source of a secret; never the secret itself, because the config is recorded."""


class Devices(Strict):
    """Devices that a program is written for. A slice that does not have them is an error before anything is created."""

    exactly: int | None = Field(default=None, ge=1, description="JAX devices in the slice. null: any number.")
    at_least: int | None = Field(default=None, ge=1, description="Fewest JAX devices in the slice. null: any number.")
    multiple_of: int | None = Field(default=None, ge=1, description="Their number must be a multiple. null: of 1.")
    workers: int | None = Field(default=None, ge=1, description="VMs in the slice. null: any number.")
    generations: tuple[str, ...] = Field(default=(), description="TPU generations, e.g. [v5e, v6e]. []: any.")

    @field_validator("generations")
    @classmethod
    def _known(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        known = tpu_type_table()["generations"]
        if unknown := [name for name in value if name not in known]:
            raise ValueError(f"unknown generation {unknown[0]!r}; choices: {', '.join(known)}")
        return value

    def misfit(self, slice_: Topology) -> str:
        """Return what the program needs and the slice lacks; empty if it fits."""
        count, needs = slice_.devices, list[str]()
        if self.exactly is not None and count != self.exactly:
            needs.append(f"exactly {self.exactly} devices")
        if self.at_least is not None and count < self.at_least:
            needs.append(f"at least {self.at_least} devices")
        if self.multiple_of is not None and count % self.multiple_of:
            needs.append(f"a multiple of {self.multiple_of} devices")
        if self.workers is not None and slice_.workers != self.workers:
            needs.append(f"{self.workers} {'VM' if self.workers == 1 else 'VMs'}")
        if self.generations and slice_.generation not in self.generations:
            needs.append(" or ".join(self.generations))
        return " and ".join(needs)


ExitMeaning = Literal[
    "worker_lost",
    "unhealthy_host",
    "corruption",
    "out_of_hbm",
    "out_of_ram",
    "disk_full",
    "device_mismatch",
    "workers_disagree",
]
"""Verdicts that a program may tell by its exit code (docs/recovery.md)."""


class Program(Strict):
    kind: Literal["trainer", "command"]
    command: tuple[str, ...] = Field(description="Command of program=command (list of words), for every worker.")
    setup: tuple[tuple[str, ...], ...] = Field(
        description="Commands to run once per worker before it, in the venv and the run's copy of the code."
    )
    devices: Annotated[Devices | None, VOLATILE] = Field(
        default=None, description="Devices that the program is written for. null: any."
    )

    exit_codes: Annotated[dict[Annotated[int, Field(ge=1, le=255)], ExitMeaning], VOLATILE] = Field(
        default_factory=dict,
        description="Verdicts that the program of program=command tells by its exit code, e.g. {33: worker_lost}. Any "
        "other code but 0 and 75 is a program_error.",
    )
    caution: Annotated[str | None, VOLATILE] = Field(
        default=None,
        min_length=1,
        description="Why program=command is not expected to finish, and what takes its place: a warning of `plan`, and "
        "`up` asks before it starts. null: nothing known.",
    )
    endless: Annotated[bool, VOLATILE] = Field(
        default=False, description="Whether program=command never ends by itself; it then needs a limit of the budget."
    )
    needs_chips: Annotated[bool, VOLATILE] = Field(
        description="false: the program of program=command leaves the TPU chips alone, so `up` does not look at them."
    )

    @field_validator("setup")
    @classmethod
    def commands(cls, value: tuple[tuple[str, ...], ...]) -> tuple[tuple[str, ...], ...]:
        if not all(argv and argv[0] for argv in value):
            raise ValueError("each command must be a nonempty list of words, such as [pip, install, -e, .]")
        return value

    @model_validator(mode="after")
    def trainer_is_fixed(self) -> "Program":
        if self.kind == "trainer" and not self.needs_chips:
            raise ValueError("program.needs_chips: must be true, because the bundled trainer needs the chips")
        if self.kind == "trainer" and self.exit_codes:
            raise ValueError("program.exit_codes: is for program=command; those of the bundled trainer are fixed")
        return self


class Repository(Strict):
    """A git repository to ship in place of the one that contains the current folder."""

    url: Annotated[str, StringConstraints(pattern=r"^(https?://|ssh://|git@|file://|/)[^\s-]\S*$")]
    commit: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{40}$")] = Field(
        description="Full commit ID, so that the config always ships the same code."
    )


class Code(Strict):
    max_mb: Annotated[float, VOLATILE] = Field(gt=0, description="Largest code archive that may be shipped, in MB.")
    exclude: Annotated[tuple[str, ...], VOLATILE] = Field(
        description="Patterns as in .gitignore. Matching files are never shipped or recorded, even if tracked."
    )
    repository: Annotated[Repository | None, VOLATILE] = Field(
        description="Git repository to ship, at a fixed commit. null: the one that contains the current folder."
    )
    modules: Annotated[tuple[LocalPath, ...], VOLATILE] = Field(
        description="Folders whose Python files are shipped beside the bundled trainer, where module:name finds them."
    )
    checks: Annotated[tuple[Reference, ...], VOLATILE] = Field(
        description="module:name of functions of your own that find mistakes in a config (docs/extend.md)."
    )
    resources: Annotated[tuple[Reference, ...], VOLATILE] = Field(
        description="module:name of classes of your own: steps of the plan before the pod (docs/extend.md)."
    )
    stand_in: bool = Field(description="Ship Slipway's small stand-ins for the guides' programs. Used by scale=tiny.")


class Env(Strict):
    """The workers' Python and environment variables."""

    python: Annotated[str, StringConstraints(pattern=r"^3\.\d+(\.\d+)?$")] = Field(description="Version for uv venv.")
    packages: Literal["lock", "image", "requirements", "none"] = Field(
        description="lock: Slipway's pinned, hashed requirements. requirements: your file. image: a venv with the "
        "worker's own Python packages. none: no venv."
    )
    requirements: str | None = Field(
        description="File for packages=requirements, relative to the shipped repository. null: an empty venv, to be "
        "filled by program.setup."
    )
    vars: dict[EnvName, str] = Field(
        description="Environment of the program. {bucket}, {run_dir} and {assets.models.NAME} are expanded. Recorded, "
        "so put secrets in env.secrets."
    )
    secrets: Annotated[dict[EnvName, SecretSource | None], VOLATILE] = Field(
        description="Variables whose values are never recorded. env: your variable of that name, if set; env:OTHER; "
        "file:PATH; secretmanager:projects/P/secrets/S. null: not passed on."
    )
    min_free_gb: Annotated[float, VOLATILE] = Field(ge=0, description="Free disk space in GB that a worker must have.")

    @field_validator("vars", mode="before")
    @classmethod
    def variables_are_text(cls, value: object) -> object:
        """Turn numbers and booleans into text; those that were written are text already, and these are of `${…}`."""
        if not isinstance(value, dict):
            return value
        return {
            name: str(text).lower() if isinstance(text, bool) else str(text) if isinstance(text, int | float) else text
            for name, text in value.items()
        }

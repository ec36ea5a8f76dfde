"""The program on the workers, its code and its Python."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, field_validator

from conf.schema.base import VOLATILE, Strict

EnvName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
SecretSource = Annotated[
    str,
    StringConstraints(
        pattern=r"^(env|env:[A-Za-z_][A-Za-z0-9_]*|file:.+|"
        r"secretmanager:projects/[a-z0-9.:-]+/secrets/[A-Za-z0-9_-]+(/versions/[A-Za-z0-9_-]+)?)$"
    ),
]
"""Source of a secret; never the secret itself, because the config is recorded."""


class Program(Strict):
    kind: Literal["trainer", "command"]
    command: tuple[str, ...] = Field(description="Command of program=command (list of words), for every worker.")
    setup: tuple[tuple[str, ...], ...] = Field(
        description="Commands to run once per worker before it, in the venv and the run's copy of the code."
    )

    @field_validator("setup")
    @classmethod
    def commands(cls, value: tuple[tuple[str, ...], ...]) -> tuple[tuple[str, ...], ...]:
        if not all(argv and argv[0] for argv in value):
            raise ValueError("each command must be a nonempty list of words, such as [pip, install, -e, .]")
        return value


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

    @field_validator("python", mode="before")
    @classmethod
    def quoted(cls, value: object) -> object:
        if isinstance(value, float):  # YAML reads 3.10 as 3.1
            raise ValueError(
                'must be quoted, because YAML reads 3.10 as 3.1: "3.11" in YAML, env.python=\'"3.11"\' in a shell'
            )
        return value

"""What runs on the workers: the program, its code and its Python."""

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
"""Where a secret is; never the secret itself, since a config is recorded."""


class Program(Strict):
    kind: Literal["trainer", "command"]
    command: tuple[str, ...] = Field(description="argument list of program=command, run on every worker at once")
    setup: tuple[tuple[str, ...], ...] = Field(
        description="argument lists that each worker runs once, in the venv and the run's copy of the code, before it"
    )

    @field_validator("setup")
    @classmethod
    def commands(cls, value: tuple[tuple[str, ...], ...]) -> tuple[tuple[str, ...], ...]:
        if not all(argv and argv[0] for argv in value):
            raise ValueError("each command is a list of at least one word, such as [pip, install, -e, .]")
        return value


class Repository(Strict):
    """Another git repository that is shipped, instead of the one you stand in."""

    url: Annotated[str, StringConstraints(pattern=r"^(https?://|ssh://|git@|file://|/)[^\s-]\S*$")]
    commit: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{40}$")] = Field(
        description="the full commit id, so that the same config ships the same code tomorrow"
    )


class Code(Strict):
    max_mb: Annotated[float, VOLATILE] = Field(gt=0, description="refuse to ship an archive larger than this, MB")
    exclude: Annotated[tuple[str, ...], VOLATILE] = Field(
        description="patterns as in .gitignore: what is never shipped, nor recorded as a change, even if git tracks it"
    )
    repository: Annotated[Repository | None, VOLATILE] = Field(
        description="ships this repository at a commit; null: the one around the current folder"
    )
    stand_in: bool = Field(description="ship slipway's small stand-ins of the guides' programs instead; for scale=tiny")


class Env(Strict):
    """The Python of the workers."""

    python: Annotated[str, StringConstraints(pattern=r"^3\.\d+(\.\d+)?$")] = Field(description="version for uv venv")
    packages: Literal["lock", "image", "requirements", "none"] = Field(
        description="lock: slipway's pinned, hashed requirements; requirements: a file of yours; image: a venv that "
        "sees what the worker's own Python has installed; none: no venv"
    )
    requirements: str | None = Field(
        description="with packages=requirements: the file, relative to the shipped repository; null: an empty venv, "
        "which program.setup fills"
    )
    vars: dict[EnvName, str] = Field(
        description="environment of the program; {bucket}, {run_dir} and {assets.models.NAME} are filled in; no "
        "secrets here, they would be recorded"
    )
    secrets: Annotated[dict[EnvName, SecretSource | None], VOLATILE] = Field(
        description="variables whose value is never recorded; env: your variable of that name, if set; env:OTHER; "
        "file:PATH; secretmanager:projects/P/secrets/S; null: not passed on"
    )
    min_free_gb: Annotated[float, VOLATILE] = Field(ge=0, description="disk space that each worker must have left, GB")

    @field_validator("python", mode="before")
    @classmethod
    def quoted(cls, value: object) -> object:
        if isinstance(value, float):  # YAML reads 3.10 as 3.1
            raise ValueError(
                'is a number, in which 3.10 is 3.1; quote it: "3.11" in YAML, env.python=\'"3.11"\' in a shell'
            )
        return value

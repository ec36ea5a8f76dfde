"""What runs on the workers: the program, its code and its Python."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from conf.strict import VOLATILE, Strict

EnvName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class Program(Strict):
    kind: Literal["trainer", "command"]
    command: tuple[str, ...] = Field(description="argument list of program=command, run on every worker at once")


class Code(Strict):
    max_mb: Annotated[float, VOLATILE] = Field(gt=0, description="refuse to ship an archive larger than this, MB")
    stand_in: bool = Field(description="ship slipway's small stand-ins of the guides' programs instead; for scale=tiny")


class Env(Strict):
    """The Python of the workers."""

    python: Annotated[str, StringConstraints(pattern=r"^3\.\d+(\.\d+)?$")] = Field(description="version for uv venv")
    packages: Literal["lock", "image"] = Field(
        description="lock: the pinned, hashed requirements; image: what the worker's own Python has installed"
    )
    vars: dict[EnvName, str] = Field(description="environment of the program; no secrets here, they would be recorded")

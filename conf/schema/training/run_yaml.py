"""`run.yaml`: all that the program on a worker reads. The controller writes it from the resolved config."""

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError

from conf.formats import format_problem
from conf.schema.base import Strict
from conf.schema.renamed_keys import successors
from conf.schema.training.data import Data
from conf.schema.training.loop import Loop
from conf.schema.training.model import Model
from conf.schema.training.optimizer import Optimizer
from conf.schema.training.settings import CheckpointSettings, Logging, Mesh


class RunFileError(ValueError):
    """The file cannot be read, breaks the schema or asks for what cannot be done; the message names every wrong key."""


class LocalRunFileError(RunFileError):
    """One that this worker may have alone: the others are in the middle of a step, and must not be waited for."""


class PodFacts(Strict):
    """What the controller knows of the hardware; the program checks what it finds against this."""

    accelerator_type: str = Field(min_length=1, description="as in tpu_types.yaml, e.g. v5litepod-16")
    workers: int = Field(ge=1, description="VMs of the slice, one process each")
    devices: int = Field(ge=1, description="JAX devices of the whole slice")
    backend: Literal["tpu", "cpu"] = Field(description="the backend JAX must come up with")
    hbm_bytes_per_chip: int | None = Field(gt=0, description="memory of a chip, bytes; null: not known")
    bf16_flops_per_chip: float | None = Field(gt=0, description="peak speed of a chip, FLOP/s; null: not known")


class RunFile(Strict):
    """One run of the trainer, resolved."""

    format: Literal[1] = Field(description="version of this file; another one is another slipway's")
    id: str = Field(pattern=r"^[A-Za-z0-9._-]+$", description="name of the run and of its folder")
    name: str = Field(min_length=1, description="the experiment's name")
    seed: int = Field(ge=0, lt=2**31, description="of weights, data and sampling")
    dir: str = Field(min_length=1, description="results of the run: gs://bucket/runs/<id>, or a local folder")
    compile_cache: bool = Field(description="keep compiled programs in dir, for a later life of the run")
    pod: PodFacts
    model: Model
    data: Data
    loop: Loop
    optimizer: Optimizer
    mesh: Mesh
    checkpoint: CheckpointSettings
    logging: Logging


def load(path: Path) -> RunFile:
    """Read and validate a `run.yaml`. Raises RunFileError."""
    try:
        raw = yaml.safe_load(path.read_bytes())
    except OSError as error:
        raise RunFileError(f"{path}: cannot be read: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise RunFileError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict):
        raise RunFileError(f"{path}: a mapping of sections is wanted, not {type(raw).__name__}")
    if problem := format_problem(raw, str(path)):
        raise RunFileError(problem)
    try:
        return RunFile.model_validate(raw)
    except ValidationError as error:
        problems = [f"  {(key := _dotted_key(raw, e))}: {_parse_message(key, e)}" for e in error.errors()]
        raise RunFileError("\n".join([f"{path}: {len(problems)} wrong", *problems])) from None


def _dotted_key(raw: Any, error: Any) -> str:
    """The dotted key, without the tags that pydantic adds for the members of a union."""
    parts, last = [], len(error["loc"]) - 1
    for i, part in enumerate(error["loc"]):
        present = part in raw if isinstance(raw, dict) else isinstance(raw, list) and isinstance(part, int)
        if present or (i == last and error["type"] == "missing"):
            parts.append(str(part))
            raw = raw[part] if present else None  # pyright: ignore[reportCallIssue, reportArgumentType]
    return ".".join(parts)


def _parse_message(key: str, error: Any) -> str:
    if error["type"] == "missing":
        return "missing"
    if error["type"] == "extra_forbidden":
        renamed = ", ".join(successors(key.split("."), error["input"]))
        return f"unknown key{f'; renamed to {renamed}' if renamed else ''}"
    words = error["msg"].removeprefix("Value error, ")
    return words if isinstance(error["input"], dict) else f"{words} (got {error['input']!r})"

"""`run.yaml`, the config file of the program on a worker. The controller writes it from the resolved config."""

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError

from conf.formats import RunFileError, format_problem
from conf.schema.base import Strict, key_path
from conf.schema.training.data import Data
from conf.schema.training.loop import GrpoLoop, Loop
from conf.schema.training.model import AnyModel, Model
from conf.schema.training.optimizer import Optimizer
from conf.schema.training.settings import CheckpointSettings, Logging, Mesh


class PodFacts(Strict):
    """Hardware that the controller expects. The program compares it with the actual hardware."""

    accelerator_type: str = Field(
        min_length=1, description="Slice type from conf/tpu_types.yaml, e.g. v5litepod-16; without a pod, e.g. gpu-2."
    )
    workers: int = Field(ge=1, description="VMs in the slice, with one process each.")
    devices: int = Field(ge=1, description="JAX devices in the whole slice.")
    backend: Literal["tpu", "gpu", "cpu"] = Field(description="Backend that JAX must use.")
    hbm_bytes_per_chip: int | None = Field(gt=0, description="Memory per chip in bytes. null: unknown.")
    bf16_flops_per_chip: float | None = Field(gt=0, description="Peak FLOP/s per chip. null: unknown.")


class RunFile(Strict):
    """Resolved config of one trainer run."""

    format: Literal[1] = Field(description="Version of the file format.")
    id: str = Field(pattern=r"^[A-Za-z0-9._-]+$", description="ID of the run and name of its folder.")
    name: str = Field(min_length=1, description="Name of the experiment.")
    seed: int = Field(ge=0, lt=2**31, description="Random seed of weights, data and sampling.")
    dir: str = Field(min_length=1, description="Folder of the run's results: gs://bucket/runs/<id> or a local folder.")
    compile_cache: bool = Field(description="Keep compiled programs in dir, for restarts of the run.")
    pod: PodFacts
    model: AnyModel
    data: Data
    loop: Loop
    optimizer: Optimizer
    mesh: Mesh
    checkpoint: CheckpointSettings
    logging: Logging

    @property
    def sampler_workers(self) -> int:
        """How many of the last workers only sample."""
        return self.loop.sampler.workers if isinstance(self.loop, GrpoLoop) else 0

    @property
    def sampler_pods(self) -> int:
        """How many further pods only sample."""
        return self.loop.sampler.pods if isinstance(self.loop, GrpoLoop) else 0

    def on_workers(self, count: int) -> "RunFile":
        """Return the run as `count` of the pod's workers see it, which join each other and nobody else."""
        pod = self.pod
        facts = {"workers": count, "devices": pod.devices // pod.workers * count}
        return self.model_copy(update={"pod": pod.model_copy(update=facts)})

    @property
    def decoder(self) -> Model:
        """The model, for loops of language models. Raises RunFileError if it is none."""
        if not isinstance(self.model, Model):
            raise RunFileError(f"model.kind: loop.kind={self.loop.kind} needs a decoder, not {self.model.kind}")
        return self.model


def load(path: Path) -> RunFile:
    """Read and validate a `run.yaml`. Raises RunFileError."""
    try:
        text = path.read_bytes()
        raw = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 - safe; ten times faster
    except OSError as error:
        raise RunFileError(f"{path}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: of a number or a date that is none
        raise RunFileError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict):
        raise RunFileError(f"{path}: must be a mapping of sections, not {type(raw).__name__}")
    if problem := format_problem(raw, str(path)):
        raise RunFileError(problem)
    try:
        return RunFile.model_validate(raw)
    except ValidationError as error:
        problems = [f"  {(key := '.'.join(key_path(raw, e)))}: {_parse_message(key, e)}" for e in error.errors()]
        raise RunFileError("\n".join([f"{path}: {len(problems)} invalid keys", *problems])) from None


def _parse_message(key: str, error: Any) -> str:
    if error["type"] == "missing":
        return "missing"
    if error["type"] == "extra_forbidden":
        return "unknown key"
    message = error["msg"].removeprefix("Value error, ")
    return message if isinstance(error["input"], dict) else f"{message} (got {error['input']!r})"

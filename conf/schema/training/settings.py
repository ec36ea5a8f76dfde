"""What an experiment trains: the sections of `run.yaml` that the trainer obeys.

Types, bounds, units and descriptions live here; values live in YAML only, so no field has a default.
"""

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from conf.schema.base import VOLATILE, Strict


class Mesh(Strict):
    """Devices along each mesh axis; the product is the number of devices, and one axis may be -1: what is left."""

    data: int = Field(ge=-1, le=65536, description="devices that hold whole copies and split the batch")
    fsdp: int = Field(ge=-1, le=65536, description="devices that split the batch and the weights")
    tensor: int = Field(ge=-1, le=65536, description="devices that split heads, feed-forward width and vocabulary")

    @model_validator(mode="after")
    def _sizes(self) -> "Mesh":
        sizes = {"data": self.data, "fsdp": self.fsdp, "tensor": self.tensor}
        if zero := [name for name, size in sizes.items() if size == 0]:
            raise ValueError(f"{', '.join(zero)}: an axis has at least 1 device, or -1 for whatever is left")
        if list(sizes.values()).count(-1) > 1:
            raise ValueError("only one axis may be -1")
        return self


class BestCheckpoint(Strict):
    """Which checkpoint is the best: the one whose evaluation gave the smallest or the largest value."""

    metric: str = Field(min_length=1, description="a number of the evaluation, e.g. eval_loss")
    mode: Literal["min", "max"] = Field(description="is the best value the smallest or the largest?")


class CheckpointSettings(Strict):
    """Checkpoints in the run's folder; the last step is always saved."""

    save_interval: int = Field(ge=1, description="updates between checkpoints")
    max_to_keep: int = Field(ge=1, le=1000, description="newest checkpoints kept; older ones are deleted")
    best: BestCheckpoint | None = Field(
        description="kept beside the newest; each evaluation is then of a checkpoint. null: only the newest are kept"
    )
    verify_interval: int = Field(
        ge=0,
        description="updates between comparisons of the weights' copies on all devices, by checksum; every checkpoint "
        "is compared anyway. 0: only those",
    )

    @field_validator("best", mode="before")
    @classmethod
    def _is_mapping(cls, value: object) -> object:
        if isinstance(value, str):
            raise ValueError(f"is null or {{metric: {value}, mode: min}}, where mode is min or max")
        return value


class ProfileSettings(Strict):
    """A trace of a few updates for TensorBoard's profile page."""

    after: int = Field(ge=0, description="updates of this process before the trace begins; the first ones are unusual")
    updates: int = Field(ge=1, le=1000, description="updates that are traced")


WANDB_NAME = r"^[^/\\#?%:\s]+$"
"""What W&B takes as the name of a project or a team."""


class Wandb(Strict):
    """Config and metrics to Weights & Biases as well: one run there for each run here (https://docs.wandb.ai)."""

    project: str = Field(max_length=128, pattern=WANDB_NAME, description="made if it is not there")
    entity: str | None = Field(max_length=128, pattern=WANDB_NAME, description="team or user; null: the key's own")
    mode: Literal["online", "offline"] = Field(
        description="offline: into files beside the results, for `wandb sync`; no key is needed"
    )


class Logging(Strict):
    """Metrics to metrics.jsonl and TensorBoard, and to Weights & Biases if wanted."""

    log_interval: int = Field(ge=1, description="updates between metric lines")
    profile: Annotated[ProfileSettings | None, VOLATILE] = Field(description="of the lm loop's updates; null: none")
    wandb: Annotated[Wandb | None, VOLATILE] = Field(description="null: nothing goes there; docs/runs.md")

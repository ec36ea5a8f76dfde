"""How rollouts are sampled, and where: the section `loop.sampler` of `run.yaml`."""

from typing import Literal

from pydantic import Field, field_validator

from conf.schema.base import Strict
from conf.schema.infra.topology import UnknownTypeError, known_type
from conf.schema.training.settings import Mesh

MAX_DECODE_CHUNK = 64
"""Maximum tokens per row between two checks by the host, so that it notices a preemption in time."""


class Sampling(Strict):
    """Sampling distribution, and how devices share the work."""

    top_k: int | None = Field(ge=1, description="Sample from this many of the likeliest tokens. null: all.")
    top_p: float | None = Field(
        gt=0, le=1, description="Sample from the likeliest tokens with this total probability. null: all."
    )
    stop: tuple[str, ...] = Field(description="Texts that end a response, besides the end-of-text token.")
    slots: int | None = Field(
        ge=1,
        le=1_048_576,
        description="Responses in flight. When one ends, the next takes its slot. null: all responses of a rollout.",
    )
    chunk: int = Field(ge=1, le=MAX_DECODE_CHUNK, description="Tokens per response between two checks by the host.")
    dtype: Literal["float32", "bfloat16"] | None = Field(
        description="Dtype of the sampler's weights, activations and cache. null: model.activation_dtype."
    )
    mesh: Mesh | None = Field(
        description="Mesh of the same devices, with fsdp=1. null: tensor is set by weight size and head count."
    )
    workers: int = Field(
        ge=0,
        le=4096,
        description="Last workers of the pod, which only sample while the others train. 0: all do both, in turns.",
    )
    pods: int = Field(
        ge=0,
        le=64,
        description="Further slices, of one worker each, which only sample while the pod trains. They are rented for "
        "the run, and deleted when it ends (docs/grpo.md). 0: none.",
    )
    tpu: str | None = Field(
        min_length=1,
        description="Slice type of `pods`, from conf/tpu_types.yaml; zones and capacity are those of the pod. null: "
        "the pod's type.",
    )

    @field_validator("tpu")
    @classmethod
    def _known_type(cls, value: str | None) -> str | None:
        try:
            return None if value is None else known_type(value)
        except UnknownTypeError as error:
            raise ValueError(str(error)) from None

    @field_validator("mesh", mode="after")
    @classmethod
    def _gathers_nothing(cls, value: Mesh | None) -> Mesh | None:
        if value is not None and value.fsdp != 1:
            raise ValueError("fsdp must be 1, because it would gather all weights for each token; use tensor")
        return value

    @property
    def is_remote(self) -> bool:
        """Whether samplers on other workers draw the rollouts."""
        return self.workers + self.pods > 0

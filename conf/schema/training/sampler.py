"""`loop.sampler`: how responses are sampled, except their number and length."""

from typing import Literal

from pydantic import Field, field_validator

from conf.schema.base import Strict
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

    @field_validator("mesh", mode="after")
    @classmethod
    def _gathers_nothing(cls, value: Mesh | None) -> Mesh | None:
        if value is not None and value.fsdp != 1:
            raise ValueError("fsdp must be 1, because it would gather all weights for each token; use tensor")
        return value

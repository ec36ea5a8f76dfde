"""`loop.sampler`: how responses are drawn, apart from how many and how long."""

from typing import Literal

from pydantic import Field, field_validator

from conf.schema.base import Strict
from conf.schema.training.settings import Mesh

MAX_DECODE_CHUNK = 64
"""Tokens of each row that are decoded without asking the host: a preemption's notice must be heard in time."""


class Sampling(Strict):
    """The distribution that tokens are drawn from, and how the devices share the work."""

    top_k: int | None = Field(ge=1, description="draw from the so many likeliest tokens; null: from all")
    top_p: float | None = Field(
        gt=0, le=1, description="draw from the likeliest tokens that together have this probability; null: from all"
    )
    stop: tuple[str, ...] = Field(description="texts that end a response, besides the end-of-text token")
    slots: int | None = Field(
        ge=1,
        le=1_048_576,
        description="responses in flight; where one ends, the next begins in its place. null: all of a rollout at once",
    )
    chunk: int = Field(
        ge=1, le=MAX_DECODE_CHUNK, description="tokens of each response between two looks at what has ended"
    )
    dtype: Literal["float32", "bfloat16"] | None = Field(
        description="type of the weights' copy, the activations and the cache; null: model.activation_dtype"
    )
    mesh: Mesh | None = Field(
        description="of the same devices; fsdp is 1. null: tensor as the size of the weights asks and the heads allow"
    )

    @field_validator("mesh", mode="after")
    @classmethod
    def _gathers_nothing(cls, value: Mesh | None) -> Mesh | None:
        if value is not None and value.fsdp != 1:
            raise ValueError("fsdp must be 1: split so, all weights would be gathered for each token; take tensor")
        return value

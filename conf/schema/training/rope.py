"""How rotary positions are stretched beyond the trained context: `model.rope_scaling`."""

from typing import Annotated, Literal

from pydantic import Field

from conf.schema.base import Strict


class LinearRopeScaling(Strict):
    """Positions are divided by `factor` (https://arxiv.org/abs/2306.15595); Gemma 3 does so in its global layers."""

    kind: Literal["linear"]
    factor: float = Field(ge=1, description="Factor by which the context is extended.")


class Llama3RopeScaling(Strict):
    """Llama 3.1 scaling: low frequencies are divided by `factor`, high ones kept, those between interpolated.

    https://arxiv.org/abs/2407.21783, section 3.2; values as in the published config.json.
    """

    kind: Literal["llama3"]
    factor: float = Field(ge=1, description="Factor by which the context is extended.")
    low_freq_factor: float = Field(
        gt=0, description="Wavelengths above original_max_position_embeddings / this are scaled."
    )
    high_freq_factor: float = Field(gt=0, description="Wavelengths below original_max_position_embeddings / this stay.")
    original_max_position_embeddings: int = Field(ge=1, description="Context length in tokens before the extension.")


class YarnRopeScaling(Strict):
    """YaRN (https://arxiv.org/abs/2309.00071): slow rotations are divided by `factor`, fast ones kept."""

    kind: Literal["yarn"]
    factor: float = Field(ge=1, description="Factor by which the context is extended.")
    original_max_position_embeddings: int = Field(ge=1, description="Context length in tokens before the extension.")
    attention_factor: float = Field(gt=0, description="Rotated queries and keys are multiplied by this.")
    beta_fast: float = Field(gt=0, description="Frequencies with more rotations in the original context are kept.")
    beta_slow: float = Field(gt=0, description="Frequencies with fewer rotations are divided by factor.")
    truncate: bool = Field(description="Round the bounds between the two to whole frequencies.")
    llama_4_scaling_beta: float = Field(
        default=0.0,
        ge=0,
        description="Queries are multiplied by 1 + this * log(1 + floor(position / original_max_position_embeddings)).",
    )


Factors = tuple[Annotated[float, Field(gt=0)], ...]


class LongRopeScaling(Strict):
    """LongRoPE (https://arxiv.org/abs/2402.13753): each frequency is divided by its own factor."""

    kind: Literal["longrope"]
    short_factor: Factors = Field(description="Of each frequency, in texts within the original context.")
    long_factor: Factors = Field(description="Of each frequency, in longer texts.")
    original_max_position_embeddings: int = Field(ge=1, description="Context length in tokens before the extension.")
    attention_factor: float = Field(gt=0, description="Rotated queries and keys are multiplied by this.")


class ProportionalRopeScaling(Strict):
    """Gemma 4's: the first frequencies of whole heads, divided by `factor`; the other entries are not rotated."""

    kind: Literal["proportional"]
    factor: float = Field(ge=1, description="Factor by which the context is extended.")
    partial_rotary_factor: float = Field(gt=0, le=1, description="Share of the frequencies.")


RopeScaling = Annotated[
    LinearRopeScaling | Llama3RopeScaling | YarnRopeScaling | LongRopeScaling | ProportionalRopeScaling,
    Field(discriminator="kind"),
]

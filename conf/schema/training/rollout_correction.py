"""The section `loop.rollout_correction`: what is done about samples of another policy than the one that learns."""

from typing import Literal

from pydantic import Field, model_validator

from conf.schema.base import Strict

TokenStatistic = Literal["token_k1", "token_k2", "token_k3"]
SequenceSum = Literal["seq_sum_k1", "seq_sum_k2", "seq_sum_k3"]
SequenceMean = Literal["seq_mean_k1", "seq_mean_k2", "seq_mean_k3"]
SequenceMax = Literal["seq_max_k2", "seq_max_k3"]


class RolloutCorrection(Strict):
    """Corrects for samples of another policy than the one that learns. Names and values are those of verl."""

    rollout_is: Literal["token", "sequence"] | None = Field(
        description="Weight the loss by the importance ratio trainer / sampler. token: of each token. sequence: of the "
        "whole response. null: no weights."
    )
    rollout_is_threshold: float = Field(gt=0, description="Maximum importance weight; larger ones are truncated to it.")
    rollout_rs: TokenStatistic | SequenceSum | SequenceMean | SequenceMax | None = Field(
        description="Leave tokens (token_) or responses (seq_) out of the loss by their log ratio. k1: -log r. k2: "
        "(log r)^2 / 2. k3: r - 1 - log r. seq_mean_k1 is geometric rejection. null: none."
    )
    rollout_rs_threshold: float | str | None = Field(
        description="Of k1: bounds of 1 / r as lower_upper, e.g. 0.5_2.0, or the upper one, whose inverse is the lower "
        "one. Of k2 and k3: the maximum."
    )

    @model_validator(mode="after")
    def _threshold_suits_the_statistic(self) -> "RolloutCorrection":
        lower, upper = self.rejection_bounds
        if self.rollout_rs is not None and lower >= upper:
            k1 = self.rollout_rs.endswith("k1")
            wanted = "lower_upper, such as 0.5_2.0, or a number above 1" if k1 else "a number above 0"
            raise ValueError(f"rollout_rs_threshold: {self.rollout_rs} needs {wanted}, not {self.rollout_rs_threshold}")
        return self

    @property
    def rejection_bounds(self) -> tuple[float, float]:
        """Lower and upper threshold of `rollout_rs`, (0, 0) if there are none."""
        try:
            numbers = [float(part) for part in str(self.rollout_rs_threshold).split("_")]
        except ValueError:
            return 0.0, 0.0
        k1 = (self.rollout_rs or "").endswith("k1")
        if k1 and min(numbers) > 0 and len(numbers) <= 2:
            return (1 / numbers[0] if len(numbers) == 1 else numbers[0]), numbers[-1]
        return (0.0, numbers[0]) if len(numbers) == 1 and not k1 else (0.0, 0.0)

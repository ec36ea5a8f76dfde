"""The optimizer's section of `run.yaml`: algorithm, schedules, clipping."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from conf.strict import Strict


class ConstantSchedule(Strict):
    """The learning rate rises linearly over the warm-up, then stays."""

    kind: Literal["constant"]
    warmup_steps: int = Field(ge=0, description="updates of linear warm-up from 0; 0: none")


class DecaySchedule(Strict):
    """Linear warm-up, then a cosine or a line down to the final share at the horizon, constant afterwards."""

    kind: Literal["cosine", "linear"]
    warmup_steps: int = Field(ge=0, description="updates of linear warm-up from 0; 0: none")
    horizon_steps: int = Field(ge=1, description="update at which the final value is reached, warm-up included")
    final_fraction: float = Field(ge=0, le=1, description="final learning rate as a share of optimizer.lr")

    @model_validator(mode="after")
    def _warmup_ends_before_horizon(self) -> "DecaySchedule":
        if self.warmup_steps >= self.horizon_steps:
            raise ValueError(f"warmup_steps ({self.warmup_steps}) must be below horizon_steps ({self.horizon_steps})")
        return self


Schedule = Annotated[ConstantSchedule | DecaySchedule, Field(discriminator="kind")]


class Optimizer(Strict):
    """AdamW with a clipped global gradient norm (https://arxiv.org/abs/1711.05101)."""

    kind: Literal["adamw"]
    lr: float = Field(gt=0, le=10, description="peak learning rate")
    schedule: Schedule
    b1: float = Field(ge=0, lt=1, description="decay of the first moment, per update")
    b2: float = Field(ge=0, lt=1, description="decay of the second moment, per update")
    epsilon: float = Field(gt=0, lt=1, description="added to the root of the second moment")
    weight_decay: float = Field(ge=0, le=1, description="decoupled decay, multiplied by the learning rate")
    clip_norm: float = Field(gt=0, description="largest global norm of the gradient")

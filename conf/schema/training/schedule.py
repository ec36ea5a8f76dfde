"""How a value changes over a run: a share of its peak for each update. One section per value that changes."""

import itertools
from typing import Annotated, Literal

from pydantic import Field, model_validator

from conf.schema.base import Strict


class ConstantSchedule(Strict):
    """Rises linearly over the warm-up, then stays."""

    kind: Literal["constant"]
    warmup_steps: int = Field(ge=0, description="updates of linear warm-up from 0; 0: none")

    @property
    def zero_after(self) -> int | None:
        """Updates after which it is 0 for ever."""
        return None


class _HorizonSchedule(Strict):
    """Warms up, and comes to its final value at a horizon of its own, wherever the run ends."""

    warmup_steps: int = Field(ge=0, description="updates of linear warm-up from 0; 0: none")
    horizon_steps: int = Field(ge=1, description="updates after which the final value is reached, warm-up included")
    final_fraction: float = Field(ge=0, le=1, description="final value as a share of the peak")

    @property
    def zero_after(self) -> int | None:
        """Updates after which it is 0 for ever."""
        return None if self.final_fraction else self.horizon_steps


class DecaySchedule(_HorizonSchedule):
    """Linear warm-up, then a cosine or a line down to the final share, reached after `horizon_steps` updates."""

    kind: Literal["cosine", "linear"]

    @model_validator(mode="after")
    def _warmup_ends_before_horizon(self) -> "DecaySchedule":
        if self.warmup_steps >= self.horizon_steps:
            raise ValueError(f"warmup_steps ({self.warmup_steps}) must be below horizon_steps ({self.horizon_steps})")
        return self


class WarmupStableDecaySchedule(_HorizonSchedule):
    """Linear warm-up, the peak, and a line down over the last `decay_steps` before the horizon.

    https://arxiv.org/abs/2404.06395, there with another curve in place of the line.
    """

    kind: Literal["warmup_stable_decay"]
    decay_steps: int = Field(ge=1, description="updates of the decay, the last before the horizon")

    @model_validator(mode="after")
    def _parts_fit(self) -> "WarmupStableDecaySchedule":
        if self.warmup_steps + self.decay_steps > self.horizon_steps:
            raise ValueError(
                f"warmup_steps ({self.warmup_steps}) and decay_steps ({self.decay_steps}) together are more than "
                f"horizon_steps ({self.horizon_steps})"
            )
        return self


class PiecewiseSchedule(Strict):
    """Straight lines between points; constant before the first and after the last."""

    kind: Literal["piecewise"]
    points: tuple[tuple[Annotated[int, Field(ge=0)], Annotated[float, Field(ge=0)]], ...] = Field(
        min_length=1, description="pairs of the number of updates done before, rising, and the share of the peak"
    )

    @property
    def zero_after(self) -> int | None:
        """Updates after which it is 0 for ever."""
        last, share = self.points[-1]
        return None if share else last

    @model_validator(mode="after")
    def _points_rise(self) -> "PiecewiseSchedule":
        steps = [step for step, _ in self.points]
        if any(later <= earlier for earlier, later in itertools.pairwise(steps)):
            raise ValueError(f"points: the numbers of updates must rise, not {', '.join(map(str, steps))}")
        return self


Schedule = Annotated[
    ConstantSchedule | DecaySchedule | WarmupStableDecaySchedule | PiecewiseSchedule, Field(discriminator="kind")
]

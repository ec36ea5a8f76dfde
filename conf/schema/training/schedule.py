"""Schedules: the fraction of its peak that a value has at each update."""

import itertools
from typing import Annotated, Literal

from pydantic import Field, model_validator

from conf.schema.base import Strict


class _WarmupSchedule(Strict):
    warmup_steps: int = Field(ge=0, description="Updates of linear warm-up from 0. 0: none.")

    @property
    def peak_after(self) -> int:
        """Updates after which the value reaches its peak."""
        return self.warmup_steps


class ConstantSchedule(_WarmupSchedule):
    """Linear warm-up, then constant."""

    kind: Literal["constant"]

    @property
    def zero_after(self) -> int | None:
        """Updates after which the value stays 0; None if it never does."""
        return None


class _HorizonSchedule(_WarmupSchedule):
    """Warm-up, then a decay that ends at its own horizon, independent of the end of the run."""

    horizon_steps: int = Field(ge=1, description="Updates until the final value, including the warm-up.")
    final_fraction: float = Field(ge=0, le=1, description="Final value as a fraction of the peak.")

    @property
    def zero_after(self) -> int | None:
        """Updates after which the value stays 0; None if it never does."""
        return None if self.final_fraction else self.horizon_steps


class DecaySchedule(_HorizonSchedule):
    """Linear warm-up, then cosine or linear decay to the final fraction after `horizon_steps` updates."""

    kind: Literal["cosine", "linear"]

    @model_validator(mode="after")
    def _warmup_ends_before_horizon(self) -> "DecaySchedule":
        if self.warmup_steps >= self.horizon_steps:
            raise ValueError(f"warmup_steps ({self.warmup_steps}) must be below horizon_steps ({self.horizon_steps})")
        return self


class WarmupStableDecaySchedule(_HorizonSchedule):
    """Linear warm-up, constant peak, then linear decay over the last `decay_steps` before the horizon.

    https://arxiv.org/abs/2404.06395, which uses another curve for the decay.
    """

    kind: Literal["warmup_stable_decay"]
    decay_steps: int = Field(ge=1, description="Updates of the decay, up to the horizon.")

    @model_validator(mode="after")
    def _parts_fit(self) -> "WarmupStableDecaySchedule":
        if self.warmup_steps + self.decay_steps > self.horizon_steps:
            raise ValueError(
                f"warmup_steps ({self.warmup_steps}) and decay_steps ({self.decay_steps}) together exceed "
                f"horizon_steps ({self.horizon_steps})"
            )
        return self


class PiecewiseSchedule(Strict):
    """Linear interpolation between points, constant before the first and after the last."""

    kind: Literal["piecewise"]
    points: tuple[tuple[Annotated[int, Field(ge=0)], Annotated[float, Field(ge=0)]], ...] = Field(
        min_length=1, description="Pairs of (updates done, fraction of the peak), in ascending order."
    )

    @property
    def peak_after(self) -> int:
        """Updates after which the value reaches its peak; 0 if it begins there."""
        highest = max(share for _, share in self.points)
        step = next(step for step, share in self.points if share == highest)
        return 0 if self.points[0][1] == highest else step

    @property
    def zero_after(self) -> int | None:
        """Updates after which the value stays 0; None if it never does."""
        last, share = self.points[-1]
        return None if share else last

    @model_validator(mode="after")
    def _points_rise(self) -> "PiecewiseSchedule":
        steps = [step for step, _ in self.points]
        if any(later <= earlier for earlier, later in itertools.pairwise(steps)):
            raise ValueError(f"points: numbers of updates must ascend, not {', '.join(map(str, steps))}")
        return self


Schedule = Annotated[
    ConstantSchedule | DecaySchedule | WarmupStableDecaySchedule | PiecewiseSchedule, Field(discriminator="kind")
]

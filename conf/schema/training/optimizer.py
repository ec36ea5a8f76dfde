"""The optimizer: algorithm, parameter groups, clipping, averaging, the response to NaNs, and schedules.

A schedule is the fraction of its peak that a value has at each update. Values live only in YAML. Keys that a parameter
group omits keep the optimizer's values.
"""

import itertools
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from conf.reference import Reference
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


Rate = Annotated[float, Field(gt=0, le=10)]
Decay = Annotated[float, Field(ge=0, lt=1)]


class ParamGroup(Strict):
    """Weights with their own values. A weight belongs to the first group whose pattern matches."""

    match: str = Field(min_length=1, description="Weight path pattern, e.g. layers.*_norm. * is any text.")
    required: bool = Field(
        default=True, description="false: no error if no weight matches, as where only some variants have it."
    )
    lr: Rate | None = Field(default=None, description="Peak learning rate. Omitted: optimizer.lr, or the algorithm's.")
    lr_scale: float | None = Field(default=None, ge=0, description="Learning rate factor. 0 freezes the weights.")
    reference_dim: int | None = Field(
        default=None, ge=1, description="Multiplies the learning rate by (model.dim / this) ** -0.5."
    )
    weight_decay: float | None = Field(default=None, ge=0, description="Overrides optimizer.weight_decay.")
    algorithm: Literal["sign_sgd"] | None = Field(
        default=None,
        description="sign_sgd: step by the gradient's sign, and only rows with a gradient, as for a table of "
        "embeddings. Omitted: the optimizer's own.",
    )


class AdamwParamGroup(ParamGroup):
    """Weights with their own b1 and b2."""

    b1: Decay | None = Field(default=None, description="Decay of the first moment per update.")
    b2: Decay | None = Field(default=None, description="Decay of the second moment per update.")


class MuonParamGroup(AdamwParamGroup):
    """As AdamwParamGroup, and matrices may use AdamW in place of Muon."""

    algorithm: Literal["adamw", "sign_sgd"] | None = Field(  # pyright: ignore[reportIncompatibleVariableOverride] - it is frozen
        default=None, description="adamw, or sign_sgd as in other groups. Omitted: Muon for matrices of the layers."
    )


GROUPS = "Weights with their own values. The first match applies."


class _OptimizerBase(Strict):
    lr: Rate = Field(description="Peak learning rate.")
    schedule: Schedule = Field(description="Schedule of the learning rate.")
    weight_decay: float = Field(ge=0, le=10, description="Decoupled weight decay, multiplied by the learning rate.")
    weight_decay_schedule: Schedule | None = Field(description="Schedule of the weight decay. null: constant.")
    max_grad_norm: float | None = Field(gt=0, description="Maximum global norm of the gradient. null: no clipping.")
    ema_decay: float | None = Field(
        gt=0, lt=1, description="Decay of a moving average of the weights, used for evaluation. null: no average."
    )
    ema_warmup: bool = Field(
        description="The average decays faster early on: at most (1 + n) / (10 + n) of it stays in update n. "
        "false: always ema_decay."
    )
    nan_policy: Literal["stop", "skip"] = Field(
        description="Updates with a nonfinite loss or gradient are not applied. stop: end the run. skip: continue."
    )

    param_groups: tuple[ParamGroup, ...] = Field(description=GROUPS)

    def with_constant_lr(self, lr: float) -> Self:
        """Return a copy with a constant learning rate. Other learning rates keep their ratio to it."""
        ratio = lr / self.lr
        groups = tuple(g if g.lr is None else g.model_copy(update={"lr": g.lr * ratio}) for g in self.param_groups)
        schedule = ConstantSchedule(kind="constant", warmup_steps=0)
        return self.model_copy(update={"lr": lr, "schedule": schedule, "param_groups": groups})


class _OfAdamwGroups(_OptimizerBase):
    param_groups: tuple[AdamwParamGroup, ...] = Field(  # pyright: ignore[reportIncompatibleVariableOverride] - it is frozen
        description=GROUPS
    )


class Adamw(_OfAdamwGroups):
    """AdamW (https://arxiv.org/abs/1711.05101)."""

    kind: Literal["adamw"]
    b1: Decay = Field(description="Decay of the first moment per update.")
    b2: Decay = Field(description="Decay of the second moment per update.")
    eps: float = Field(gt=0, lt=1, description="Added to the root of the second moment.")
    update_clip: float | None = Field(gt=0, description="Maximum root mean square of a weight's step. null: no limit.")


class AdamAtan2(_OfAdamwGroups):
    """Adam with atan2 in place of the division, so that there is no eps (https://arxiv.org/abs/2407.05872)."""

    kind: Literal["adam_atan2"]
    b1: Decay = Field(description="Decay of the first moment per update.")
    b2: Decay = Field(description="Decay of the second moment per update.")


class Lion(_OfAdamwGroups):
    """Lion (https://arxiv.org/abs/2302.06675): the sign of an interpolated momentum."""

    kind: Literal["lion"]
    b1: Decay = Field(description="Share of the momentum in the step.")
    b2: Decay = Field(description="Decay of the momentum per update.")


class Adafactor(_OptimizerBase):
    """Adafactor (https://arxiv.org/abs/1804.04235): a second moment per row and per column of each matrix."""

    kind: Literal["adafactor"]
    decay_exponent: float = Field(gt=0, le=1, description="Update n keeps 1 - n ** -this of the second moment.")
    eps: float = Field(gt=0, lt=1, description="Added to the squared gradient.")
    update_clip: float | None = Field(gt=0, description="Maximum root mean square of a weight's step. null: no limit.")
    scale_by_weight: bool = Field(description="Multiply the learning rate by the root mean square of the weight.")
    b1: Decay | None = Field(description="Decay of the first moment. null: no first moment, which saves its memory.")


class AdamwPart(Strict):
    """AdamW for weights that Muon does not handle: embeddings, output layer, gains, biases, scalars."""

    lr: Rate = Field(description="Peak learning rate. It follows optimizer.schedule.")
    b1: Decay = Field(description="Decay of the first moment per update.")
    b2: Decay = Field(description="Decay of the second moment per update.")
    eps: float = Field(gt=0, lt=1, description="Added to the root of the second moment.")
    weight_decay: float = Field(ge=0, le=10, description="Decoupled weight decay, multiplied by the learning rate.")


class Muon(_OptimizerBase):
    """Muon (https://kellerjordan.github.io/posts/muon/) for the matrices of the layers, AdamW for the rest."""

    kind: Literal["muon"]
    param_groups: tuple[MuonParamGroup, ...] = Field(  # pyright: ignore[reportIncompatibleVariableOverride] - it is frozen
        description=GROUPS
    )
    momentum: Decay = Field(description="Decay of the first moment per update.")
    momentum_schedule: Schedule | None = Field(description="Schedule of the momentum. null: constant.")
    nesterov: bool = Field(description="Use Nesterov momentum.")
    orthogonalization: Literal["newton_schulz", "polar_express"] = Field(
        description="newton_schulz: the same polynomial in each step. polar_express: one per step "
        "(https://arxiv.org/abs/2505.16932)."
    )
    orthogonalization_steps: int = Field(ge=1, le=20, description="Number of polynomials; polar_express has 5.")
    orthogonalization_dtype: Literal["bfloat16", "float32"] = Field(description="Dtype of the orthogonalization.")
    shape_scale: Literal["none", "aspect", "match_adamw"] = Field(
        description="Factor of a matrix's learning rate. aspect: max(1, outputs / inputs) ** 0.5. match_adamw: 0.2 "
        "max(inputs, outputs) ** 0.5 (https://arxiv.org/abs/2502.16982)."
    )
    scaled_decay: bool = Field(description="Also multiply weight decay by the factor of shape_scale.")
    cautious_weight_decay: bool = Field(
        description="Decay only weights that the step moves toward 0 (https://arxiv.org/abs/2510.12402)."
    )
    normuon_b2: Decay | None = Field(
        description="Decay of a second moment that evens out the rows or columns of a step "
        "(https://arxiv.org/abs/2510.05491). null: off."
    )
    reference_layers: int | None = Field(
        ge=1, description="Multiplies weight_decay by (this / model.num_layers) ** 2. null: no scaling."
    )
    adamw: AdamwPart

    @model_validator(mode="after")
    def _enough_polynomials(self) -> "Muon":
        if self.orthogonalization == "polar_express" and self.orthogonalization_steps > 5:
            raise ValueError(f"orthogonalization_steps ({self.orthogonalization_steps}): at most 5 with polar_express")
        return self

    @model_validator(mode="after")
    def _momentum_stays_below_one(self) -> "Muon":
        schedule = self.momentum_schedule
        if isinstance(schedule, PiecewiseSchedule) and self.momentum * max(share for _, share in schedule.points) >= 1:
            raise ValueError(f"momentum_schedule: a point raises momentum ({self.momentum}) to 1 or more")
        return self

    def with_constant_lr(self, lr: float) -> Self:
        changed = super().with_constant_lr(lr)
        adamw = self.adamw.model_copy(update={"lr": self.adamw.lr * lr / self.lr})
        return changed.model_copy(update={"adamw": adamw})


class CustomOptimizer(_OptimizerBase):
    """A rule of the user's own, or of optax (docs/extend.md). Schedules, groups, clipping and decay are Slipway's."""

    kind: Literal["custom"]
    rule: Reference = Field(
        description="module:name of a function that returns an optax transformation, e.g. optax:scale_by_lion."
    )
    options: dict[str, Any] = Field(description="Keyword arguments of the function.")


Optimizer = Annotated[Adamw | AdamAtan2 | Lion | Adafactor | Muon | CustomOptimizer, Field(discriminator="kind")]

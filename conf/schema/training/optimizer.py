"""The optimizer: algorithm, schedules, weights with values of their own, clipping, average, what a NaN does.

Types, bounds, units and descriptions live here; values live in YAML only. What a group leaves out is as for all others.
"""

from typing import Annotated, Generic, Literal, Self, TypeVar

from pydantic import Field, model_validator

from conf.schema.base import Strict
from conf.schema.training.schedule import ConstantSchedule, PiecewiseSchedule, Schedule

Rate = Annotated[float, Field(gt=0, le=10)]
Decay = Annotated[float, Field(ge=0, lt=1)]


class ParamGroup(Strict):
    """Weights with values of their own. The first group whose pattern matches a weight has it."""

    match: str = Field(min_length=1, description="pattern of paths, e.g. embedding, layers.*_norm; * is any text")
    lr: Rate | None = Field(default=None, description="peak learning rate; absent: optimizer.lr, or the algorithm's")
    lr_scale: float | None = Field(default=None, ge=0, description="the learning rate is multiplied by this; 0 freezes")
    reference_dim: int | None = Field(
        default=None, ge=1, description="the learning rate is multiplied by (model.dim / this) ** -0.5"
    )
    weight_decay: float | None = Field(default=None, ge=0, description="as optimizer.weight_decay")


class AdamwParamGroup(ParamGroup):
    """Weights with an AdamW of their own."""

    b1: Decay | None = Field(default=None, description="decay of the first moment, per update")
    b2: Decay | None = Field(default=None, description="decay of the second moment, per update")


class MuonParamGroup(AdamwParamGroup):
    """As AdamW's; a matrix may be taken from Muon."""

    algorithm: Literal["adamw"] | None = Field(default=None, description="absent: matrices of the layers have Muon")


GroupT = TypeVar("GroupT", bound=ParamGroup)


class _OptimizerBase(Strict, Generic[GroupT]):
    lr: Rate = Field(description="peak learning rate")
    schedule: Schedule = Field(description="of the learning rate")
    weight_decay: float = Field(ge=0, le=10, description="decoupled decay, multiplied by the learning rate")
    weight_decay_schedule: Schedule | None = Field(description="of the weight decay; null: constant")
    max_grad_norm: float | None = Field(gt=0, description="largest global norm of the gradient; null: not clipped")
    ema_decay: float | None = Field(
        gt=0, lt=1, description="decay of an average of the weights, with which is evaluated; null: no average"
    )
    nan_policy: Literal["stop", "skip"] = Field(
        description="an update whose loss or gradient is not finite changes nothing; after it, the run ends or goes on"
    )

    param_groups: tuple[GroupT, ...] = Field(description="weights with values of their own; the first match counts")

    def constant(self, lr: float) -> Self:
        """The same at a constant learning rate; all others keep their ratio to it."""
        ratio = lr / self.lr
        groups = tuple(g if g.lr is None else g.model_copy(update={"lr": g.lr * ratio}) for g in self.param_groups)
        schedule = ConstantSchedule(kind="constant", warmup_steps=0)
        return self.model_copy(update={"lr": lr, "schedule": schedule, "param_groups": groups})


class Adamw(_OptimizerBase[AdamwParamGroup]):
    """AdamW (https://arxiv.org/abs/1711.05101)."""

    kind: Literal["adamw"]
    b1: Decay = Field(description="decay of the first moment, per update")
    b2: Decay = Field(description="decay of the second moment, per update")
    eps: float = Field(gt=0, lt=1, description="added to the root of the second moment")


class Adafactor(_OptimizerBase[ParamGroup]):
    """Adafactor (https://arxiv.org/abs/1804.04235): for each matrix a second moment per row and per column."""

    kind: Literal["adafactor"]
    decay_exponent: float = Field(gt=0, le=1, description="update n keeps 1 - n ** -this of the second moment")
    eps: float = Field(gt=0, lt=1, description="added to the squared gradient")
    update_clip: float | None = Field(gt=0, description="largest root mean square of a weight's step; null: any")
    scale_by_weight: bool = Field(description="multiply the learning rate by the root mean square of the weight")
    b1: Decay | None = Field(description="decay of a first moment; null: none, which saves its memory")


class AdamwPart(Strict):
    """AdamW for what Muon is not for: embeddings, the output layer, gains, biases, scalars."""

    lr: Rate = Field(description="peak learning rate, under the schedule of optimizer.schedule")
    b1: Decay = Field(description="decay of the first moment, per update")
    b2: Decay = Field(description="decay of the second moment, per update")
    eps: float = Field(gt=0, lt=1, description="added to the root of the second moment")
    weight_decay: float = Field(ge=0, le=10, description="decoupled decay, multiplied by the learning rate")


class Muon(_OptimizerBase[MuonParamGroup]):
    """Muon (https://kellerjordan.github.io/posts/muon/) for the matrices of the layers, AdamW for the rest."""

    kind: Literal["muon"]
    momentum: Decay = Field(description="decay of the first moment, per update")
    momentum_schedule: Schedule | None = Field(description="of the momentum; null: constant")
    nesterov: bool = Field(description="orthogonalize the moment one update ahead")
    orthogonalization: Literal["newton_schulz", "polar_express"] = Field(
        description="newton_schulz: one polynomial, repeated; polar_express: one per step "
        "(https://arxiv.org/abs/2505.16932)"
    )
    orthogonalization_steps: int = Field(ge=1, le=20, description="polynomials in turn; polar_express has 5")
    orthogonalization_dtype: Literal["bfloat16", "float32"] = Field(description="type it is computed in")
    shape_scale: Literal["none", "aspect", "match_adamw"] = Field(
        description="the learning rate of a matrix is multiplied by max(1, outputs / inputs) ** 0.5 (aspect), "
        "or by 0.2 max(inputs, outputs) ** 0.5 (match_adamw, https://arxiv.org/abs/2502.16982)"
    )
    scaled_decay: bool = Field(description="weight decay is multiplied by shape_scale's factor, too")
    cautious_weight_decay: bool = Field(
        description="only weights whose step goes towards 0 decay (https://arxiv.org/abs/2510.12402)"
    )
    normuon_b2: Decay | None = Field(
        description="even out the rows, or columns, of a step by a second moment with this decay "
        "(https://arxiv.org/abs/2510.05491); null: do not"
    )
    reference_layers: int | None = Field(
        ge=1, description="weight_decay is multiplied by (this / model.num_layers) ** 2; null: is not"
    )
    adamw: AdamwPart

    @model_validator(mode="after")
    def _enough_polynomials(self) -> "Muon":
        if self.orthogonalization == "polar_express" and self.orthogonalization_steps > 5:
            raise ValueError(f"orthogonalization_steps ({self.orthogonalization_steps}): polar_express has 5")
        return self

    @model_validator(mode="after")
    def _momentum_stays_below_one(self) -> "Muon":
        schedule = self.momentum_schedule
        if isinstance(schedule, PiecewiseSchedule) and self.momentum * max(share for _, share in schedule.points) >= 1:
            raise ValueError(f"momentum_schedule: a point takes momentum ({self.momentum}) to 1 or above")
        return self

    def constant(self, lr: float) -> Self:
        changed = super().constant(lr)
        adamw = self.adamw.model_copy(update={"lr": self.adamw.lr * lr / self.lr})
        return changed.model_copy(update={"adamw": adamw})


Optimizer = Annotated[Adamw | Adafactor | Muon, Field(discriminator="kind")]

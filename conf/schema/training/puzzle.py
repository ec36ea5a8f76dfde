"""Deep supervision of a recursive model on puzzles: `loop.kind: puzzle`.

Fields have no defaults: values live only in YAML.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema, model_validator

from conf.schema.base import Strict
from conf.schema.training.evaluations import EVALUATIONS_HELP, Evaluations, check_intervals
from conf.schema.training.even import UnevenError, nearest_multiples


class Curriculum(Strict):
    """Fewer recursions at first: T and n grow linearly, rounded down, to the model's own."""

    h_cycles: int = Field(ge=1, le=64, description="T in the first epoch.")
    l_cycles: int = Field(ge=1, le=64, description="n in the first epoch.")
    epochs: int = Field(ge=1, le=100_000_000, description="Epochs until T and n are model.h_cycles and model.l_cycles.")


class PuzzleLoop(Strict):
    """Deep supervision with adaptive computation (https://arxiv.org/abs/2510.04871).

    Every update is one supervision step of each row of the batch. A row that halts takes a new puzzle in the next one.
    """

    kind: Literal["puzzle"]
    epochs: int | None = Field(
        ge=1, le=100_000_000, description="Passes over the puzzles, with one random copy of each. null: use steps."
    )
    steps: Annotated[int, WithJsonSchema({"type": ["integer", "null"], "minimum": 1})] = Field(
        ge=1, le=100_000_000, description="Optimizer updates. null: epochs * puzzles / batch_size."
    )
    puzzles: int = Field(
        ge=1, le=1_000_000_000, description="Base puzzles in data.path, without their copies; defines an epoch."
    )
    batch_size: int = Field(ge=1, le=1_048_576, description="Puzzles per update, over all devices.")
    supervision_steps: int = Field(
        ge=1, le=1024, description="N_sup: supervision steps after which a row halts. Evaluation uses all of them."
    )
    halt_exploration: float = Field(
        ge=0, le=1, description="Probability that a row may halt only after a random number of at least 2 steps."
    )
    halt_exploration_final: float | None = Field(
        ge=0, le=1, description="Value of halt_exploration at the end, linearly from the start. null: constant."
    )
    q_loss_weight: float = Field(ge=0, le=1000, description="Weight of the loss of the halting logit.")
    consistency_weight: float = Field(
        ge=0, le=1000, description="Weight of the mean squared change of z_H between supervision steps. 0: off."
    )
    curriculum: Curriculum | None = Field(description="Fewer recursions at first. null: none.")
    eval_interval: int = Field(ge=1, description="Updates between evaluations. Another one follows the last update.")
    eval_puzzles: int | None = Field(ge=1, description="Test puzzles per evaluation during training. null: all.")
    eval_puzzles_final: int | None = Field(ge=1, description="Test puzzles of the last evaluation. null: all.")
    eval_train_puzzles: int = Field(
        ge=0, description="Training puzzles that each evaluation solves too, for the train-test gap. 0: none."
    )
    evaluations: Evaluations = Field(description=EVALUATIONS_HELP)
    boards: int = Field(ge=0, le=64, description="Test puzzles whose solution is shown step by step.")

    _intervals = model_validator(mode="after")(check_intervals)

    @model_validator(mode="before")
    @classmethod
    def _steps_of_epochs(cls, raw: Any) -> Any:
        """Compute steps from epochs, so that everything else reads steps."""
        if not isinstance(raw, dict) or raw.get("epochs") is None:
            return raw
        if not all(isinstance(raw.get(key), int) and raw[key] > 0 for key in ("epochs", "puzzles", "batch_size")):
            return raw
        steps = max(1, raw["epochs"] * raw["puzzles"] // raw["batch_size"])
        if raw.get("steps") not in (None, steps):
            raise ValueError(f"steps: {raw['epochs']} epochs are {steps} updates; set either epochs or steps to null")
        return {**raw, "steps": steps}

    @property
    def rows(self) -> int:
        """Rows in the global batch of an update."""
        return self.batch_size

    def accumulation(self, devices: int) -> int:
        """Return 1, if `devices` can split the batch. Raises UnevenError."""
        if self.batch_size % devices:
            near = " or ".join(str(n) for n in nearest_multiples(self.batch_size, devices))
            message = f"{self.batch_size} puzzles cannot be split evenly over {devices} devices; use {near}"
            raise UnevenError("loop.batch_size", message)
        return 1

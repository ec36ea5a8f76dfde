"""The tiny recursive model (https://arxiv.org/abs/2510.04871) and its deep supervision on puzzles: `loop.kind: puzzle`.

The model is one small net, applied to its own output. Fields have no defaults: values live only in YAML.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema, model_validator

from conf.schema.base import LocalPath, Strict, UnevenError, nearest_multiples
from conf.schema.training.settings import EVALUATIONS_HELP, Evaluations, check_intervals


class Trm(Strict):
    """A tiny recursive model for puzzles of a fixed number of cells. Defaults of the paper: conf/model/trm.yaml."""

    kind: Literal["trm"]
    vocab_size: int = Field(ge=2, le=65536, description="Tokens of a cell: data.path's vocabulary. 0 is padding.")
    seq_len: int = Field(ge=1, le=65536, description="Cells of a puzzle, e.g. 81.")
    num_identifiers: int = Field(ge=1, le=16_777_216, description="Rows of the puzzle embedding. Sudoku has one.")
    puzzle_dim: int | None = Field(ge=0, le=1048576, description="Width of the puzzle embedding. null: dim. 0: none.")
    puzzle_len: int = Field(ge=1, le=4096, description="Positions before the cells, which hold the puzzle embedding.")
    dim: int = Field(ge=2, le=65536, description="Width of the latent states.")
    num_layers: int = Field(ge=1, le=64, description="Layers of the net.")
    num_heads: int = Field(ge=1, le=1024, description="Attention heads, of dim / num_heads each.")
    expansion: float = Field(gt=0, le=64, description="SwiGLU widths are 2/3 of this times the input, up to a 256th.")
    mixer: Literal["mlp", "attention"] = Field(description="How positions mix: a SwiGLU over them, or attention.")
    position_embedding: Literal["none", "rope", "learned"] = Field(description="Position embedding.")
    rope_theta: float = Field(gt=1, description="Base of the rotary frequencies.")
    norm_eps: float = Field(gt=0, lt=1, description="Added to the mean square.")
    h_cycles: int = Field(ge=1, le=64, description="T: updates of the answer z_H. The last one has gradients.")
    l_cycles: int = Field(ge=1, le=64, description="n: updates of the latent state z_L before each of z_H.")
    activation_dtype: Literal["float32", "bfloat16", "float16"] = Field(description="Dtype of activations and states.")
    remat: Literal["none", "outputs", "full", "auto"] = Field(
        description="What the backward pass keeps. none: everything. outputs: what the blocks of the net add. full: "
        "only the inputs of each call of the net. auto: the first of these that fits."
    )
    weights: LocalPath | None = Field(
        min_length=1,
        description="Initial weights: a checkpoint of a run RUN/checkpoints/STEP, run:ID, or a folder of "
        "`slipway export --format slipway`. null: random.",
    )

    @model_validator(mode="after")
    def _shapes_fit(self) -> "Trm":
        if self.mixer == "attention" and self.dim % (2 * self.num_heads):
            raise ValueError(f"dim ({self.dim}) must be a multiple of 2 num_heads ({2 * self.num_heads})")
        if self.mixer == "mlp" and self.position_embedding == "rope":
            raise ValueError("position_embedding: rope needs mixer=attention; use none or learned")
        if self.puzzle_width > self.puzzle_len * self.dim:
            raise ValueError(f"puzzle_dim ({self.puzzle_width}) exceeds puzzle_len dim ({self.puzzle_len * self.dim})")
        return self

    @property
    def length(self) -> int:
        """Positions of the net: the puzzle embedding's and the cells."""
        return self.seq_len + (self.puzzle_len if self.puzzle_width else 0)

    @property
    def puzzle_width(self) -> int:
        """Width of the puzzle embedding; 0 without one."""
        return self.dim if self.puzzle_dim is None else self.puzzle_dim

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """Weights of each block of a layer with their rows per puzzle, over all layers."""
        mixer = (4 * self.dim**2, self.length)
        if self.mixer == "mlp":
            mixer = (3 * self.length * self.inner_width(self.length), self.dim)
        blocks = [mixer, (3 * self.dim * self.inner_width(self.dim), self.length)]
        return [(self.num_layers * weights, rows) for weights, rows in blocks]

    @property
    def update_flops(self) -> float:
        """FLOPs of one puzzle in one update: T (n + 1) calls of the net, the last n + 1 of them also backwards.

        A backward pass counts twice; recomputation does not count.
        """
        call = sum(2.0 * weights * rows for weights, rows in self.matrices)
        if self.mixer == "attention":
            call += 4.0 * self.num_layers * self.length**2 * self.dim
        head = 6.0 * self.seq_len * self.vocab_size * self.dim
        return (self.h_cycles + 2) * (self.l_cycles + 1) * call + head

    def inner_width(self, size: int) -> int:
        """Return the width inside a SwiGLU of vectors of a size."""
        return -(round(self.expansion * size * 2 / 3) // -256) * 256


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

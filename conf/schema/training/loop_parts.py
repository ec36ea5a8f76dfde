"""Parts of some loops: what GRPO samples, and the tiny recursive model with its deep supervision on puzzles.

Of sampling: how the policy is sampled, in which environment, and what corrects for its age. The tiny recursive model
(https://arxiv.org/abs/2510.04871) of `loop.kind: puzzle` is one small net, applied to its own output. Fields have no
defaults: values live only in YAML.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema, field_validator, model_validator

from conf.reference import OrReference
from conf.schema.base import LATER, LocalPath, Separator, Strict, UnevenError, nearest_multiples
from conf.schema.topology import UnknownTypeError, known_type
from conf.schema.training.settings import EVALUATIONS_HELP, Evaluations, Mesh, check_intervals

MAX_DECODE_CHUNK = 64
"""Maximum tokens per row between two checks by the host, so that it notices a preemption in time."""


def stop_problem(texts: Iterable[str], special: Collection[str]) -> str:
    """Return which of `loop.sampler.stop` can end no response; empty if all can. special: names of tokens."""
    for text in texts:
        if text not in special and (name := next((name for name in special if name in text), None)):
            return f"{text!r} holds the special token {name}, which is in no text of a response; set {name} alone"
    return ""


class Sampling(Strict):
    """Sampling distribution, and how devices share the work."""

    top_k: int | None = Field(ge=1, description="Sample from this many of the likeliest tokens. null: all.")
    top_p: float | None = Field(
        gt=0, le=1, description="Sample from the likeliest tokens with this total probability. null: all."
    )
    # run.yaml of runs before 2026-11-30 has none of the next six
    min_p: Annotated[float | None, LATER] = Field(
        default=None, gt=0, lt=1, description="Sample from tokens with this share of the likeliest one's probability."
    )
    repetition_penalty: Annotated[float, LATER] = Field(
        default=1.0,
        ge=0.01,
        le=100,
        description="Divide positive and multiply negative logits of the prompt's and the response's tokens by this "
        "(https://arxiv.org/abs/1909.05858).",
    )
    presence_penalty: Annotated[float, LATER] = Field(
        default=0.0, ge=-2, le=2, description="Subtracted from the logits of the response's tokens."
    )
    frequency_penalty: Annotated[float, LATER] = Field(
        default=0.0, ge=-2, le=2, description="The same, times how often the response has the token."
    )
    logit_bias: Annotated[dict[int, Annotated[float, Field(ge=-100, le=100)]], LATER] = Field(
        default={}, description="Added to the logits of token IDs; -100 excludes one in practice."
    )
    stop_token_ids: Annotated[tuple[Annotated[int, Field(ge=0)], ...], LATER] = Field(
        default=(), description="Token IDs that end a response, besides `stop`."
    )
    stop: tuple[Separator, ...] = Field(
        description="Texts and special tokens that end a response; end-of-text tokens always do."
    )
    slots: int | None = Field(
        ge=1,
        le=1_048_576,
        description="Responses in flight. When one ends, the next takes its slot. null: all responses of a rollout.",
    )
    chunk: int = Field(ge=1, le=MAX_DECODE_CHUNK, description="Tokens per response between two checks by the host.")
    dtype: Literal["float32", "bfloat16"] | None = Field(
        description="Dtype of the sampler's weights, activations and cache. null: model.activation_dtype."
    )
    mesh: Mesh | None = Field(
        description="Mesh of the same devices, with fsdp=1. null: tensor is set by weight size, heads and widths; "
        "expert is as for training, or splits large experts over the devices that tensor leaves."
    )
    workers: int = Field(
        ge=0,
        le=4096,
        description="Last workers of the pod, which only sample while the others train. 0: all do both, in turns.",
    )
    pods: int = Field(
        ge=0,
        le=64,
        description="Further slices, of one worker each, which only sample while the pod trains. They are rented for "
        "the run, and deleted when it ends (docs/grpo.md). 0: none.",
    )
    tpu: str | None = Field(
        min_length=1,
        description="Slice type of `pods`, from conf/tpu_types.yaml; zones and capacity are those of the pod. null: "
        "the pod's type.",
    )

    @field_validator("tpu")
    @classmethod
    def _known_type(cls, value: str | None) -> str | None:
        try:
            return None if value is None else known_type(value)
        except UnknownTypeError as error:
            raise ValueError(str(error)) from None

    @field_validator("mesh", mode="after")
    @classmethod
    def _gathers_nothing(cls, value: Mesh | None) -> Mesh | None:
        if value is not None and value.fsdp != 1:
            raise ValueError("fsdp must be 1, because it would gather all weights for each token; use tensor")
        return value

    def unknown_ids(self, vocab_size: int) -> Iterator[tuple[str, str]]:
        """Yield each key that names a token that the model has not, and what is wrong with it."""
        for key, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            if beyond := [at for at in ids if not 0 <= at < vocab_size]:
                yield f"loop.sampler.{key}", f"{beyond[0]} is no token ID; those of the model are 0 to {vocab_size - 1}"

    @property
    def is_plain(self) -> bool:
        """Whether tokens are drawn from the policy itself, but for the temperature."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return (self.top_k, self.top_p or 1, self.min_p, *penalties) == (None, 1, None, 1, 0, 0) and not self.logit_bias

    @property
    def is_remote(self) -> bool:
        """Whether samplers on other workers draw the rollouts."""
        return self.workers + self.pods > 0


ENVIRONMENTS: Mapping[str, str] = {
    "calculator": "trainer.environments.calculator:Calculator",
    "word_game": "trainer.environments.word_game:WordGame",
}
"""Environments that are shipped, by the name that a config gives them, and the class of each."""
VERIFIERS = "verifiers:"
"""Before the id of an environment of the library `verifiers`: the module with its `load_environment` or taskset."""
VERIFIERS_QUESTIONS = "trainer.environments.verifiers_rows:questions"
"""The questions of such an environment: `data.source` of the group data=verifiers."""


class Sandbox(Strict):
    """The box in which programs of an environment of verifiers 0.4 run, on the worker's own CPUs."""

    cpu_seconds: float = Field(gt=0, le=86400, description="CPU time of a program, with all that it starts.")
    wall_seconds: float = Field(
        gt=0, le=86400, description="Seconds of a program; of a harness, between two answers of the policy."
    )
    memory_gib: float = Field(gt=0, le=1024, description="Memory of all processes in the box, in GiB.")
    disk_mib: float = Field(ge=1, le=2**20, description="Size of the box's files, which are in memory too, in MiB.")
    processes: int = Field(ge=4, le=4096, description="Processes in the box.")
    network: Literal["none", "host"] = Field(
        description="none: nothing but the policy and the environment's tools. host: what the worker reaches, with the "
        "rights of its account on Google Cloud."
    )


class Environment(Strict):
    """An environment, and the limits of its processes (docs/environments.md)."""

    name: Annotated[str, OrReference(tuple(ENVIRONMENTS))] | None = Field(
        description="calculator, word_game, module:Class of your own, or verifiers:ENVIRONMENT_ID, with underscores, "
        "of the library verifiers. null: each response is a single turn."
    )
    options: dict[str, Any] = Field(
        description="Keyword arguments of the class or of load_environment, or the config of a taskset's environment."
    )
    max_turns: int = Field(ge=1, le=1024, description="Maximum turns of the policy in an episode.")
    max_turn_tokens: int | None = Field(
        ge=1, description="Maximum tokens that the policy writes in a turn. null: loop.max_new_tokens."
    )
    timeout_seconds: float = Field(gt=0, le=3600, description="CPU seconds of one call of the environment.")
    wall_seconds: float = Field(gt=0, le=86400, description="Seconds of one call, for environments that wait.")
    max_memory_gib: float = Field(gt=0, le=1024, description="Memory of an environment's process, in GiB.")
    max_output_mib: float = Field(
        gt=0, le=1024, description="What one call prints, returns, or writes to a file at most, in MiB."
    )
    workers: int = Field(ge=1, le=256, description="Processes with environments, per worker.")
    sandbox: Sandbox = Sandbox.model_construct(  # run.yaml before 2026-11-29 lacks it; to check it builds a schema
        cpu_seconds=60.0, wall_seconds=30.0, memory_gib=4.0, disk_mib=256.0, processes=64, network="none"
    )

    @property
    def reference(self) -> str | None:
        """The class, as `module:Class`, or the function that loads an environment of verifiers."""
        if self.verifiers_module is not None:
            return f"{self.verifiers_module}:load_environment"
        return ENVIRONMENTS.get(self.name, self.name) if self.name is not None else None

    @property
    def verifiers_module(self) -> str | None:
        """The module of an environment of the library verifiers; None for others."""
        return self.name.removeprefix(VERIFIERS) if self.name is not None and self.name.startswith(VERIFIERS) else None


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

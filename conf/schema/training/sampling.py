"""What GRPO samples: how the policy is sampled, in which environment, and what corrects for its age.

Fields have no defaults: values live only in YAML.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from conf.extension import OrReference
from conf.schema.base import Strict
from conf.schema.infra.topology import UnknownTypeError, known_type
from conf.schema.training.settings import Mesh

MAX_DECODE_CHUNK = 64
"""Maximum tokens per row between two checks by the host, so that it notices a preemption in time."""


class Sampling(Strict):
    """Sampling distribution, and how devices share the work."""

    top_k: int | None = Field(ge=1, description="Sample from this many of the likeliest tokens. null: all.")
    top_p: float | None = Field(
        gt=0, le=1, description="Sample from the likeliest tokens with this total probability. null: all."
    )
    stop: tuple[str, ...] = Field(description="Texts that end a response, besides the end-of-text token.")
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
        description="Mesh of the same devices, with fsdp=1. null: tensor is set by weight size and head count."
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
"""Before the id of an environment of the library `verifiers`: the module with its `load_environment`."""
VERIFIERS_QUESTIONS = "trainer.environments.verifiers_rows:questions"
"""The questions of such an environment: `data.source` of the group data=verifiers."""


class Environment(Strict):
    """An environment, and the limits of its processes (docs/environments.md)."""

    name: Annotated[str, OrReference(tuple(ENVIRONMENTS))] | None = Field(
        description="calculator, word_game, module:Class of your own, or verifiers:ENVIRONMENT_ID, with underscores, "
        "of the library verifiers. null: each response is a single turn."
    )
    options: dict[str, Any] = Field(description="Keyword arguments of the class, or of load_environment.")
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

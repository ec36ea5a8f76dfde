"""What an experiment trains: the sections of `run.yaml` that the trainer obeys.

Types, bounds, units and descriptions live here; values live in YAML only, so no field has a default.
"""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from conf.strict import Strict


class LmLoop(Strict):
    """Next-token prediction on text."""

    kind: Literal["lm"]
    steps: int = Field(ge=1, le=100_000_000, description="optimizer updates")
    batch: int = Field(ge=1, le=1_048_576, description="sequences per update, over all devices")
    sequence: int = Field(ge=1, le=1_048_576, description="tokens per sequence")
    eval_every: int = Field(ge=1, description="updates between evaluations; one more follows the last update")
    eval_batches: int = Field(ge=1, description="validation batches per evaluation")

    @property
    def rows(self) -> int:
        """Sequences of the global batch of an update."""
        return self.batch


class GrpoLoop(Strict):
    """Group relative policy optimization (https://arxiv.org/abs/2402.03300), after a supervised warm start."""

    kind: Literal["grpo"]
    steps: int = Field(ge=1, le=100_000_000, description="rollouts, each followed by updates_per_rollout updates")
    prompts: int = Field(ge=1, le=65536, description="prompts per update, over all devices")
    samples: int = Field(ge=2, le=1024, description="responses drawn per prompt: the group")
    updates_per_rollout: int = Field(ge=1, le=64, description="updates that share the samples of one rollout")
    prompt_length: int = Field(ge=1, le=1_048_576, description="tokens of the longest prompt")
    response_length: int = Field(ge=1, le=1_048_576, description="tokens after which a response is cut off")
    temperature: float = Field(gt=0, le=100, description="of sampling; 1: the policy as it is")
    clip: float = Field(gt=0, lt=1, description="the probability ratio counts within 1 - clip and 1 + clip")
    kl: float = Field(ge=0, description="weight of the KL penalty to the frozen reference policy")
    advantage_std: Literal["population", "sample", "none"] = Field(
        description="what a group's advantages are divided by"
    )
    rewards: dict[Literal["answer_match", "answer_format"], float] = Field(min_length=1, description="name: weight")
    warm_start_steps: int = Field(ge=0, description="supervised updates on worked answers before GRPO; 0: none")
    warm_start_until: float = Field(gt=0, le=1, description="held-out accuracy at which the warm start ends early")
    warm_start_lr: float = Field(gt=0, le=10, description="learning rate of the warm start, constant")
    warm_start_eval_every: int = Field(ge=1, description="updates between evaluations in the warm start")
    eval_every: int = Field(ge=1, description="steps between evaluations; one more follows the last step")
    eval_prompts: int = Field(ge=1, description="held-out prompts of an evaluation, answered greedily")


Loop = Annotated[LmLoop | GrpoLoop, Field(discriminator="kind")]


class Mesh(Strict):
    """Devices along each mesh axis; the product is the number of devices, and one axis may be -1: what is left."""

    data: int = Field(ge=-1, le=65536, description="devices that hold whole copies and split the batch")
    fsdp: int = Field(ge=-1, le=65536, description="devices that split the batch and the weights")
    tensor: int = Field(ge=-1, le=65536, description="devices that split heads, feed-forward width and vocabulary")

    @model_validator(mode="after")
    def _sizes(self) -> "Mesh":
        sizes = {"data": self.data, "fsdp": self.fsdp, "tensor": self.tensor}
        if zero := [name for name, size in sizes.items() if size == 0]:
            raise ValueError(f"{', '.join(zero)}: an axis has at least 1 device, or -1 for whatever is left")
        if list(sizes.values()).count(-1) > 1:
            raise ValueError("only one axis may be -1")
        return self


class Best(Strict):
    """Which checkpoint is the best: the one whose evaluation gave the smallest or the largest value."""

    metric: str = Field(min_length=1, description="a number of the evaluation, e.g. eval_loss")
    mode: Literal["min", "max"] = Field(description="is the best value the smallest or the largest?")


class Checkpoint(Strict):
    """Checkpoints in the run's folder; the last step is always saved."""

    every: int = Field(ge=1, description="updates between checkpoints")
    keep: int = Field(ge=1, le=1000, description="newest checkpoints kept; older ones are deleted")
    best: Best | None = Field(
        description="kept beside the newest; each evaluation is then of a checkpoint. null: only the newest are kept"
    )
    verify_every: int = Field(
        ge=0,
        description="updates between comparisons of the weights' copies on all devices, by checksum; every checkpoint "
        "is compared anyway. 0: only those",
    )


class Logging(Strict):
    """Metrics to metrics.jsonl and TensorBoard."""

    every: int = Field(ge=1, description="updates between metric lines")

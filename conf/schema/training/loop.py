"""The section `loop` of `run.yaml`: what an update is made of, and what happens between updates.

Types, bounds, units and descriptions live here; values live in YAML only, so no field has a default.
"""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from conf.schema.base import Strict
from conf.schema.training.sampler import Sampling


class UnevenError(ValueError):
    """Rows that cannot be dealt out evenly; `key` is the config key to change."""

    def __init__(self, key: str, words: str) -> None:
        super().__init__(f"{key}: {words}")
        self.key, self.words = key, words


class TextSamples(Strict):
    """Texts that the model continues now and then, for people to read; they go to TensorBoard."""

    interval: int | None = Field(ge=1, description="updates between samples; null: none")
    prompts: tuple[str, ...] = Field(min_length=1, max_length=64, description="texts to continue")
    max_new_tokens: int = Field(ge=1, le=65536, description="tokens after which a continuation is cut off")
    temperature: float = Field(ge=0, le=100, description="of sampling; 0: always the likeliest token")


class LmLoop(Strict):
    """Next-token prediction."""

    kind: Literal["lm"]
    steps: int = Field(ge=1, le=100_000_000, description="optimizer updates")
    total_batch_tokens: int = Field(
        ge=1, le=1 << 32, description="tokens per update, over all devices and accumulation steps"
    )
    seq_len: int = Field(ge=1, le=1_048_576, description="tokens per row; divides total_batch_tokens")
    micro_batch_size: int | None = Field(
        ge=1,
        le=1_048_576,
        description="rows that one device computes at a time, at most; accumulation follows; null: all",
    )
    eval_interval: int = Field(ge=1, description="updates between evaluations; one more follows the last update")
    eval_batches: int = Field(ge=1, description="validation batches per evaluation, as large as those of an update")
    text_samples: TextSamples

    @model_validator(mode="after")
    def _whole_rows(self) -> "LmLoop":
        if self.total_batch_tokens % self.seq_len:
            near = " or ".join(str(n) for n in _nearest_multiples(self.total_batch_tokens, self.seq_len))
            words = f"total_batch_tokens ({self.total_batch_tokens}) must be a multiple of seq_len ({self.seq_len})"
            raise ValueError(f"{words}: {near}")
        return self

    @property
    def rows(self) -> int:
        """Rows of the global batch of an update."""
        return self.total_batch_tokens // self.seq_len

    def accumulation(self, devices: int) -> int:
        """Gradients summed per update where that many devices split the batch. Raises UnevenError."""
        per_device, rest = divmod(self.rows, devices)
        if rest:
            near = _nearest_multiples(self.rows, devices)
            words = f"{self.rows} rows of {self.seq_len} tokens cannot be split evenly over {devices} devices; take "
            raise UnevenError("loop.total_batch_tokens", words + " or ".join(str(n * self.seq_len) for n in near))
        return _num_micro_batches(per_device, self.micro_batch_size)


def _num_micro_batches(per_device: int, micro_batch_size: int | None) -> int:
    """Into how many parts the rows of a device are dealt out. Raises UnevenError."""
    if micro_batch_size is None or micro_batch_size >= per_device:
        return 1
    if per_device % micro_batch_size:
        divisors = [n for n in range(1, per_device + 1) if per_device % n == 0]
        below = max(n for n in divisors if n < micro_batch_size)
        above = min(n for n in divisors if n > micro_batch_size)
        words = f"the {per_device} rows of a device cannot be computed {micro_batch_size} at a time; take "
        words += f"{below} or {above}"
        raise UnevenError("loop.micro_batch_size", words)
    return per_device // micro_batch_size


def _nearest_multiples(number: int, of: int) -> list[int]:
    """The multiples of `of` around a number that is none."""
    below = number // of * of
    return [n for n in (below, below + of) if n]


REWARDS = ("answer_match", "boxed", "format", "length")


def _known_reward(name: str) -> str:
    if name not in REWARDS and not re.fullmatch(r"\w+(\.\w+)*:\w+", name):
        raise ValueError(f"there is no reward {name!r}: choose {', '.join(REWARDS)}, or module:function")
    return name


class Alerts(Strict):
    """What the log and TensorBoard warn of, once each in a run; null, or false: not watched."""

    zero_learning_rate: bool = Field(description="the learning rate is 0 before the last update")
    entropy_below: float | None = Field(gt=0, description="nats; the policy's entropy is less: it has collapsed")
    zero_accuracy_updates: int | None = Field(ge=1, description="so many updates in a row without a right answer")
    zero_variance_updates: int | None = Field(
        ge=1, description="so many updates in a row in which every group has equal rewards: there is nothing to learn"
    )


class GrpoLoop(Strict):
    """Group relative policy optimization (https://arxiv.org/abs/2402.03300) and its relatives, after a supervised warm
    start. The losses are told apart in `trainer/losses/grpo.py` and docs/grpo.md.
    """

    kind: Literal["grpo"]
    steps: int = Field(ge=1, le=100_000_000, description="optimizer updates; a multiple of updates_per_rollout")
    prompts_per_step: int = Field(ge=1, le=65536, description="prompts per update, over all devices")
    group_size: int = Field(ge=2, le=1024, description="responses drawn per prompt: the group")
    updates_per_rollout: int = Field(ge=1, le=64, description="updates that share the samples of one rollout")
    async_depth: Literal[0, 1] = Field(
        description="rollouts that are drawn ahead, with the policy before the updates of the last one; the ratio "
        "is to that policy"
    )
    length_buckets: tuple[Annotated[int, Field(ge=2)], ...] = Field(
        max_length=16,
        description="tokens of prompt and response that an update is padded to, the smallest that holds its samples; "
        "max_prompt_length + max_new_tokens is always one of them, longer ones are not",
    )
    micro_batch_size: int | None = Field(
        ge=1,
        le=1_048_576,
        description="responses that one device computes at a time in an update, at most; null: all of its share",
    )
    max_prompt_length: int = Field(ge=1, le=1_048_576, description="tokens of the longest prompt")
    max_new_tokens: int = Field(ge=1, le=1_048_576, description="tokens after which a response is cut off")
    temperature: float = Field(gt=0, le=100, description="of sampling; 1: the policy as it is")
    sampler: Sampling
    loss_type: Literal["grpo", "token_mean", "dr_grpo", "dapo", "gspo", "rloo"] = Field(
        description="whether tokens or responses have a ratio, and what the mean is over"
    )
    clip_ratio_low: float | None = Field(
        gt=0, lt=1, description="no gain from a ratio below 1 - clip_ratio_low; null: no bound"
    )
    clip_ratio_high: float | None = Field(
        gt=0, description="no gain from a ratio above 1 + clip_ratio_high; null: no bound"
    )
    kl_coef: float = Field(ge=0, description="weight of the KL penalty to the frozen reference policy")
    reference_dtype: Literal["float32", "bfloat16"] | None = Field(
        description="type in which the weights of the reference are held; null: that of the policy's"
    )
    kl_estimator: Literal["k1", "k2", "k3"] = Field(description="of the KL of a token")
    kl_unbiased: bool = Field(description="weigh the KL of a token by its ratio, gradient included")
    entropy_coef: float = Field(ge=0, description="weight of the policy's entropy, in nats, which is rewarded")
    old_logprobs: Literal["trainer", "sampler"] = Field(
        description="whose log-probabilities are those of the policy that drew the samples"
    )
    importance_sampling_cap: float | None = Field(
        gt=1,
        description="upper bound of the importance weight between sampler and trainer; null: trainer's are not weighed",
    )
    advantage_std: Literal["population", "sample", "none"] = Field(
        description="what a group's advantages are divided by"
    )
    filter_zero_variance_groups: bool = Field(
        description="dynamic sampling: groups whose rewards are all equal do not count in the loss"
    )
    max_resample_rounds: int = Field(
        ge=0, le=100, description="further draws per rollout, at most, in place of groups that do not count"
    )
    overlong: Literal["keep", "drop", "penalize"] = Field(
        description="responses that are cut off: as others; not in the loss; the longest ones lose up to 1 of reward"
    )
    overlong_buffer_fraction: float = Field(
        gt=0, le=1, description="share of max_new_tokens, its end, over which the penalty grows from 0 to 1"
    )
    rewards: dict[Annotated[str, AfterValidator(_known_reward)], float] = Field(
        min_length=1, description="name: weight; a name is answer_match, boxed, format, length, or module:function"
    )
    reward_timeout_seconds: float = Field(
        gt=0, le=3600, description="seconds of CPU time that one reward of one response may take; it scores 0 beyond"
    )
    reward_workers: int = Field(ge=1, le=256, description="processes per worker that compute rewards")
    warm_start_steps: int = Field(ge=0, description="supervised updates on worked answers before GRPO; 0: none")
    warm_start_target_accuracy: float = Field(
        gt=0, le=1, description="held-out accuracy at which the warm start ends early"
    )
    warm_start_lr: float = Field(gt=0, le=10, description="learning rate of the warm start, constant")
    warm_start_eval_interval: int = Field(ge=1, description="updates between evaluations in the warm start")
    alerts: Alerts
    eval_interval: int = Field(ge=1, description="updates between evaluations; one more follows the last update")
    eval_prompts: int = Field(ge=1, description="held-out prompts of an evaluation, answered greedily")
    test_samples_per_prompt: int | None = Field(
        ge=1, le=1024, description="answers drawn to each question of the test before and after GRPO; null: no test"
    )
    test_prompts: int | None = Field(ge=1, description="questions of the test; null: the whole test set")
    transcripts: int = Field(ge=0, le=1000, description="questions of an evaluation whose answers are written down")

    @field_validator("advantage_std", "filter_zero_variance_groups", "clip_ratio_high", mode="after")
    @classmethod
    def _as_published(cls, value: Any, info: ValidationInfo) -> Any:
        """A loss that has a paper's name is what the paper describes."""
        loss = info.data.get("loss_type")
        if info.field_name == "advantage_std" and loss in ("dr_grpo", "rloo") and value != "none":
            raise ValueError(f"{loss} divides advantages by nothing: take none")
        if info.field_name == "filter_zero_variance_groups" and loss == "dapo" and not value:
            raise ValueError("dapo leaves groups of equal rewards out: take true, or loss_type: token_mean")
        low = info.data.get("clip_ratio_low") or 0.0
        if info.field_name == "clip_ratio_high" and loss == "dapo" and isinstance(value, float) and value <= low:
            raise ValueError("dapo has it above clip_ratio_low: take 0.28, or loss_type: token_mean")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> "GrpoLoop":
        if self.steps % self.updates_per_rollout:
            near = " or ".join(str(n) for n in _nearest_multiples(self.steps, self.updates_per_rollout))
            words = f"steps ({self.steps}) must be a multiple of updates_per_rollout ({self.updates_per_rollout})"
            raise ValueError(f"{words}: {near}")
        if self.max_resample_rounds and not self.filter_zero_variance_groups:
            raise ValueError(
                "max_resample_rounds: only groups that do not count are drawn again: "
                "set filter_zero_variance_groups, or take 0"
            )
        return self

    @property
    def on_policy(self) -> bool:
        """Does the very policy that drew a sample learn from it? What the update computes is then the old one too."""
        return self.updates_per_rollout == 1 and self.async_depth == 0

    @property
    def keeps_groups_together(self) -> bool:
        """Do all samples of a prompt go into one update, and are computed at the same time?"""
        return self.updates_per_rollout == 1 and self.micro_batch_size is None

    @property
    def widths(self) -> list[int]:
        """Tokens of a row of an update's batch, from the smallest bucket to the largest, which holds every sample."""
        longest = self.max_prompt_length + self.max_new_tokens
        return sorted({*(n for n in self.length_buckets if n < longest), longest})

    @property
    def rows(self) -> int:
        """Responses of an update."""
        return self.prompts_per_step * self.group_size

    def accumulation(self, devices: int) -> int:
        """Gradients summed per update where that many devices split the batch. Raises UnevenError."""
        per_device, rest = divmod(self.prompts_per_step, devices)
        if rest:
            words = (
                f"{self.prompts_per_step} prompts cannot be split evenly over {devices} devices; take a multiple of "
            )
            words += str(devices)
            raise UnevenError("loop.prompts_per_step", words)
        return _num_micro_batches(per_device * self.group_size, self.micro_batch_size)


Loop = Annotated[LmLoop | GrpoLoop, Field(discriminator="kind")]

"""Training loops: the section `loop` of `run.yaml`.

Fields have no defaults: values live only in YAML.
"""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from conf.reference import PATTERN, OrReference, Reference
from conf.schema.base import LATER, Strict, UnevenError, nearest_multiples
from conf.schema.training.loop_parts import Environment, PuzzleLoop, RolloutCorrection, Sampling
from conf.schema.training.model import Model
from conf.schema.training.settings import EVALUATIONS_HELP, Evaluations, check_intervals


class TextSamples(Strict):
    """Continuations that the model writes at intervals. They go to TensorBoard."""

    interval: int | None = Field(ge=1, description="Updates between samples. null: no samples.")
    prompts: tuple[str, ...] = Field(min_length=1, max_length=64, description="Texts to continue.")
    max_new_tokens: int = Field(ge=1, le=65536, description="Maximum tokens per continuation.")
    temperature: float = Field(ge=0, le=100, description="Sampling temperature. 0: greedy.")


class LmLoop(Strict):
    """Next-token prediction."""

    kind: Literal["lm"]
    steps: int = Field(ge=1, le=100_000_000, description="Optimizer updates.")
    total_batch_tokens: int = Field(
        ge=1, le=1 << 32, description="Tokens per update, over all devices and accumulation steps."
    )
    seq_len: int = Field(ge=1, le=1_048_576, description="Tokens per row. Must divide total_batch_tokens.")
    micro_batch_size: int | None = Field(
        ge=1,
        le=1_048_576,
        description="Maximum rows per device at a time; gradients are accumulated. null: all rows at once.",
    )
    loss: Annotated[str, OrReference(("cross_entropy",))] = Field(
        description="Loss of each token: cross_entropy, or module:name of your own function (docs/extend.md)."
    )
    loss_options: dict[str, Any] = Field(description="Keyword arguments of a loss of your own.")
    eval_interval: int = Field(ge=1, description="Updates between evaluations. Another one follows the last update.")
    eval_batches: int = Field(ge=1, description="Validation batches per evaluation, of an update's size.")
    evaluations: Evaluations = Field(description=EVALUATIONS_HELP)
    text_samples: TextSamples

    _intervals = model_validator(mode="after")(check_intervals)

    @model_validator(mode="after")
    def _whole_rows(self) -> "LmLoop":
        if self.total_batch_tokens % self.seq_len:
            near = " or ".join(str(n) for n in nearest_multiples(self.total_batch_tokens, self.seq_len))
            message = f"total_batch_tokens ({self.total_batch_tokens}) must be a multiple of seq_len ({self.seq_len})"
            raise ValueError(f"{message}: {near}")
        if self.loss_options and self.loss == "cross_entropy":
            raise ValueError("loss_options: cross_entropy takes none, but a loss of your own, module:name")
        return self

    @property
    def rows(self) -> int:
        """Rows in the global batch of an update."""
        return self.total_batch_tokens // self.seq_len

    def accumulation(self, devices: int) -> int:
        """Return the gradients summed per update when `devices` split the batch. Raises UnevenError."""
        per_device, rest = divmod(self.rows, devices)
        if rest:
            near = nearest_multiples(self.rows, devices)
            message = f"{self.rows} rows of {self.seq_len} tokens cannot be split evenly over {devices} devices; use "
            raise UnevenError("loop.total_batch_tokens", message + " or ".join(str(n * self.seq_len) for n in near))
        return _num_micro_batches(per_device, self.micro_batch_size)


def _num_micro_batches(per_device: int, micro_batch_size: int | None) -> int:
    """Return the number of micro-batches per device. Raises UnevenError."""
    if micro_batch_size is None or micro_batch_size >= per_device:
        return 1
    if per_device % micro_batch_size:
        divisors = [n for n in range(1, per_device + 1) if per_device % n == 0]
        below = max(n for n in divisors if n < micro_batch_size)
        above = min(n for n in divisors if n > micro_batch_size)
        message = f"the {per_device} rows of a device cannot be computed {micro_batch_size} at a time; use "
        message += f"{below} or {above}"
        raise UnevenError("loop.micro_batch_size", message)
    return per_device // micro_batch_size


GRPO_LOSSES = (
    *("grpo", "token_mean", "dapo", "dr_grpo", "gspo", "rloo", "cispo", "maxrl", "distillation"),
    *("sft", "dpo"),
)
OFFLINE_LOSSES = ("sft", "dpo")
"""Losses that learn from responses of the data set; nothing is sampled for them."""
REJECTED = "rejected"
"""Column with the response that dpo learns to avoid."""
REWARDS = ("answer_match", "answer_match_lenient", "boxed", "boxed_lenient", "boxed_strict", "format", "length")


def _known_reward(name: str) -> str:
    if name not in REWARDS and not re.fullmatch(PATTERN, name):
        if ":" in name:
            module, _, function = name.partition(":")
            meant = f"{module.rpartition('/')[2].removesuffix('.py')}:{function}"
            hint = f"did you mean {meant}? " if re.fullmatch(PATTERN, meant) else ""
            raise ValueError(f"{name!r} is no module:function; {hint}names of Python have letters, digits and _ only")
        raise ValueError(f"unknown reward {name!r}; choices: {', '.join(REWARDS)}, module:function")
    return name


class Alerts(Strict):
    """Warnings in the log and TensorBoard, each shown once per run. null or false: off."""

    zero_learning_rate: bool = Field(description="The learning rate is 0 before the last update.")
    entropy_below: float | None = Field(gt=0, description="The policy's entropy at `temperature`, in nats, is lower.")
    zero_accuracy_updates: int | None = Field(ge=1, description="Updates in a row without a correct answer.")
    zero_variance_updates: int | None = Field(
        ge=1, description="Updates in a row in which the rewards of every group are equal, so nothing is learned."
    )
    staleness_above: float | None = Field(
        gt=0, description="Mean number of updates between the policy that drew a token and the update is higher."
    )
    clip_fraction_above: float | None = Field(gt=0, lt=1, description="A larger share of the ratios is clipped.")
    effective_sample_size_below: float | None = Field(
        gt=0, lt=1, description="rollout_is_eff_sample_size, a share of the tokens, is lower."
    )


class GrpoLoop(Strict):
    """Group relative policy optimization (https://arxiv.org/abs/2402.03300) and its variants, after a supervised warm
    start. `trainer/losses/grpo.py` and docs/grpo.md describe the losses.
    """

    kind: Literal["grpo"]
    steps: int = Field(ge=1, le=100_000_000, description="Optimizer updates; a multiple of updates_per_rollout.")
    prompts_per_step: int = Field(ge=1, le=65536, description="Prompts per update, over all devices.")
    group_size: int = Field(ge=2, le=1024, description="Responses sampled per prompt.")
    updates_per_rollout: int = Field(ge=1, le=64, description="Updates on the samples of one rollout.")
    async_depth: int = Field(
        ge=0,
        le=8,
        description="Rollouts sampled ahead, by the policy from before the last updates. The ratio is relative to "
        "that policy.",
    )
    length_buckets: tuple[Annotated[int, Field(ge=2)], ...] = Field(
        max_length=16,
        description="Padded lengths of an update, in tokens of prompt and response: the shortest that fits is used. "
        "max_prompt_length + max_new_tokens is always added; longer ones are ignored.",
    )
    micro_batch_size: int | None = Field(
        ge=1,
        le=1_048_576,
        description="Maximum responses per device at a time in an update, and in what scores its samples. A multiple "
        "of group_size keeps the samples of a prompt together. null: all of the device's share.",
    )
    max_prompt_length: int = Field(ge=1, le=1_048_576, description="Maximum tokens per prompt.")
    max_new_tokens: int = Field(
        ge=1, le=1_048_576, description="Maximum tokens per response; with an environment, of all turns together."
    )
    temperature: float = Field(gt=0, le=100, description="Sampling temperature.")
    sampler: Sampling
    environment: Environment
    replay: str | None = Field(
        min_length=1,
        description="Folder of an earlier run with samplers on other workers: train on the rollouts of its journal "
        "again, which gives the same weights. null: sample.",
    )
    replay_routes: Annotated[bool, LATER] = Field(
        default=False, description="Update with the experts that the sampler took (https://arxiv.org/abs/2510.11370)."
    )
    loss_type: Annotated[str, OrReference(GRPO_LOSSES)] = Field(
        description="Loss: whether the ratio is per token or per response, and how the mean is taken. module:name: the "
        "loss of each token, from your own function (docs/extend.md)."
    )
    loss_options: dict[str, Any] = Field(description="Keyword arguments of a loss_type of your own.")
    clip_ratio_low: float | None = Field(
        gt=0, lt=1, description="A ratio below 1 - clip_ratio_low gains nothing. null: no bound."
    )
    clip_ratio_high: float | None = Field(
        gt=0, description="A ratio above 1 + clip_ratio_high gains nothing. null: no bound."
    )
    kl_coef: float = Field(
        ge=0, description="Weight of the KL penalty to the frozen reference policy. With loss_type=dpo: its beta."
    )
    reference_dtype: Literal["float32", "bfloat16"] | None = Field(
        description="Dtype of the reference's weights. null: the policy's."
    )
    kl_estimator: Literal["k1", "k2", "k3"] = Field(description="Estimator of the KL per token.")
    kl_unbiased: bool = Field(description="Weight each token's KL by its ratio, gradient included.")
    entropy_coef: float = Field(ge=0, description="Weight of the bonus for the entropy at `temperature`, in nats.")
    old_logprobs: Literal["trainer", "sampler"] = Field(description="Source of the old policy's log-probabilities.")
    rollout_correction: RolloutCorrection
    teacher: Model | None = Field(
        description="Model that loss_type=distillation learns from, with its `weights` and the policy's vocabulary."
    )
    advantage_std: Literal["population", "sample", "none"] = Field(
        description="Standard deviation that divides a group's advantages."
    )
    filter_zero_variance_groups: bool = Field(
        description="Dynamic sampling: leave groups with equal rewards out of the loss."
    )
    max_resample_rounds: int = Field(
        ge=0, le=100, description="Maximum extra sampling rounds per rollout to replace filtered groups."
    )
    overlong: Literal["keep", "drop", "penalize"] = Field(
        description="keep: truncated responses count. drop: not in the loss. penalize: long ones lose up to 1 reward."
    )
    overlong_buffer_fraction: float = Field(
        gt=0, le=1, description="Share of max_new_tokens, at its end, over which the penalty grows from 0 to 1."
    )
    filter_overlong_solutions: bool = Field(
        default=False,  # run.yaml of runs before 2026-11-28 says nothing
        description="Leave worked responses of more than max_new_tokens out of sft, dpo and the warm start, and count "
        "them. false: one ends the run. None is cut.",
    )
    rewards: dict[Annotated[str, AfterValidator(_known_reward)], float] = Field(
        min_length=1,
        description="Weight by reward: answer_match, boxed, format, length, or module:function. answer_match_lenient "
        "and boxed_lenient also accept an expression left to compute, 9+9 for 18; boxed_strict wants the bare number "
        "in the last box.",
    )
    accuracy_reward: Annotated[str, AfterValidator(_known_reward)] = Field(
        description="Reward that tells whether an answer is correct, by a score of 1: for accuracy and tests."
    )
    reward_timeout_seconds: float = Field(
        gt=0, le=3600, description="CPU seconds per reward of one response. On timeout it scores 0."
    )
    reward_workers: int = Field(ge=1, le=256, description="Reward processes per worker.")
    warm_start_steps: int = Field(ge=0, description="Supervised updates on worked answers before GRPO. 0: none.")
    warm_start_target_accuracy: float = Field(gt=0, le=1, description="Held-out accuracy that ends warm start early.")
    warm_start_lr: float = Field(gt=0, le=10, description="Constant learning rate of the warm start.")
    warm_start_eval_interval: int = Field(ge=1, description="Updates between evaluations in the warm start.")
    alerts: Alerts
    eval_interval: int = Field(ge=1, description="Updates between evaluations. Another one follows the last update.")
    eval_prompts: int = Field(ge=1, description="Held-out prompts per evaluation, answered greedily.")
    test_samples_per_prompt: int | None = Field(
        ge=1, le=1024, description="Answers sampled per test question, before and after GRPO. null: no test."
    )
    test_prompts: int | None = Field(ge=1, description="Number of test questions. null: the whole test set.")
    evaluations: Evaluations = Field(description=EVALUATIONS_HELP)
    transcripts: int = Field(ge=0, le=1000, description="Questions per evaluation whose answers are saved.")

    _intervals = model_validator(mode="after")(check_intervals)

    @field_validator("replay")
    @classmethod
    def _is_a_folder(cls, value: str | None) -> str | None:
        if value is not None and "/" not in value:
            raise ValueError(f"{value!r} is no folder of an earlier run, such as gs://BUCKET/runs/ID; null: sample")
        return value

    @field_validator("advantage_std", "filter_zero_variance_groups", "clip_ratio_high", mode="after")
    @classmethod
    def _as_published(cls, value: Any, info: ValidationInfo) -> Any:
        """Reject settings that contradict the paper a loss is named after."""
        loss = info.data.get("loss_type")
        if info.field_name == "advantage_std" and loss in ("dr_grpo", "rloo", "maxrl") and value != "none":
            raise ValueError(f"{loss} does not divide advantages; use none")
        if info.field_name == "filter_zero_variance_groups" and loss == "dapo" and not value:
            raise ValueError("dapo leaves out groups with equal rewards; use true, or loss_type=token_mean")
        low = info.data.get("clip_ratio_low") or 0.0
        if info.field_name == "clip_ratio_high" and loss == "dapo" and isinstance(value, float) and value <= low:
            raise ValueError("dapo needs a value above clip_ratio_low; use 0.28, or loss_type=token_mean")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> "GrpoLoop":
        if self.steps % self.updates_per_rollout:
            near = " or ".join(str(n) for n in nearest_multiples(self.steps, self.updates_per_rollout))
            message = f"steps ({self.steps}) must be a multiple of updates_per_rollout ({self.updates_per_rollout})"
            raise ValueError(f"{message}: {near}")
        if self.max_resample_rounds and not self.filter_zero_variance_groups:
            raise ValueError(
                "max_resample_rounds: only filtered groups are resampled; "
                "set filter_zero_variance_groups=true, or use 0"
            )
        if (self.environment.max_turn_tokens or 1) > self.max_new_tokens:
            raise ValueError(
                f"environment.max_turn_tokens: at most max_new_tokens, {self.max_new_tokens}, which is for all turns"
            )
        return self

    @model_validator(mode="after")
    def _loss_has_what_it_needs(self) -> "GrpoLoop":
        if self.loss_options and self.loss_type in GRPO_LOSSES:
            raise ValueError(f"loss_options: {self.loss_type} takes none, but a loss_type of your own, module:name")
        if (self.loss_type == "distillation") != (self.teacher is not None):
            raise ValueError("teacher: loss_type=distillation needs it, and no other loss reads it")
        weights = self.teacher.weights if self.teacher is not None else "none"
        if weights is None or weights.startswith(("run:", "hf://")):
            raise ValueError(
                "teacher.weights: set a folder, assets://NAME, gs://… or a checkpoint RUN/checkpoints/STEP"
            )
        if self.loss_type == "distillation" and self.kl_coef:
            raise ValueError("kl_coef: distillation is a KL to the teacher already; use 0")
        if self.loss_type == "maxrl" and self.overlong == "penalize":
            raise ValueError("overlong: maxrl needs rewards of 0 and 1, so use keep or drop")
        if self.loss_type == "dpo" and not (self.kl_coef and self.group_size == 2):
            raise ValueError("kl_coef, group_size: dpo needs kl_coef > 0, which is its beta, and pairs: group_size=2")
        if self.loss_type == "dpo" and (self.micro_batch_size or 2) % 2:
            raise ValueError("micro_batch_size: dpo needs an even number, since a pair cannot be split")
        if self.loss_type in OFFLINE_LOSSES and self.max_resample_rounds:
            raise ValueError(f"max_resample_rounds: {self.loss_type} samples nothing; use 0")
        if self.rollout_correction.rollout_is == "sequence" and self.old_logprobs == "sampler":
            raise ValueError("rollout_correction.rollout_is: sequence needs old_logprobs=trainer")
        if self.loss_type in OFFLINE_LOSSES and self.environment.name is not None:
            raise ValueError(f"environment.name: {self.loss_type} samples nothing; use null")
        return self

    @model_validator(mode="after")
    def _samplers_can_work(self) -> "GrpoLoop":
        remote = self.sampler.is_remote or self.replay is not None
        if remote and self.async_depth == 0:
            raise ValueError(
                "async_depth: samplers on other workers and replay need 1 or more, the rollouts drawn ahead"
            )
        if remote and self.max_resample_rounds:
            raise ValueError("max_resample_rounds: samplers on other workers draw each rollout once; use 0")
        if remote and self.loss_type in OFFLINE_LOSSES:
            raise ValueError(f"sampler.workers, sampler.pods, replay: {self.loss_type} samples nothing; use 0 and null")
        if remote and self.environment.name is not None:
            raise ValueError("environment.name: samplers on other workers and replay draw single responses; use null")
        if self.sampler.is_remote and self.replay is not None:
            raise ValueError("replay: nothing is sampled; use sampler.workers=0, pods=0 and as many workers as trained")
        return self

    @property
    def prompts_per_task(self) -> int:
        """Prompts that a sampler on another worker draws at a time: its share of a rollout, or what fits its slots."""
        share = -(-self.prompts_per_step * self.updates_per_rollout // max(1, self.sampler.workers + self.sampler.pods))
        return share if self.sampler.slots is None else min(share, -(-self.sampler.slots // self.group_size))

    @property
    def scores_reference(self) -> bool:
        """Whether the loss needs log-probabilities under the reference, or the teacher."""
        return self.kl_coef > 0 or self.teacher is not None

    @property
    def solution_phases(self) -> tuple[str, ...]:
        """The phases, of rollout and warm_start, that learn from worked responses of the data."""
        warm = ("warm_start",) if self.warm_start_steps else ()
        return ("rollout", *warm) if self.loss_type in OFFLINE_LOSSES else warm

    @property
    def token_temperature(self) -> float:
        """Temperature of the log-probabilities in the loss: 1 for responses that were not sampled."""
        return 1.0 if self.loss_type in OFFLINE_LOSSES else self.temperature

    @property
    def on_policy(self) -> bool:
        """Whether a sample trains the very policy that drew it; the update then computes the old log-probabilities."""
        return self.updates_per_rollout == 1 and self.async_depth == 0

    @property
    def keeps_groups_together(self) -> bool:
        """Whether an update computes all samples of a prompt at the same time."""
        has_whole_groups = (self.micro_batch_size or self.group_size) % self.group_size == 0
        return self.updates_per_rollout == 1 and has_whole_groups and self.loss_type != "sft"

    @property
    def row_widths(self) -> list[int]:
        """Row lengths of an update's batch, in tokens, ascending. The last one fits every sample."""
        longest = self.max_prompt_length + self.max_new_tokens
        return sorted({*(n for n in self.length_buckets if n < longest), longest})

    @property
    def rows(self) -> int:
        """Responses per update."""
        return self.prompts_per_step * self.group_size

    def accumulation(self, devices: int) -> int:
        """Return the gradients summed per update when `devices` split the batch. Raises UnevenError."""
        per_device, rest = divmod(self.prompts_per_step, devices)
        if rest:
            message = (
                f"{self.prompts_per_step} prompts cannot be split evenly over {devices} devices; use a multiple of "
            )
            message += str(devices)
            raise UnevenError("loop.prompts_per_step", message)
        return _num_micro_batches(per_device * self.group_size, self.micro_batch_size)


class CustomLoop(Strict):
    """A loop of the user's own (docs/extend.md)."""

    kind: Literal["custom"]
    run: Reference = Field(description="module:name of a function of (experiment, mesh, log), which trains.")
    options: dict[str, Any] = Field(description="Keyword arguments of the function.")
    steps: int = Field(ge=1, le=100_000_000, description="Optimizer updates, for progress and estimates.")

    def accumulation(self, devices: int) -> int:
        """Return 1: only the loop itself knows its batches."""
        del devices
        return 1


Loop = Annotated[LmLoop | GrpoLoop | PuzzleLoop | CustomLoop, Field(discriminator="kind")]

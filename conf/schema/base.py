"""What all sections of the config build on: their base class, volatile keys, uneven batches; and renamed keys.

The error for an old key names its successor.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, StringConstraints


class Strict(BaseModel):
    """A section: immutable, and unknown keys are errors, because Hydra would silently merge a typo."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)


class Volatile:
    """Marks a key that affects where a run executes or how long it waits, but not what it computes.

    Volatile keys are not part of a run's identity: an experiment stays the same in another zone.
    """


VOLATILE = Volatile()


class Later:
    """Marks a key that is newer than some runs: at its default it is not part of a run's identity."""


LATER = Later()

Name = Annotated[str, StringConstraints(pattern=r"^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$")]
"""Name of a Google resource (RFC 1035 label)."""


def check_home(value: str) -> str:
    """Reject `~anna/…` or `file:~anna/…` of a user that this machine does not have."""
    try:
        Path(value.removeprefix("file:")).expanduser()
    except RuntimeError:
        raise ValueError(f"this machine has no user {value.partition('~')[2].partition('/')[0]!r}") from None
    return value


LocalPath = Annotated[str, AfterValidator(check_home)]
"""Path of this machine, which may begin with `~`; or another source that cannot."""
Zone = Annotated[str, StringConstraints(pattern=r"^[a-z]+-[a-z]+\d+-[a-z0-9]+$")]


BREAKS = re.compile(r"(\\[nt])+")
"""What somebody types who means line breaks or tabs, and a shell leaves as it is."""


def check_breaks(value: str) -> str:
    """Reject a backslash and a letter alone, which no text of a model has."""
    if BREAKS.fullmatch(value):
        way = f"write \"{value}\" in a file, in a shell the word in $'…'"
        raise ValueError(f"'{value}' is no line break but a backslash and a letter; {way}")
    return value


Separator = Annotated[str, AfterValidator(check_breaks)]
"""Text between texts of a model."""


def without_volatile(section: BaseModel) -> dict[str, Any]:
    """Return the section as plain JSON data, at any depth without volatile keys, and later ones at their default."""
    plain = section.model_dump(mode="json")  # once: each section's own serializer would have to be built
    _drop_volatile(section, plain)
    return plain


def _drop_volatile(section: BaseModel, plain: dict[str, Any]) -> None:
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        marks = field.metadata
        is_as_before = value == field.default and any(isinstance(mark, Later) for mark in marks)
        if is_as_before or any(isinstance(mark, Volatile) for mark in marks):
            del plain[name]
        elif isinstance(value, BaseModel):
            _drop_volatile(value, plain[name])
        elif isinstance(value, dict):
            for key, item in value.items():
                if isinstance(item, BaseModel):
                    _drop_volatile(item, plain[name][key])


class UnevenError(ValueError):
    """Rows that cannot be split evenly; `key` is the config key to change."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"{key}: {message}")
        self.key, self.message = key, message


def nearest_multiples(number: int, of: int) -> list[int]:
    """Return the multiples of `of` on either side of a number that is not one."""
    below = number // of * of
    return [n for n in (below, below + of) if n]


RENAMED = {
    "loop.samples": "loop.group_size",
    "loop.samples.every": "loop.text_samples.interval",
    "loop.samples.prompts": "loop.text_samples.prompts",
    "loop.samples.length": "loop.text_samples.max_new_tokens",
    "loop.samples.temperature": "loop.text_samples.temperature",
    "loop.prompts": "loop.prompts_per_step",
    "loop.prompt_length": "loop.max_prompt_length",
    "loop.response_length": "loop.max_new_tokens",
    "loop.sequence": "loop.seq_len",
    "loop.device_batch": "loop.micro_batch_size",
    "loop.loss": "loop.loss_type",
    "loop.kl": "loop.kl_coef",
    "loop.entropy_bonus": "loop.entropy_coef",
    "loop.clip_low": "loop.clip_ratio_low",
    "loop.clip_high": "loop.clip_ratio_high",
    "loop.importance_cap": "loop.rollout_correction",
    "loop.importance_sampling_cap": "loop.rollout_correction",
    "loop.drop_equal_groups": "loop.filter_zero_variance_groups",
    "loop.redraws": "loop.max_resample_rounds",
    "loop.overlong_buffer": "loop.overlong_buffer_fraction",
    "loop.reward_seconds": "loop.reward_timeout_seconds",
    "loop.warm_start_until": "loop.warm_start_target_accuracy",
    "loop.warm_start_eval_every": "loop.warm_start_eval_interval",
    "loop.eval_every": "loop.eval_interval",
    "loop.test_samples": "loop.test_samples_per_prompt",
    "loop.alerts.equal_groups_updates": "loop.alerts.zero_variance_updates",
    "model.layers": "model.num_layers",
    "model.heads": "model.num_heads",
    "model.kv_heads": "model.num_kv_heads",
    "model.hidden": "model.mlp_dim",
    "model.vocab": "model.vocab_size",
    "model.norm_epsilon": "model.norm_eps",
    "model.positions": "model.position_embedding",
    "model.context": "model.max_seq_len",
    "model.rope_base": "model.rope_theta",
    "model.rope_local_base": "model.rope_local_theta",
    "model.rope_scaling.low_frequency_factor": "model.rope_scaling.low_freq_factor",
    "model.rope_scaling.high_frequency_factor": "model.rope_scaling.high_freq_factor",
    "model.rope_scaling.original_context": "model.rope_scaling.original_max_position_embeddings",
    "model.pattern": "model.attention_pattern",
    "model.window": "model.sliding_window",
    "model.query_scalar": "model.query_pre_attn_scalar",
    "model.attention_softcap": "model.attn_logit_softcap",
    "model.final_softcap": "model.final_logit_softcap",
    "model.tied": "model.tie_word_embeddings",
    "optimizer.clip_norm": "optimizer.max_grad_norm",
    "optimizer.ema": "optimizer.ema_decay",
    "optimizer.epsilon": "optimizer.eps",
    "optimizer.groups": "optimizer.param_groups",
    "optimizer.cautious": "optimizer.cautious_weight_decay",
    "optimizer.variance_decay": "optimizer.normuon_b2",
    "optimizer.adamw.epsilon": "optimizer.adamw.eps",
    "data.validation_path": "data.eval_path",
    "data.validation_fraction": "data.eval_fraction",
    "data.column": "data.text_column",
    "data.read_ahead": "data.prefetch_batches",
    "data.template": "data.chat_template",
    "checkpoint.every": "checkpoint.save_interval",
    "checkpoint.keep": "checkpoint.max_to_keep",
    "checkpoint.verify_every": "checkpoint.verify_interval",
    "logging.every": "logging.log_interval",
    "tpu.zones": "tpu.fallback_zones",
    "tpu.create_minutes": "tpu.create_timeout_minutes",
    "ssh.connect_seconds": "ssh.connect_timeout_seconds",
    "ssh.warm_up_seconds": "ssh.ready_timeout_seconds",
    "cloud.driver_account": "cloud.driver_service_account",
    "recovery.lease_seconds": "recovery.lease_duration_seconds",
    "recovery.lost_seconds": "recovery.heartbeat_timeout_seconds",
    "recovery.hang_seconds": "recovery.hang_timeout_seconds",
    "recovery.notice": "recovery.preemption_signal",
    "recovery.response": "recovery.policy",
    "assets.datasets.*.files.*.token": "assets.datasets.*.files.*.token_secret",
    "assets.models.*.files.*.token": "assets.models.*.files.*.token_secret",
    "assets.tokenizers.*.files.*.token": "assets.tokenizers.*.files.*.token_secret",
}
"""Old to new dotted key; `*` matches one user-chosen name."""


def successors(path: Sequence[str], value: Any = None) -> list[str]:
    """Return the new names of the keys below an unknown key, else of the key itself; empty if never renamed."""
    below = [name for key in _leaves(path, value) for name in _lookup(key)] if isinstance(value, dict) else []
    return list(dict.fromkeys(below)) or _lookup(path)


def _leaves(path: Sequence[str], value: Any) -> Iterator[list[str]]:
    if not isinstance(value, dict):
        yield list(path)
        return
    for name, child in value.items():
        yield from _leaves([*path, str(name)], child)


def _lookup(path: Sequence[str]) -> list[str]:
    for old, new in RENAMED.items():
        parts = old.split(".")
        if len(parts) == len(path) and all(part in ("*", name) for part, name in zip(parts, path, strict=True)):
            chosen = iter([name for part, name in zip(parts, path, strict=True) if part == "*"])
            return [".".join(next(chosen) if part == "*" else part for part in new.split("."))]
    return []

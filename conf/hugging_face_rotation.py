"""Rotary scaling in config.json: the fields of each kind, their types, and what transformers derives from them."""

import math
from types import UnionType
from typing import Any

ROPE_TYPES: dict[str, type | UnionType] = {
    "rope_type": str,
    "type": str,
    "factor": float,
    "low_freq_factor": float,
    "high_freq_factor": float,
    "original_max_position_embeddings": int | None,
    "attention_factor": float | None,
    "beta_fast": float | None,
    "beta_slow": float | None,
    "mscale": float | None,
    "mscale_all_dim": float | None,
    "truncate": bool,
    "rope_theta": float | None,
    "partial_rotary_factor": float | None,
    "llama_4_scaling_beta": float,
    "mrope_section": list,
    "mrope_interleaved": bool,
    "short_factor": list,
    "long_factor": list,
}
"""What the values of rope_parameters are."""

ROPE_FIELDS = {
    "default": ({}, {}),
    "linear": ({"factor"}, {}),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor"}, {"original_max_position_embeddings": None}),
    "yarn": (
        {"factor"},
        {
            "original_max_position_embeddings": None,  # max_position_embeddings
            "attention_factor": None,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": None,
            "mscale_all_dim": None,
            "truncate": True,
        },
    ),
    "proportional": ({}, {"factor": 1.0, "partial_rotary_factor": 1.0}),
    "longrope": (
        {"short_factor", "long_factor"},
        {"original_max_position_embeddings": None, "attention_factor": None, "factor": None},
    ),
}
"""By `rope_type`: the required fields of rope_parameters, and the others with their defaults."""

MINISTRAL3_ROTATION = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
GEMMA4_ROTATION = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
GPT_OSS_ROTATION = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
DEFAULT_ROTATIONS = {
    "ministral3": MINISTRAL3_ROTATION,
    "gemma4_text": GEMMA4_ROTATION,
    "gemma4_unified_text": GEMMA4_ROTATION,
}
"""What a family has where config.json has no rope_parameters."""
ANY_ROTATION = ("default", "linear", "llama3", "yarn", "longrope")
ROTATIONS = {"phi3": ("default", "longrope"), "ministral3": ("yarn",), "gpt_oss": ("yarn",)}
ROTATIONS |= dict.fromkeys((f"qwen3_5{part}" for part in ("", "_text", "_moe", "_moe_text")), ("default", "yarn"))
ROTATIONS |= dict.fromkeys(("gemma4", "gemma4_text", "gemma4_unified_text"), ("default", "proportional"))
"""Which values of `rope_type` a family may have, where not `ANY_ROTATION`."""


def longrope(found: dict[str, Any], longest: int) -> dict[str, Any]:
    """Return longrope's fields with the attention factor as transformers 5 computes it (arXiv 2402.13753)."""
    original, factor = found["original_max_position_embeddings"], found.pop("factor")
    factor = longest / original if factor is None else factor
    if found["attention_factor"] is None:
        found["attention_factor"] = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return found


def yarn(found: dict[str, Any]) -> dict[str, Any]:
    """Return yarn's fields with the attention factor as transformers 5 computes it (https://arxiv.org/abs/2309.00071).

    transformers 4 replaces `factor` by max_position_embeddings / original_max_position_embeddings.
    """
    scale, mscale, all_dim = found["factor"], found.pop("mscale"), found.pop("mscale_all_dim")

    def magnitude(weight: float = 1.0) -> float:
        return 0.1 * weight * math.log(scale) + 1.0 if scale > 1 else 1.0

    factor = found["attention_factor"]
    if factor is None:
        factor = magnitude(mscale) / magnitude(all_dim) if mscale and all_dim else magnitude()
    beta = {name: found[name] or ROPE_FIELDS["yarn"][1][name] for name in ("beta_fast", "beta_slow")}
    return found | beta | {"attention_factor": factor}

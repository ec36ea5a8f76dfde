"""The small nanochat model of the fixtures as one of ours: its description, and its weights in our tree."""

from __future__ import annotations

import numpy as np
from safetensors.numpy import load_file

from conf.schema.training.model import Model, family_switches
from tests.paths import ROOT
from trainer.models.weights import Params

FOLDER = ROOT / "tests" / "trainer" / "fixtures" / "nanochat"
VOCAB = 97
"""Token ids; the tables are padded to 128."""


def cfg(**compute: object) -> Model:
    """SSSL and a long last layer; a short one sees half of 24 tokens and the current one."""
    sizes = {
        "num_layers": 6,
        "dim": 24,
        "num_heads": 2,
        "num_kv_heads": 2,
        "head_dim": 12,
        "mlp_dim": 96,
        "vocab_size": VOCAB,
    }
    return Model(
        **family_switches("nanochat")
        | sizes
        | {"attention_pattern": "LLLGLG", "sliding_window": 13, "max_seq_len": 24}
        | compute
    )


def params() -> Params:
    """As NumPy arrays."""
    theirs = load_file(FOLDER / "model.safetensors")
    model = cfg()

    def stacked(name: str) -> np.ndarray:
        """[layers, in, out]"""
        return np.stack([theirs[f"transformer.h.{i}.{name}.weight"].T for i in range(model.num_layers)])

    def by_heads(name: str) -> np.ndarray:
        return stacked(name).reshape(model.num_layers, model.dim, model.num_heads, model.head_dim)

    def turned(name: str) -> np.ndarray:
        """nanochat rotates the other way round: the same as with the two halves of every head exchanged."""
        return np.roll(by_heads(name), model.head_dim // 2, axis=-1)

    return {
        "embedding": theirs["transformer.wte.weight"][:VOCAB],
        "unembedding": theirs["lm_head.weight"][:VOCAB],
        "layers": {
            "residual_scale": theirs["resid_lambdas"],
            "embedding_scale": theirs["x0_lambdas"],
            "query": turned("attn.c_q"),
            "key": turned("attn.c_k"),
            "value": by_heads("attn.c_v"),
            "output": stacked("attn.c_proj").reshape(model.num_layers, model.num_heads, model.head_dim, model.dim),
            "up": stacked("mlp.c_fc"),
            "down": stacked("mlp.c_proj"),
        },
    }

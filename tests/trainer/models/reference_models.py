"""The small models of the fixtures as ours: descriptions, weights in our tree, and what the references computed.

nanochat: its checkpoint has the names of its own program, which fixtures/make_nanochat.py writes out.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from safetensors.numpy import load_file

from conf.schema.training.model import Model, family_switches
from tests.paths import ROOT
from trainer.models.weights import Params
from trainer.pretrained import hf_families, hf_files

FIXTURES = ROOT / "tests" / "trainer" / "fixtures"
FAMILIES = ("gemma2", "gemma3", "llama3", "qwen2", "qwen3", "gpt2")
VARIANTS = ("llama_biases", "qwen2_window", "qwen3_biases", "gemma3_images", "gpt_oss_mxfp4")
"""With what a family may have, though its published models mostly do not: biases, yarn, windows, images, four bits."""
DERIVED = ("mistral", "ministral", "ministral3", "gemma", "smollm3", "olmo2", "granite", "phi3", "phi3_long", "olmo3")
DERIVED += ("qwen3_moe", "gpt_oss", "gemma4", "gemma4_e2b", "gemma4_moe", "qwen3_5", "qwen3_5_yarn", "qwen3_5_moe")
"""Families by what differs from another one; phi3_long has texts beyond the original context, gemma4_e2b layers that
share keys, and embeddings per layer, gemma4_moe experts too, qwen3_5 neighbouring value heads that share a key head."""
NANOCHAT = {"num_layers": 6, "dim": 24, "num_heads": 2, "num_kv_heads": 2, "head_dim": 12, "mlp_dim": 96}
"""SSSL and a long last layer; a short one sees half of 24 tokens and the current one."""
NANOCHAT |= {"vocab_size": 97, "attention_pattern": "LLLGLG", "sliding_window": 13, "max_seq_len": 24}


def described(family: str, **compute: object) -> Model:
    compute = {"activation_dtype": "float32"} | compute
    if family == "nanochat":
        return Model(**family_switches("nanochat") | NANOCHAT | compute)
    return hf_families.model_from_config(hf_files.read_config(epath.Path(FIXTURES / family)), **compute)


@cache
def params_of(family: str) -> Params:
    if family == "nanochat":
        return jax.tree.map(jnp.asarray, _nanochat_params())
    read = hf_files.read_params(epath.Path(FIXTURES / family), described(family))
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), read)


@cache
def expected_of(family: str) -> dict[str, np.ndarray]:
    """Tokens, prompts, and what transformers made of them; nanochat: what a program in torch did."""
    with np.load(FIXTURES / family / "expected.npz") as file:
        return dict(file)


def _nanochat_params() -> Params:
    theirs, model = load_file(FIXTURES / "nanochat" / "model.safetensors"), described("nanochat")

    def stacked(name: str) -> np.ndarray:
        """[layers, in, out]"""
        return np.stack([theirs[f"transformer.h.{i}.{name}.weight"].T for i in range(model.num_layers)])

    def by_heads(name: str) -> np.ndarray:
        return stacked(name).reshape(model.num_layers, model.dim, model.num_heads, model.head_dim)

    def turned(name: str) -> np.ndarray:
        """nanochat rotates the other way round: the same as with the two halves of every head exchanged."""
        return np.roll(by_heads(name), model.head_dim // 2, axis=-1)

    layers = {
        "residual_scale": theirs["resid_lambdas"],
        "embedding_scale": theirs["x0_lambdas"],
        "query": turned("attn.c_q"),
        "key": turned("attn.c_k"),
        "value": by_heads("attn.c_v"),
        "output": stacked("attn.c_proj").reshape(model.num_layers, model.num_heads, model.head_dim, model.dim),
        "up": stacked("mlp.c_fc"),
        "down": stacked("mlp.c_proj"),
    }
    tables = {"embedding": "transformer.wte.weight", "unembedding": "lm_head.weight"}  # of 128 rows, 97 of them tokens
    return {name: theirs[table][: model.vocab_size] for name, table in tables.items()} | {"layers": layers}

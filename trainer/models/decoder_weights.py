"""The decoder's weight table. Weights of all layers are stacked on a leading axis, so a checkpoint is the same whether
layers are scanned or unrolled.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import jax
from jax.nn.initializers import Initializer, normal, ones, zeros

from conf.schema.training.model import Model
from trainer.extension import model_family
from trainer.models import lora, maha, residual
from trainer.models.weights import Params, Weight, uniform


@dataclass(frozen=True)
class _Inits:
    embedding: Initializer
    unembedding: Initializer
    by_dim: Initializer  # products that read the residual stream
    output: Initializer  # attention's output projection
    down: Initializer  # the feed-forward block's output projection


def weight_table(cfg: Model) -> Params:
    """Return the tree of every `Weight` of the decoder."""
    if cfg.implementation is not None:
        own = model_family(cfg.implementation).weights(cfg)
        return jax.tree.map(lambda entry: Weight(*entry), own, is_leaf=lambda entry: isinstance(entry, tuple))
    inits = _inits(cfg)
    table = {
        "embedding": Weight((cfg.vocab_size, cfg.dim), ("vocab", "embed"), inits.embedding),
        "layers": {
            name: Weight((cfg.num_layers, *w.shape), ("layers", *w.axes), w.init)
            for name, w in _layer_weights(cfg, inits)
        },
        **dict(_norm_weights(cfg, "final_norm")),
    }
    if cfg.position_embedding == "learned":
        table["position_embedding"] = Weight((cfg.max_seq_len, cfg.dim), (None, "embed"), inits.by_dim)
    if cfg.norm_embedding:
        table |= dict(_norm_weights(cfg, "embedding_norm"))
    if not cfg.tie_word_embeddings:
        table["unembedding"] = Weight((cfg.vocab_size, cfg.dim), ("vocab", "embed"), inits.unembedding)
    return lora.with_adapters(table, cfg)


def _inits(cfg: Model) -> _Inits:
    width = cfg.num_heads * cfg.head_dim
    if cfg.init == "fan_in":
        by_dim = normal(cfg.dim**-0.5)
        return _Inits(by_dim, by_dim, by_dim, normal(width**-0.5), normal(cfg.mlp_dim**-0.5))
    if cfg.init == "gpt2":
        usual, into_stream = normal(0.02), normal(0.02 * (2 * cfg.num_layers) ** -0.5)
        return _Inits(usual, usual, usual, into_stream, into_stream)
    return _Inits(normal(1.0), normal(0.001), uniform((3 / cfg.dim) ** 0.5), zeros, zeros)


def _norm_weights(cfg: Model, name: str, axis: str = "embed", size: int | None = None) -> Iterator[tuple[str, Weight]]:
    """Yield a norm's weights: none, a gain, or a gain and a bias."""
    shape = (size or cfg.dim,)
    if cfg.norm != "rms_plain":
        yield name, Weight(shape, (axis,), zeros if cfg.norm == "rms_plus_one" else ones)
    if cfg.norm == "layer":
        yield f"{name}_bias", Weight(shape, (axis,), zeros)


def _layer_weights(cfg: Model, inits: _Inits) -> Iterator[tuple[str, Weight]]:
    yield from _attention_weights(cfg, inits)
    yield from maha.weight_entries(cfg, inits.by_dim)
    yield from _mlp_weights(cfg, inits)
    if cfg.residual_scalars:
        yield "residual_scale", Weight((), (), ones)
        yield "embedding_scale", Weight((), (), zeros)
    yield from residual.weight_entries(cfg)


def _attention_weights(cfg: Model, inits: _Inits) -> Iterator[tuple[str, Weight]]:
    yield from _norm_weights(cfg, "attention_norm")
    for name, heads, axis in (
        ("query", cfg.num_heads, "heads"),
        ("key", cfg.num_kv_heads, "kv_heads"),
        ("value", cfg.num_kv_heads, "kv_heads"),
    ):
        yield name, Weight((cfg.dim, heads, cfg.head_dim), ("embed", axis, "head_dim"), inits.by_dim)
        if cfg.biases in ("qkv", "attention", "all"):
            yield f"{name}_bias", Weight((heads, cfg.head_dim), (axis, "head_dim"), zeros)
    yield "output", Weight((cfg.num_heads, cfg.head_dim, cfg.dim), ("heads", "head_dim", "embed"), inits.output)
    if cfg.biases in ("attention", "all"):
        yield "output_bias", Weight((cfg.dim,), ("embed",), zeros)
    if cfg.qk_norm != "none":
        yield from _norm_weights(cfg, "query_norm", "head_dim", cfg.head_dim)
        yield from _norm_weights(cfg, "key_norm", "head_dim", cfg.head_dim)
    if cfg.post_norms:
        yield from _norm_weights(cfg, "post_attention_norm")


def _mlp_weights(cfg: Model, inits: _Inits) -> Iterator[tuple[str, Weight]]:
    yield from _norm_weights(cfg, "mlp_norm")
    gated = cfg.mlp in ("geglu", "swiglu")
    if gated:
        yield "gate", Weight((cfg.dim, cfg.mlp_dim), ("embed", "hidden"), inits.by_dim)
    yield "up", Weight((cfg.dim, cfg.mlp_dim), ("embed", "hidden"), inits.by_dim)
    yield "down", Weight((cfg.mlp_dim, cfg.dim), ("hidden", "embed"), inits.down)
    if cfg.biases in ("mlp", "all"):
        if gated:
            yield "gate_bias", Weight((cfg.mlp_dim,), ("hidden",), zeros)
        yield "up_bias", Weight((cfg.mlp_dim,), ("hidden",), zeros)
        yield "down_bias", Weight((cfg.dim,), ("embed",), zeros)
    if cfg.post_norms:
        yield from _norm_weights(cfg, "post_mlp_norm")

"""The decoder's weight table. Weights of all layers are stacked on a leading axis, so a checkpoint is the same whether
layers are scanned or unrolled.

With LoRA (https://arxiv.org/abs/2106.09685), frozen matrices W have trained adapters A and B of rank r: the layer
computes x W + scale (x A) B, with scale = lora_alpha / r. Adapters are entries of the table beside their matrix, so
meshes, optimizers, averages and checkpoints apply to them as to any weight.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import jax
import numpy as np
from jax.nn.initializers import Initializer, normal, ones, zeros

from conf.formats import RunFileError
from conf.schema.training.layer_kinds import holders, layer_kinds, plain_name, sized, stack_name
from conf.schema.training.model import Lora, Model
from conf.schema.training.weight_names import BESIDE_NORMS, INPUT_AXES, targeted_matrices, unmatched_modules
from trainer.extension import model_family
from trainer.models import delta_net, experts, maha, per_layer, residual
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
            name: replace(w, shape=(len(holders(cfg, name, range(cfg.num_layers))), *w.shape), axes=("layers", *w.axes))
            for name, w in _stacked_weights(cfg)
        },
        **dict(_norm_weights(cfg, "final_norm")),
    }
    if cfg.position_embedding == "learned":
        table["position_embedding"] = Weight((cfg.max_seq_len, cfg.dim), (None, "embed"), inits.by_dim)
    if cfg.norm_embedding:
        table |= dict(_norm_weights(cfg, "embedding_norm"))
    if cfg.per_layer_dim:
        table |= dict(_norm_weights(cfg, "per_layer_norm", head_dim=cfg.per_layer_dim))
    if not cfg.tie_word_embeddings:
        table["unembedding"] = Weight((cfg.vocab_size, cfg.dim), ("vocab", "embed"), inits.unembedding)
    return with_adapters(table, cfg)


def _inits(cfg: Model) -> _Inits:
    width = cfg.num_heads * cfg.head_dim
    if cfg.init == "fan_in":
        by_dim = normal(cfg.dim**-0.5)
        return _Inits(by_dim, by_dim, by_dim, normal(width**-0.5), normal(cfg.mlp_dim**-0.5))
    if cfg.init == "gpt2":
        usual, into_stream = normal(0.02), normal(0.02 * (2 * cfg.num_layers) ** -0.5)
        return _Inits(usual, usual, usual, into_stream, into_stream)
    return _Inits(normal(1.0), normal(0.001), uniform((3 / cfg.dim) ** 0.5), zeros, zeros)


def _norm_weights(cfg: Model, name: str, **sizes: int) -> Iterator[tuple[str, Weight]]:
    """Yield a norm's weights: none, a gain, or a gain and a bias. sizes: of its axes; by default the stream's."""
    sizes = sizes or {"embed": cfg.dim}
    shape, axes = tuple(sizes.values()), tuple(sizes)
    if cfg.norm != "rms_plain":
        yield name, Weight(shape, axes, zeros if cfg.norm == "rms_plus_one" else ones)
    if cfg.norm == "layer":
        yield f"{name}_bias", Weight(shape, axes, zeros)


def _stacked_weights(cfg: Model) -> Iterator[tuple[str, Weight]]:
    """Yield the stacks, each with a weight of one layer."""
    for kind in dict.fromkeys(layer_kinds(cfg)):
        of_kind = sized(cfg, kind)
        for name, weight in _layer_weights(of_kind, _inits(of_kind)):
            if (stack := stack_name(cfg, name, kind)) is not None:
                yield stack, weight


def _layer_weights(cfg: Model, inits: _Inits) -> Iterator[tuple[str, Weight]]:
    yield from _attention_weights(cfg, inits)
    yield from delta_net.weight_entries(cfg, inits.by_dim)
    yield from maha.weight_entries(cfg, inits.by_dim)
    yield from _mlp_weights(cfg, inits)
    if cfg.per_layer_dim:
        yield from per_layer.weight_entries(cfg, inits.by_dim)
        yield from _norm_weights(cfg, "post_per_layer_norm")
    if cfg.layer_scalars:
        yield "layer_scale", Weight((), (), ones, trained=False, counted=False)
    if cfg.residual_scalars:
        yield "residual_scale", Weight((), (), ones)
        yield "embedding_scale", Weight((), (), zeros)
    yield from residual.weight_entries(cfg)


def _attention_weights(cfg: Model, inits: _Inits) -> Iterator[tuple[str, Weight]]:
    if cfg.pre_norms:
        yield from _norm_weights(cfg, "attention_norm")
    for name, heads, axis in (
        ("query", cfg.num_heads, "heads"),
        ("key", cfg.num_kv_heads, "kv_heads"),
        ("value", cfg.num_kv_heads, "kv_heads"),
    ):
        yield name, Weight((cfg.dim, heads, cfg.head_dim), ("embed", axis, "head_dim"), inits.by_dim)
        if cfg.biases in ("qkv", "attention", "all"):
            yield f"{name}_bias", Weight((heads, cfg.head_dim), (axis, "head_dim"), zeros)
    if cfg.attention_gate:
        yield "query_gate", Weight((cfg.dim, cfg.num_heads, cfg.head_dim), ("embed", "heads", "head_dim"), inits.by_dim)
    yield "output", Weight((cfg.num_heads, cfg.head_dim, cfg.dim), ("heads", "head_dim", "embed"), inits.output)
    if cfg.biases in ("attention", "all"):
        yield "output_bias", Weight((cfg.dim,), ("embed",), zeros)
    if cfg.attention_sinks:
        yield "sink_logits", Weight((cfg.num_heads,), ("heads",), zeros)
    if cfg.qk_norm != "none":
        whole = cfg.qk_norm == "whole"
        for name, axis, heads in (("query", "heads", cfg.num_heads), ("key", "kv_heads", cfg.num_kv_heads)):
            yield from _norm_weights(cfg, f"{name}_norm", **({axis: heads} if whole else {}), head_dim=cfg.head_dim)
    if cfg.post_norms:
        yield from _norm_weights(cfg, "post_attention_norm")


def _mlp_weights(cfg: Model, inits: _Inits) -> Iterator[tuple[str, Weight]]:
    if cfg.pre_norms:
        yield from _norm_weights(cfg, "mlp_norm")
    matrices: dict[str, Weight] = {}
    if cfg.experts is not None:
        each = cfg.model_copy(update={"mlp_dim": cfg.experts.inner_dim or cfg.mlp_dim})
        matrices |= experts.weight_entries(each, inits.by_dim, _inits(each).down)
    if width := cfg.mlp_dim if cfg.has_dense_block else cfg.shared_dim:
        into = Weight((cfg.dim, width), ("embed", "hidden"), inits.by_dim)
        matrices |= ({"gate": into} if cfg.is_gated else {}) | {"up": into}
        down = _inits(cfg.model_copy(update={"mlp_dim": width})).down
        matrices["down"] = Weight((width, cfg.dim), ("hidden", "embed"), down)
    yield from matrices.items()
    if cfg.biases in ("mlp", "all"):
        for name, matrix in matrices.items():  # one number per output, of each expert's too
            kept = slice(None, None, 2) if name.startswith("expert_") else slice(-1, None)
            axes = (None,) if name == "router" else matrix.axes[kept]  # the router's is one vector of a layer
            yield f"{name}_bias", Weight(matrix.shape[kept], axes, zeros)
    if cfg.experts is not None and cfg.has_dense_block:
        yield "router_scale", Weight((cfg.dim,), ("embed",), ones)
        yield "expert_scale", Weight((cfg.experts.count,), (None,), ones)
        for name in BESIDE_NORMS:
            yield from _norm_weights(cfg, name)
    if cfg.post_norms:
        yield from _norm_weights(cfg, "post_mlp_norm")


def with_adapters(table: Params, cfg: Model) -> Params:
    """Return a weight table whose weights are frozen and whose adapters are trained.

    Raises RunFileError if a pattern of `model.lora.target_modules` matches no matrix.
    """
    lora = cfg.lora
    if lora is None:
        return table
    frozen = jax.tree.map(lambda w: replace(w, trained=False, dtype=lora.base_dtype), table)
    for key, why in unmatched_modules(cfg):
        raise RunFileError(f"{key}: {why}")
    for path, name in targeted_matrices(cfg).items():
        place = frozen["layers"] if path != name else frozen
        place |= dict(_adapter(name, table["layers"][name] if path != name else table[name], lora))
    return frozen


def _adapter(name: str, weight: Weight, lora: Lora) -> Iterator[tuple[str, Weight]]:
    """Yield the adapter of a weight: A begins as in PEFT, uniform within 1 / sqrt(inputs), and B with zeros."""
    if name == "unembedding":  # stored as [vocab, dim]
        (vocab, dim), (rows, columns) = weight.shape, weight.axes
        yield f"{name}_lora_a", Weight((dim, lora.r), (columns, None), uniform(dim**-0.5))
        yield f"{name}_lora_b", Weight((lora.r, vocab), (None, rows), zeros)
        return
    stacked = num_stacked(name)
    inputs = stacked + INPUT_AXES[plain_name(name)]
    axes, size = (*weight.axes[:inputs], None), math.prod(weight.shape[stacked:inputs])
    yield f"{name}_lora_a", Weight((*weight.shape[:inputs], lora.r), axes, uniform(size**-0.5))
    shape = (*weight.shape[:stacked], lora.r, *weight.shape[inputs:])
    yield f"{name}_lora_b", Weight(shape, (*weight.axes[:stacked], None, *weight.axes[inputs:]), zeros)


def num_stacked(name: str) -> int:
    """Return how many axes of a stack count matrices: the layers, and the experts if it is of these."""
    return 2 if name in experts.MATRICES else 1


def merged_weight(params: Params, name: str, cfg: Model) -> np.ndarray:
    """Return W + scale A B in float32, for a matrix of `params`, or of its layers, that has an adapter."""
    assert cfg.lora is not None, "only its adapters have such names"
    a, b = (np.asarray(params[f"{name}_lora_{part}"], np.float32) for part in "ab")
    weight = np.asarray(params[name]).astype(np.float32)
    if name == "unembedding":
        return weight + cfg.lora.scale * (a @ b).T
    of_layer = weight.shape[1 : num_stacked(name)]
    for i, (x, y) in enumerate(zip(a, b, strict=True)):  # one layer at a time: those of experts are large
        change = x.reshape(*of_layer, -1, cfg.lora.r) @ y.reshape(*of_layer, cfg.lora.r, -1)
        weight[i] += cfg.lora.scale * change.reshape(weight[i].shape)
    return weight

"""Hugging Face's tensor names and shapes of the supported models, and the weights that they are here.

Names as of transformers 5 (https://huggingface.co/docs/transformers/model_doc/gemma2 and so on).
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from conf.config_json import UnknownArchitectureError
from conf.schema.training.layer_kinds import holders, layer_kinds, sized, stack_name
from conf.schema.training.model import DeltaNet, Model
from conf.schema.training.weight_names import BESIDE_NORMS
from trainer.pretrained.hf_families import family_of, why_unpublished

Arrays = tuple[np.ndarray, ...]


class TensorMapping(NamedTuple):
    """One HF tensor and the weight it maps to. `ours` are keys of the tree, or of its "layers"."""

    hf_name: str  # with {i} for the layer index, {j} for the expert's
    param_names: tuple[str, ...]
    read: Callable[[np.ndarray], Arrays]
    write: Callable[..., np.ndarray]
    is_stacked: bool = False  # the tensor has all layers, as ours

    @property
    def is_per_layer(self) -> bool:
        return "{i}" in self.hf_name

    @property
    def in_layers(self) -> bool:
        return self.is_per_layer or self.is_stacked

    def places(self, cfg: Model) -> dict[str, tuple[int, ...]]:
        """Return the tensor's names, one, or one per layer, or per layer and expert, with its index in the weights."""
        if not self.is_per_layer:
            return {self.hf_name: ()}
        layers = enumerate(holders(cfg, self.param_names[0], range(cfg.num_layers)))
        if "{j}" not in self.hf_name:
            return {self.hf_name.format(i=layer): (place,) for place, layer in layers}
        experts = range(cfg.experts.count if cfg.experts is not None else 1)
        return {self.hf_name.format(i=layer, j=j): (place, j) for place, layer in layers for j in experts}


def tensor_mappings(cfg: Model) -> Iterator[TensorMapping]:
    """Yield all tensors of a checkpoint of the model. Raises UnknownArchitectureError for an unsupported family."""
    family = family_of(cfg)
    if family is None:
        raise UnknownArchitectureError(why_unpublished(cfg))
    if family == "gpt2":
        yield from _gpt2_tensors(cfg)
        return
    yield _copied("embed_tokens.weight", "embedding")
    yield _copied("norm.weight", "final_norm")
    if not cfg.tie_word_embeddings:
        yield _copied("lm_head.weight", "unembedding")
    if cfg.per_layer_dim:
        yield from _per_layer_tables(cfg)
    seen: set[tuple[str | None, ...]] = set()
    for kind in dict.fromkeys(layer_kinds(cfg)):
        for tensor in _layer_tensors(sized(cfg, kind), family):
            stacks = tuple(stack_name(cfg, name, kind) for name in tensor.param_names)
            if None not in stacks and stacks not in seen:
                seen.add(stacks)
                yield tensor._replace(param_names=stacks)


def tensors_without_use(cfg: Model) -> set[str]:
    """Return names of tensors that a checkpoint may have and the model does not compute with."""
    shared = range(cfg.num_layers - cfg.num_kv_shared_layers, cfg.num_layers)
    return {f"layers.{i}.self_attn.{part}.weight" for i in shared for part in ("k_proj", "v_proj", "k_norm", "v_norm")}


def _per_layer_tables(cfg: Model) -> Iterator[TensorMapping]:
    """Yield Gemma 4's tensors of all layers side by side, which are stacked here."""
    layers, width = cfg.num_layers, cfg.per_layer_dim
    yield TensorMapping(
        "embed_tokens_per_layer.weight",
        ("per_layer_table",),
        lambda x: (x.reshape(-1, layers, width).swapaxes(0, 1),),
        lambda x: x.swapaxes(0, 1).reshape(-1, layers * width),
        is_stacked=True,
    )
    yield TensorMapping(
        "per_layer_model_projection.weight",
        ("per_layer_input",),
        lambda x: (x.reshape(layers, width, -1).swapaxes(1, 2),),
        lambda x: x.swapaxes(1, 2).reshape(layers * width, -1),
        is_stacked=True,
    )
    yield _copied("per_layer_projection_norm.weight", "per_layer_norm")


def _layer_tensors(cfg: Model, family: str) -> Iterator[TensorMapping]:
    """Yield the tensors of a layer with the model's sizes."""
    layer = "layers.{i}."
    if cfg.pre_norms:
        yield _copied(f"{layer}input_layernorm.weight", "attention_norm")
    after = "post_attention_norm" if cfg.post_norms else "mlp_norm"
    yield _copied(f"{layer}post_attention_layernorm.weight", after)
    if cfg.post_norms:
        if cfg.pre_norms:
            yield _copied(f"{layer}pre_feedforward_layernorm.weight", "mlp_norm")
        yield _copied(f"{layer}post_feedforward_layernorm.weight", "post_mlp_norm")
    yield _merge_heads(f"{layer}self_attn.o_proj.weight", "output", cfg.num_heads)
    if family == "phi3":
        yield from _fused_tensors(cfg, layer)
        return
    for letter, name, heads in (
        ("q", "query", cfg.num_heads),
        ("k", "key", cfg.num_kv_heads),
        ("v", "value", cfg.num_kv_heads),
    ):
        split = _gated_query if cfg.attention_gate and name == "query" else _split_heads
        yield split(f"{layer}self_attn.{letter}_proj.weight", name, heads)
        if cfg.biases in ("qkv", "attention", "all"):
            yield _with_shape(f"{layer}self_attn.{letter}_proj.bias", f"{name}_bias", (heads, cfg.head_dim))
        if cfg.qk_norm != "none" and name != "value":
            shape = (heads, cfg.head_dim) if cfg.qk_norm == "whole" else (cfg.head_dim,)
            yield _with_shape(f"{layer}self_attn.{letter}_norm.weight", f"{name}_norm", shape)
    if cfg.biases in ("attention", "all"):
        yield _copied(f"{layer}self_attn.o_proj.bias", "output_bias")
    if cfg.delta_net is not None:
        yield from _delta_tensors(cfg.delta_net, f"{layer}linear_attn.")
    if cfg.attention_sinks:
        yield _copied(f"{layer}self_attn.sinks", "sink_logits")
    block = "mlp."
    if cfg.experts is not None:
        yield from {"gpt_oss": _gpt_oss_experts, "gemma4": _gemma4_experts}.get(family, _expert_tensors)(layer)
    if cfg.shared_dim:
        yield _turned(f"{layer}mlp.shared_expert_gate.weight", "shared_gate")
        block = "mlp.shared_expert."
    for name in ("gate", "up", "down") if cfg.has_dense_block or cfg.shared_dim else ():
        yield _turned(f"{layer}{block}{name}_proj.weight", name)
        if cfg.biases in ("mlp", "all"):
            yield _copied(f"{layer}{block}{name}_proj.bias", f"{name}_bias")
    if cfg.per_layer_dim:
        yield _turned(f"{layer}per_layer_input_gate.weight", "per_layer_gate")
        yield _turned(f"{layer}per_layer_projection.weight", "per_layer_output")
        yield _copied(f"{layer}post_per_layer_input_norm.weight", "post_per_layer_norm")
    if cfg.layer_scalars:
        yield _with_shape(f"{layer}layer_scalar", "layer_scale", (), joined=(1,))


def _delta_tensors(sizes: DeltaNet, layer: str) -> Iterator[TensorMapping]:
    """Yield the tensors of a Gated DeltaNet; queries, keys and values are rows of one, and of its convolution."""
    keys, values = (sizes.num_key_heads, sizes.key_head_dim), (sizes.num_value_heads, sizes.value_head_dim)
    shapes, mixed = (keys, keys, values), ("delta_query", "delta_key", "delta_value")
    ends = tuple(np.cumsum([heads * width for heads, width in shapes])[:-1])

    def split(x: np.ndarray) -> Arrays:
        parts = zip(np.split(x.reshape(len(x), -1), ends), shapes, strict=True)
        return tuple(part.T.reshape(-1, *shape) for part, shape in parts)

    def joined(*parts: np.ndarray) -> np.ndarray:
        return np.concatenate([part.reshape(len(part), -1).T for part in parts])

    yield TensorMapping(f"{layer}in_proj_qkv.weight", mixed, split, joined)
    kernels = tuple(f"{name}_kernel" for name in mixed)
    yield TensorMapping(f"{layer}conv1d.weight", kernels, split, lambda *parts: joined(*parts)[:, None])
    yield _split_heads(f"{layer}in_proj_z.weight", "delta_gate", sizes.num_value_heads)
    yield _turned(f"{layer}in_proj_b.weight", "delta_rate")
    yield _turned(f"{layer}in_proj_a.weight", "delta_decay")
    yield _copied(f"{layer}dt_bias", "delta_time_bias")
    yield _copied(f"{layer}A_log", "delta_decay_log")
    yield _copied(f"{layer}norm.weight", "delta_norm")
    yield _merge_heads(f"{layer}out_proj.weight", "delta_output", sizes.num_value_heads)


def _expert_tensors(layer: str) -> Iterator[TensorMapping]:
    """Yield the router's tensor and one per expert and matrix: what transformers writes."""
    yield TensorMapping(f"{layer}mlp.gate.weight", ("router",), lambda x: (x.T,), lambda x: x.T)
    for name in ("gate", "up", "down"):
        theirs = f"{layer}mlp.experts.{{j}}.{name}_proj.weight"
        yield TensorMapping(theirs, (f"expert_{name}",), lambda x: (x.T,), lambda x: x.T)


def _gpt_oss_experts(layer: str) -> Iterator[TensorMapping]:
    """Yield the tensors of gpt-oss: of all experts together, [experts, inputs, outputs], gate and up alternating."""

    def split(x: np.ndarray) -> Arrays:
        return x[..., ::2], x[..., 1::2]

    def joined(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        return np.stack([gate, up], axis=-1).reshape(*gate.shape[:-1], -1)

    yield _turned(f"{layer}mlp.router.weight", "router")
    yield _copied(f"{layer}mlp.router.bias", "router_bias")
    for suffix in ("", "_bias"):
        ours = (f"expert_gate{suffix}", f"expert_up{suffix}")
        yield TensorMapping(f"{layer}mlp.experts.gate_up_proj{suffix}", ours, split, joined)
        yield _copied(f"{layer}mlp.experts.down_proj{suffix}", f"expert_down{suffix}")


def _gemma4_experts(layer: str) -> Iterator[TensorMapping]:
    """Yield the tensors of Gemma 4's experts, packed, and of what is beside them."""
    yield _turned(f"{layer}router.proj.weight", "router")
    yield _copied(f"{layer}router.scale", "router_scale")
    yield _copied(f"{layer}router.per_expert_scale", "expert_scale")
    yield from _packed(f"{layer}experts.")
    theirs = ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")
    for name, ours in zip(theirs, BESIDE_NORMS, strict=True):
        yield _copied(f"{layer}{name}.weight", ours)


def quantized_names(cfg: Model) -> set[str]:
    """Return the names of weights that a checkpoint may have as two tensors of MXFP4: gpt-oss's matrices of experts."""
    tensors = tensor_mappings(cfg) if family_of(cfg) == "gpt_oss" else ()
    return {name for tensor in tensors for name in tensor.places(cfg) if name.endswith((".gate_up_proj", ".down_proj"))}


def packed_experts(cfg: Model) -> tuple[TensorMapping, ...]:
    """Return the tensors of all experts of a layer, where a checkpoint has them, or one for each expert: Qwen's.

    Transformers 5 computes with them, and writes them if it is told to.
    """
    return _packed("layers.{i}.mlp.experts.") if family_of(cfg) in ("qwen3_moe", "qwen3_5_moe") else ()


def _packed(experts: str) -> tuple[TensorMapping, ...]:
    """Return two tensors of all experts of a layer: gate_up_proj is [experts, gate's outputs and then up's, dim]."""

    def split(x: np.ndarray) -> Arrays:
        gate, up = np.split(x.swapaxes(1, 2), 2, axis=2)
        return gate, up

    def joined(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        return np.concatenate([gate, up], axis=2).swapaxes(1, 2)

    ours = ("expert_gate", "expert_up", "expert_down")
    return (
        TensorMapping(f"{experts}gate_up_proj", ours[:2], split, joined),
        TensorMapping(f"{experts}down_proj", ours[2:], lambda x: (x.swapaxes(1, 2),), lambda x: x.swapaxes(1, 2)),
    )


def _fused_tensors(cfg: Model, layer: str) -> Iterator[TensorMapping]:
    """Yield Phi-3's two products of several: rows of query, key and value, and of gate and up."""
    heads = (cfg.num_heads, cfg.num_kv_heads, cfg.num_kv_heads)
    ends = tuple(np.cumsum(heads)[:-1] * cfg.head_dim)

    def split(x: np.ndarray) -> Arrays:
        parts = zip(np.split(x, ends), heads, strict=True)
        return tuple(part.T.reshape(x.shape[1], count, cfg.head_dim) for part, count in parts)

    def joined(*parts: np.ndarray) -> np.ndarray:
        return np.concatenate([part.reshape(part.shape[0], -1).T for part in parts])

    yield TensorMapping(f"{layer}self_attn.qkv_proj.weight", ("query", "key", "value"), split, joined)
    halves = partial(np.split, indices_or_sections=2)
    yield TensorMapping(
        f"{layer}mlp.gate_up_proj.weight", ("gate", "up"), lambda x: tuple(part.T for part in halves(x)), joined
    )
    yield _turned(f"{layer}mlp.down_proj.weight", "down")


def _gpt2_tensors(cfg: Model) -> Iterator[TensorMapping]:
    heads = (cfg.num_heads, cfg.head_dim)
    layer = "h.{i}."
    yield _copied("wte.weight", "embedding")
    yield _copied("wpe.weight", "position_embedding")
    for theirs, ours in (("ln_f", "final_norm"), (f"{layer}ln_1", "attention_norm"), (f"{layer}ln_2", "mlp_norm")):
        yield _copied(f"{theirs}.weight", ours)
        yield _copied(f"{theirs}.bias", f"{ours}_bias")
    for kind, suffix in (("weight", ""), ("bias", "_bias")):
        yield TensorMapping(
            f"{layer}attn.c_attn.{kind}",
            tuple(f"{name}{suffix}" for name in ("query", "key", "value")),
            lambda x: tuple(part.reshape(*part.shape[:-1], *heads) for part in np.split(x, 3, axis=-1)),
            lambda *parts: np.concatenate([part.reshape(*part.shape[:-2], -1) for part in parts], axis=-1),
        )
    yield _with_shape(f"{layer}attn.c_proj.weight", "output", (*heads, cfg.dim), joined=(-1, cfg.dim))
    yield _copied(f"{layer}attn.c_proj.bias", "output_bias")
    for theirs, ours in (("c_fc", "up"), ("c_proj", "down")):
        yield _copied(f"{layer}mlp.{theirs}.weight", ours)
        yield _copied(f"{layer}mlp.{theirs}.bias", f"{ours}_bias")


def _copied(theirs: str, ours: str) -> TensorMapping:
    return TensorMapping(theirs, (ours,), lambda x: (x,), lambda x: x)


def _turned(theirs: str, ours: str) -> TensorMapping:
    return TensorMapping(theirs, (ours,), lambda x: (x.T,), lambda x: x.T)


def _with_shape(theirs: str, ours: str, shape: tuple[int, ...], joined: tuple[int, ...] = (-1,)) -> TensorMapping:
    return TensorMapping(theirs, (ours,), lambda x: (x.reshape(shape),), lambda x: x.reshape(joined))


def _split_heads(theirs: str, ours: str, heads: int) -> TensorMapping:
    """Map [heads * head_dim, dim] to [dim, heads, head_dim]."""
    return TensorMapping(
        theirs, (ours,), lambda x: (x.T.reshape(x.shape[1], heads, -1),), lambda x: x.reshape(x.shape[0], -1).T
    )


def _gated_query(theirs: str, ours: str, heads: int) -> TensorMapping:
    """Map rows of query and gate, head by head, to both as `_split_heads` does."""
    both = _split_heads(theirs, ours, heads)
    return both._replace(
        param_names=(ours, f"{ours}_gate"),
        read=lambda x: tuple(np.split(both.read(x)[0], 2, axis=-1)),
        write=lambda *parts: both.write(np.concatenate(parts, axis=-1)),
    )


def _merge_heads(theirs: str, ours: str, heads: int) -> TensorMapping:
    """Map [dim, heads * head_dim] to [heads, head_dim, dim]."""
    return TensorMapping(
        theirs, (ours,), lambda x: (x.T.reshape(heads, -1, x.shape[0]),), lambda x: x.reshape(-1, x.shape[-1]).T
    )

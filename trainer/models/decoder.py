"""The decoder: plain functions for every model family, configured by `conf.schema.training.model.Model`.

`weights` defines the parameters; `layers`, `attention` and `experts` compute the parts. Dropout is not supported.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from conf.formats import RunFileError
from conf.schema.training.layer_kinds import (
    LayerKind,
    has_own_values,
    holders,
    layer_kind,
    plain_name,
    sized,
)
from conf.schema.training.model import Model
from trainer.distributed import mesh as meshes
from trainer.extension import model_family
from trainer.models import delta_net, experts, maha, per_layer, residual
from trainer.models.attention import self_attention, soft_cap
from trainer.models.layers import (
    apply_rope,
    linear_by_rows,
    look_up,
    map_chunks,
    mlp,
    norm,
    plain_norm,
    project,
    rope_amplitude,
    rope_frequencies,
    scaled,
    scaled_by_position,
    weighted_sum,
)
from trainer.models.routes import Choose, Replay, chosen_alone
from trainer.models.weights import Params

REMAT_SAVED_NAMES = {
    "products": ("product", "output", "attention"),
    "outputs": ("output", "attention"),
    "offload": ("output", "attention"),
    "attention": ("attention",),
    "full": (),
    "chunks": (),
}
"""Names of the arrays inside a layer that are saved for the backward pass, by `model.remat`."""
ROUTES = ("route",)
"""Saved by all of them: which experts the tokens take, which another computation of the same could decide otherwise."""
FFN_CHUNK_TOKENS = 4096
"""Tokens per device in each feed-forward chunk with `model.remat` chunks.

The block's inner arrays, several times as wide as the residual stream, are the largest of all. Weights that `mesh.fsdp`
shards are gathered for each chunk, forward and backward: on v6e that takes longer than the matrix products.
"""


AttentionFn = Callable[[jax.Array, jax.Array, jax.Array, int | None, jax.Array | None], jax.Array]
"""Maps (query, key, value, window, sinks) to the attention output, [B, T, heads, head_dim]."""


def forward(
    params: Params,
    cfg: Model,
    tokens: jax.Array,
    positions: jax.Array,
    segments: jax.Array | None = None,
    attention: AttentionFn | None = None,
    recurrence: delta_net.Recurrence | None = None,
    replay: Replay | None = None,
) -> jax.Array:
    """Return hidden states after the final norm: [B, T, D], in the activation dtype.

    tokens, positions: [B, T] integers; positions count from 0 in each document. A token attends to the earlier tokens
    of its row with the same number in `segments` [B, T]; None means each row is one document. Give padding its own
    segment, 0, or place it on the right; ignore its output. attention, recurrence, replay: in place of its own.
    """
    if cfg.implementation is not None:
        return model_family(cfg.implementation).forward(params, cfg, tokens, positions, segments)
    attention, recurrence = attention or causal_attention(segments, cfg), recurrence or delta_net.over_rows(segments)
    return _forward(params, cfg, tokens, positions, attention, recurrence, None, replay)[0]


def forward_with_load(
    params: Params, cfg: Model, tokens: jax.Array, positions: jax.Array, segments: jax.Array | None
) -> tuple[jax.Array, experts.Load]:
    """Return `forward`, and the sum over all layers of how the tokens outside of segment 0 load the experts."""
    counted = jnp.ones(tokens.shape, jnp.float32) if segments is None else (segments != 0).astype(jnp.float32)
    attention, recurrence = causal_attention(segments, cfg), delta_net.over_rows(segments)
    hidden, load = _forward(params, cfg, tokens, positions, attention, recurrence, counted)
    assert load is not None, "the tokens that count are told"
    return hidden, load


def _forward(
    params: Params,
    cfg: Model,
    tokens: jax.Array,
    positions: jax.Array,
    attention: AttentionFn,
    recurrence: delta_net.Recurrence,
    counted: jax.Array | None,
    replay: Replay | None = None,
) -> tuple[jax.Array, Any]:
    first = embed(params, cfg, tokens, positions)
    own_input = per_layer.layer_input(params, cfg, tokens)
    layers = params["layers"] if replay is None else params["layers"] | {"number": jnp.arange(cfg.num_layers)}

    def layer(i: int, state: _State, weights: Params) -> _State:
        kind = layer_kind(cfg, i)

        def compute(x: jax.Array, first: jax.Array, weights: Params, shared: KeysAndValues | None) -> Any:
            measured: list[Any] = []
            choose = replay.choose(weights["number"], measured) if replay is not None else chosen_alone
            used: list[KeysAndValues] = []

            def attend(query: jax.Array, key: jax.Array, value: jax.Array, *how: Any) -> jax.Array:
                used.append((key, value))
                return attention(query, key, value, *how)

            x = decoder_layer(
                x, first, weights, cfg, positions, kind, attend, recurrence=recurrence,
                counted=counted, measured=measured, shared=shared, own_input=own_input, choose=choose,
            )  # fmt: skip
            own = used[-1] if kind.letter in state.shared and not kind.shares else None
            return x, measured[0] if measured else None, own

        shared = state.shared.get(kind.letter) if kind.shares else None
        x, load, own = _with_remat(compute, cfg)(state.x, first, weights, shared)
        kept = state.shared | ({} if own is None else {kind.letter: own})
        return _State(x, jax.tree.map(jnp.add, state.load, load), kept)

    begin: Any = experts.Load(*jnp.zeros(3)) if counted is not None else None if replay is None else jnp.float32(0)
    last = apply_layers(layers, cfg, _State(first, begin, _no_keys(cfg, first)), layer)
    if replay is not None:
        replay.changed = last.load
    return final_hidden(last.x, params, cfg), last.load


KeysAndValues = tuple[Any, Any]
"""What the queries of a layer attend to: keys and values of this layer or an earlier one."""


class _State(NamedTuple):
    x: jax.Array
    load: Any  # what the layers add up: experts.Load, or how many routes of a replay differ
    shared: dict[str, KeysAndValues]  # of the newest layer with each letter that later layers share


def _no_keys(cfg: Model, x: jax.Array) -> dict[str, KeysAndValues]:
    """Return keys and values before the first layer, of zeros, for each letter of layers that share them."""
    kinds = dict.fromkeys(layer_kind(cfg, i) for i in range(cfg.num_layers))
    sizes = {kind.letter: sized(cfg, kind) for kind in kinds if kind.shares}

    def zeros(sizes: Model) -> jax.Array:
        empty = jnp.zeros((*x.shape[:2], sizes.num_kv_heads, sizes.head_dim), x.dtype)
        return meshes.constrain(empty, "batch", None, "kv_heads", None)

    return {letter: (zeros(size), zeros(size)) for letter, size in sizes.items()}


def final_hidden(x: jax.Array, params: Params, cfg: Model) -> jax.Array:
    """Return hidden states [..., D] for the state after the last layer, divided by what divides the logits."""
    return scaled(norm(residual.merge_streams(x, cfg), params, "final_norm", cfg), 1 / cfg.logits_scaling)


def unembed(params: Params, cfg: Model, hidden: jax.Array) -> jax.Array:
    """Return float32 logits [..., vocab] for hidden states [..., D]. For whole sequences use `token_logprobs`."""
    with jax.named_scope("unembed"):
        logits = uncapped_logits(hidden, unembedding_matrix(params, cfg, hidden.dtype))
        return soft_cap(logits, cfg.final_logit_softcap)


def unembedding_matrix(params: Params, cfg: Model, dtype: jnp.dtype) -> jax.Array:
    """Return the output layer's weights, [vocab, D]."""
    table = params["embedding" if cfg.tie_word_embeddings else "unembedding"]
    if cfg.lora is not None and "unembedding_lora_a" in params:
        table = table + cfg.lora.scale * (params["unembedding_lora_a"] @ params["unembedding_lora_b"]).T
    return table.astype(dtype)


def uncapped_logits(hidden: jax.Array, table: jax.Array) -> jax.Array:
    """Return float32 logits [..., vocab] before the soft cap, from hidden states [..., D] and `unembedding_matrix`."""
    if hidden.dtype == jnp.float32 and jax.default_backend() == "cpu":
        return linear_by_rows(hidden, table)
    return jnp.einsum("...d,vd->...v", hidden, table, preferred_element_type=jnp.float32)


def embed(params: Params, cfg: Model, tokens: jax.Array, positions: jax.Array) -> jax.Array:
    """Return the first layer's input, [B, T, D] (times the residual streams), for tokens and positions [B, T]."""
    with jax.named_scope("embed"):
        x = look_up(meshes.constrain(params["embedding"], "vocab", "embed"), tokens, cfg)
        if cfg.scale_embedding:
            x = x * jnp.asarray(cfg.dim**0.5, cfg.activation_dtype)
        x = scaled(x, cfg.embedding_multiplier)
        if cfg.position_embedding == "learned":
            x = x + look_up(meshes.constrain(params["position_embedding"], None, "embed"), positions, cfg)
        if cfg.norm_embedding:
            x = norm(x, params, "embedding_norm", cfg)
        return meshes.constrain(residual.split_streams(x, cfg), "batch", None, None)


def causal_attention(segments: jax.Array | None, cfg: Model) -> AttentionFn:
    """Return the attention of whole rows; see `forward`."""
    if cfg.attention_form == "maha" and segments is not None:
        raise RunFileError("model.attention_form: maha needs one document per row, so not data.packing=documents")
    return lambda query, key, value, window, sinks: self_attention(query, key, value, segments, window, cfg, sinks)


def apply_layers(layers: Params, cfg: Model, state: Any, layer: Callable[[int, Any, Params], Any]) -> Any:
    """Apply `layer` (number, state, its weights) for all layers.

    If scanned, then over periods of the attention pattern, so that each window is a constant; only the number's place
    in the pattern is right, and whether the layer is one of the last that share keys.
    """
    with_own = cfg.num_layers - cfg.num_kv_shared_layers
    for start, end in ((0, with_own), (with_own, cfg.num_layers)) if cfg.num_kv_shared_layers else ((0, with_own),):
        state = _apply_stretch(layers, cfg, state, layer, start, end)
    return state


def _apply_stretch(
    layers: Params, cfg: Model, state: Any, layer: Callable[[int, Any, Params], Any], start: int, end: int
) -> Any:
    """Apply layers of one stretch, whose kinds repeat with the pattern."""
    period = len(cfg.attention_pattern)
    whole = (end - start) // period if cfg.scan_layers else 0
    rest = start + whole * period

    def part(first: int, last: int) -> Params:
        ends = {name: [len(holders(cfg, name, range(at))) for at in (first, last)] for name in layers}
        return {name: layers[name][a:b] for name, (a, b) in ends.items() if b > a}

    def step(state: Any, group: Params) -> tuple[Any, None]:
        for i, weights in enumerate(unstack_layers(group, cfg, range(start, start + period)), start):
            state = layer(i, state, weights)
        return state, None

    if whole:
        stacked = jax.tree.map(lambda w: w.reshape(whole, len(w) // whole, *w.shape[1:]), part(start, rest))
        state, _ = lax.scan(step, state, stacked)
    tail = layers if (rest, end) == (0, cfg.num_layers) else part(rest, end)
    for i, weights in enumerate(unstack_layers(tail, cfg, range(rest, end)), rest):
        state = layer(i, state, weights)
    return state


def _with_remat(compute: Callable[..., Any], cfg: Model) -> Callable[..., Any]:
    """Wrap `compute` to save what `model.remat` selects for the backward pass; inputs are always saved."""
    if cfg.remat == "none":
        return compute
    policies, names = jax.checkpoint_policies, REMAT_SAVED_NAMES[cfg.remat]
    if cfg.remat == "offload":  # to the memory of the TPU's host, while the next layers are computed
        offloaded = {"names_which_can_be_saved": ROUTES, "names_which_can_be_offloaded": names}
        places = {"offload_src": "device", "offload_dst": "pinned_host"}
        return jax.checkpoint(compute, policy=policies.save_and_offload_only_these_names(**offloaded, **places))
    return jax.checkpoint(compute, policy=policies.save_only_these_names(*names, *ROUTES))


def unstack_layers(stacks: Params, cfg: Model, layers: range) -> list[Params]:
    """Return the weights of each of these layers, under the names that a layer has for them; see `layer_kinds`.

    stacks: of these layers. Splitting makes the gradient one concatenation; indexing would sum padded arrays.
    """
    found: list[Params] = [{} for _ in layers]
    for name, stack in stacks.items():
        pieces = lax.split(stack, (1,) * len(stack)) if len(stack) else []
        for layer, piece in zip(holders(cfg, name, layers), pieces, strict=True):
            found[layer - layers.start][plain_name(name)] = piece.squeeze(0)
    return found


def decoder_layer(
    x: jax.Array,
    first: jax.Array,
    weights: Params,
    cfg: Model,
    positions: jax.Array,
    kind: LayerKind,
    attention: AttentionFn,
    connect: residual.Connection = residual.connect,
    *,
    recurrence: delta_net.Recurrence | None = None,
    counted: jax.Array | None = None,
    measured: list[Any] | None = None,
    shared: KeysAndValues | None = None,
    own_input: per_layer.LayerInput | None = None,
    choose: Choose = chosen_alone,
) -> jax.Array:
    """Return the residual stream [B, T, D] after one layer.

    first: the stream before all layers; weights: this layer's own; kind: its `layer_kind`; connect: adds a branch to
    the stream; recurrence: of a recurrent layer, in place of attention; counted, measured: the tokens of
    `experts.feed_forward`, and where it puts the load of its experts; choose: see `routes`; own_input: see `per_layer`;
    shared: what the attention of a layer without keys gets in their place.
    """
    cfg = sized(cfg, kind)
    if cfg.residual_scalars:
        x = weighted_sum(x, first, weights["residual_scale"], weights["embedding_scale"])

    def one_scale(x: jax.Array, own: Params, positions: jax.Array, value: jax.Array | None = None) -> jax.Array:
        query, key, projected = _project_qkv(x, own, cfg, positions, kind, shared)
        window = cfg.sliding_window if kind.is_local else None
        mixed = attention(query, key, projected if value is None else value, window, own.get("sink_logits"))
        if cfg.attention_gate:
            mixed = mixed * jax.nn.sigmoid(checkpoint_name(project(x, own, "query_gate", cfg), "attention"))
        return checkpoint_name(project(mixed.reshape(*mixed.shape[:2], -1), own, "output", cfg), "output")

    def begun(x: jax.Array, name: str) -> jax.Array:
        return norm(x, weights, name, cfg) if cfg.pre_norms else x

    def ended(out: jax.Array, name: str) -> jax.Array:
        return scaled(norm(out, weights, name, cfg) if cfg.post_norms else out, cfg.residual_multiplier)

    def attend(x: jax.Array) -> jax.Array:
        x = begun(x, "attention_norm")
        if kind.is_recurrent:
            assert recurrence is not None, "what recurrent layers compute with"
            return ended(delta_net.compute(x, weights, cfg, recurrence), "post_attention_norm")
        attend_to = partial(maha.attend, cfg=cfg, one_scale=one_scale) if cfg.attention_form == "maha" else one_scale
        return ended(attend_to(x, weights, positions), "post_attention_norm")

    def feed_forward(x: jax.Array) -> jax.Array:
        inner = begun(x, "mlp_norm")
        if cfg.experts is None:
            return ended(mlp(inner, weights, cfg), "post_mlp_norm")
        if cfg.has_dense_block:
            out, load = experts.beside_dense(x, mlp(inner, weights, cfg), weights, cfg, counted, choose)
        else:
            out, load = experts.feed_forward(inner, weights, cfg, counted, choose)
        if measured is not None and load is not None:
            measured.append(load)
        return ended(out, "post_mlp_norm")

    with jax.named_scope("attention"):
        x = connect(attend, x, weights, "attention", cfg)
    with jax.named_scope("mlp"):
        x = map_chunks(lambda x: connect(feed_forward, x, weights, "mlp", cfg), _ffn_chunk_size(x, cfg), x)
    if own_input is not None:
        with jax.named_scope("per_layer"):
            x = x + per_layer.compute(x, own_input(first, weights), weights, cfg)
    if cfg.layer_scalars:
        x = x * weights["layer_scale"].astype(x.dtype)
    return meshes.constrain(x, "batch", None, None)


def _ffn_chunk_size(x: jax.Array, cfg: Model) -> int:
    """Return the most positions of each row per feed-forward chunk."""
    if cfg.remat != "chunks":
        return x.shape[1]
    return max(1, FFN_CHUNK_TOKENS // meshes.rows_per_device(x.shape[0]))


def _project_qkv(
    x: jax.Array,
    weights: Params,
    cfg: Model,
    positions: jax.Array,
    kind: LayerKind,
    shared: KeysAndValues | None,
) -> tuple[jax.Array, Any, Any]:
    """Return a layer's query (scaled), key and value [B, T, heads, head_dim], with rotary positions applied.

    A layer without keys returns those that it shares.
    """

    def heads(name: str) -> jax.Array:
        out = project(x, weights, name, cfg)
        return meshes.constrain(out, "batch", None, "heads" if name == "query" else "kv_heads", None)

    def placed(name: str, out: jax.Array) -> jax.Array:
        if cfg.qk_norm in ("before_rotation", "whole"):
            out = norm(out, weights, f"{name}_norm", cfg)
        if cfg.position_embedding == "rope" and kind.is_rotated:
            out = apply_rope(out, positions, frequencies, amplitude)
        return norm(out, weights, f"{name}_norm", cfg) if cfg.qk_norm == "after_rotation" else out

    local = kind.is_local
    frequencies, amplitude = rope_frequencies(cfg, positions, local=local), rope_amplitude(cfg, local=local)
    query = placed("query", heads("query")) * jnp.asarray((cfg.query_pre_attn_scalar or cfg.head_dim) ** -0.5, x.dtype)
    query = scaled_by_position(query, positions, cfg, local=local)
    if kind.shares:
        assert shared is not None, "keys and values of an earlier layer"
        return checkpoint_name(query, "attention"), *shared
    projected = heads("key")
    key = placed("key", projected)
    value = heads("value") if has_own_values(cfg, kind) else projected
    if cfg.value_norm:
        value = plain_norm(value, cfg)
    return tuple(checkpoint_name(part, "attention") for part in (query, key, value))  # pyright: ignore[reportReturnType]

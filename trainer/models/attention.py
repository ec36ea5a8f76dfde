"""Causal grouped-query attention with logit soft-capping and local windows.

Holds the plain reference and the kernels that replace it on TPU and GPU. `choose_kernel` selects one.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from conf.schema.training.model import Model
from trainer.distributed import mesh as meshes

Kernel = Literal["plain", "splash", "cudnn"]

SPLASH_BLOCK = 512
"""Queries and keys per block of the TPU kernel; sequences are padded to a multiple of 128."""
LANES = 128
FUSED_BLOCKS = 4
"""Most blocks of keys with which one kernel computes all gradients: it writes that of the queries once per block."""


def choose_kernel(cfg: Model, backend: str) -> Kernel:
    """Return the kernel for a model on a backend: the one `model.attention` names, or the fastest that supports it.

    cuDNN has no soft-capping, here no sinks, and requires bfloat16; splash (Pallas, TPU only) supports everything.
    """
    if cfg.attention != "auto":
        return cfg.attention
    if backend == "tpu":
        return "splash"
    is_plain = cfg.attn_logit_softcap is None and not cfg.attention_sinks
    if backend in ("gpu", "cuda") and is_plain and cfg.activation_dtype == "bfloat16":
        return "cudnn"
    return "plain"


def soft_cap(logits: jax.Array, cap: float | None) -> jax.Array:
    """Return cap * tanh(logits / cap), which bounds logits to +-cap; None leaves them unchanged."""
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def attention_weights(logits: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """Return the softmax of the last axis of [B, kv_heads, n, S]; n: the query heads of a key head, or each for T.

    sinks: [heads], logits of what each head may attend to without getting anything, or None.
    """
    if sinks is None:
        return jax.nn.softmax(logits, axis=-1)
    kv_heads, rows = logits.shape[1:3]
    own = sinks.astype(logits.dtype).reshape(kv_heads, -1)
    own = jnp.repeat(own, rows // own.shape[1], axis=1)[None, :, :, None]
    highest = lax.stop_gradient(jnp.maximum(logits.max(axis=-1, keepdims=True), own))
    weights = jnp.exp(logits - highest)
    return weights / (weights.sum(axis=-1, keepdims=True) + jnp.exp(own - highest))


def self_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: jax.Array | None,
    window: int | None,
    cfg: Model,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Compute causal self-attention over whole sequences.

    query: [B, T, heads, head_dim], already scaled; key, value: [B, T, kv_heads, head_dim]. Each key head serves heads /
    kv_heads neighbouring query heads. segments: [B, T]; tokens attend only within their own segment; None means one
    document. window: how many tokens a token attends to, itself included; None means no limit. sinks: see
    `attention_weights`. Returns [B, T, heads, head_dim].
    """
    match choose_kernel(cfg, jax.default_backend()):
        case "splash":
            return run_per_device(partial(splash_attention, window=window, cfg=cfg), query, key, value, segments, sinks)
        case "cudnn" if segments is None and sinks is None:
            left = query.shape[1] if window is None else window - 1
            return jax.nn.dot_product_attention(
                query, key, value, is_causal=True, scale=1.0, local_window_size=(left, 0), implementation="cudnn"
            )
        case _:
            index = jnp.arange(query.shape[1])
            mask = in_window((index[:, None] - index[None, :])[None], window)
            if segments is not None:
                mask = mask & (segments[:, :, None] == segments[:, None, :])
            return masked_attention(query, key, value, mask, cfg.attn_logit_softcap, sinks)


def masked_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array,
    cap: float | None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Compute softmax attention with plain einsums, in float32 between the two products. This is the reference.

    mask: [B or 1, T, S], True where a token may attend; the other arguments are as in `self_attention`. Heads are moved
    before tokens, and the query heads of a key head follow each other as further queries: XLA on CPU takes twice as
    long for the gradients of products whose batch axes are not the first ones.
    """
    batch, length, heads, head_dim = query.shape
    kv_heads = key.shape[2]
    shared = heads // kv_heads
    grouped = query.reshape(batch, length, kv_heads, shared, head_dim).transpose(0, 2, 3, 1, 4)
    grouped = grouped.reshape(batch, kv_heads, shared * length, head_dim)
    key, value = key.swapaxes(1, 2), value.swapaxes(1, 2)
    logits = jnp.einsum("bkth,bksh->bkts", grouped, key, preferred_element_type=jnp.float32)
    seen = jnp.tile(mask, (1, shared, 1))[:, None]
    logits = jnp.where(seen, soft_cap(logits, cap), jnp.finfo(jnp.float32).min)
    mixed = jnp.einsum("bkts,bksh->bkth", attention_weights(logits, sinks).astype(value.dtype), value)
    mixed = mixed.reshape(batch, kv_heads, shared, length, head_dim).transpose(0, 3, 1, 2, 4)
    return mixed.reshape(query.shape)


def in_window(distance: jax.Array, window: int | None) -> jax.Array:
    """Return whether a token may attend to another one `distance` positions before it."""
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def run_per_device(
    attention: Callable[..., jax.Array],
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: jax.Array | None,
    *sinks: jax.Array | None,
) -> jax.Array:
    """Run a kernel that the partitioner cannot split; each device computes its own rows and heads independently."""
    if meshes.context_mesh() is None:
        return attention(query, key, value, segments, *sinks)
    rows = meshes.partition_spec("batch", None)
    by_head, by_kv_head = (meshes.partition_spec("batch", None, axis, None) for axis in ("heads", "kv_heads"))
    given = (query, key, value, segments, *sinks)
    each = (by_head, by_kv_head, by_kv_head, rows, *(meshes.partition_spec("heads") for _ in sinks))
    specs = tuple(None if x is None else spec for x, spec in zip(given, each, strict=True))
    return jax.shard_map(attention, in_specs=specs, out_specs=by_head, check_vma=False)(*given)


def splash_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: jax.Array | None,
    sinks: jax.Array | None = None,
    *,
    window: int | None,
    cfg: Model,
    interpret: bool = False,
) -> jax.Array:
    """Run JAX's TPU kernel (jax.experimental.pallas.ops.tpu.splash_attention), which skips fully masked blocks.

    interpret: run it without a TPU, for tests.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    _, length, heads, head_dim = query.shape
    padded = -(-length // LANES) * LANES
    block = next(size for size in (SPLASH_BLOCK, 384, 256, LANES) if padded % size == 0)
    shape = (padded, padded)
    mask = masks.CausalMask(shape) if window is None else masks.LocalMask(shape, (window - 1, 0), 0)
    most = 4 * block if head_dim <= LANES else 2 * block  # the kernel's memory on v5e
    wide = next(size for size in (most, 2 * block, block) if padded % size == 0)
    # two kernels compute the logits twice, but skip what a window hides
    fused = window is None and padded // wide <= FUSED_BLOCKS
    run = kernels.make_splash_mha(
        masks.MultiHeadMask([mask] * heads),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=cfg.attn_logit_softcap,
        block_sizes=kernels.BlockSizes(
            block_q=block, block_kv=block, block_kv_compute=block, block_q_dkv=block,
            block_kv_dkv=wide if fused else block, block_kv_dkv_compute=block, use_fused_bwd_kernel=fused,
            block_q_dq=None if fused else block, block_kv_dq=None if fused else block,
        ),
        residual_checkpoint_name="attention",
        interpret=interpret,
    )  # fmt: skip

    def ready(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, 0), (0, padded - length), (0, 0), (0, -head_dim % LANES)))
        return x.swapaxes(1, 2)  # [B, heads, T, head_dim]

    ids = None
    if segments is not None:
        segments = jnp.pad(segments, ((0, 0), (0, padded - length)), constant_values=-1)
        ids = kernels.SegmentIds(segments, segments)
    of_rows = (ready(query), ready(key), ready(value), ids)
    out = jax.vmap(lambda *row: run(*row, sinks=sinks), in_axes=(0, 0, 0, None if ids is None else 0))(*of_rows)
    assert isinstance(out, jax.Array)
    return lax.slice_in_dim(out.swapaxes(1, 2)[..., :head_dim], 0, length, axis=1)

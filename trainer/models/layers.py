"""Parts of a decoder layer: norms, rotary positions, the feed-forward block. Plain functions of arrays."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from conf.schema.training.model import Model, RopeScaling
from trainer.distributed.mesh import constrain
from trainer.models.weights import Params

SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
"""Of clamped_swiglu: with that factor the sigmoid is about GELU's; what is larger than the limit is cut off."""


def map_chunks(function: Callable[..., Any], size: int, *arrays: jax.Array) -> Any:
    """Call `function` on chunks of at most `size` positions of arrays [B, T, ...].

    Intermediates exist for one chunk at a time and are recomputed in the backward pass. function: takes chunks
    [B, n, ...] of the arrays and returns a pytree of arrays [B, n, ...]; positions must be independent.
    """
    length = arrays[0].shape[1]
    count, size = _equal_chunks(length, size)
    if count == 1:
        return function(*arrays)

    def split(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, 0), (0, count * size - length), *((0, 0),) * (x.ndim - 2)))
        return x.reshape(x.shape[0], count, size, *x.shape[2:]).swapaxes(0, 1)

    def join(x: jax.Array) -> jax.Array:
        x = x.swapaxes(0, 1)
        return x.reshape(x.shape[0], count * size, *x.shape[3:])[:, :length]

    checkpointed = jax.checkpoint(function)
    return jax.tree.map(join, lax.map(lambda chunk: checkpointed(*chunk), tuple(split(x) for x in arrays)))


def _equal_chunks(length: int, most: int) -> tuple[int, int]:
    """Return number and size of chunks of at most `most` positions: without padding if a few more chunks avoid it.

    7 chunks of 1,365 for 8,192 positions would be a sixth of padding; 8 of 1,024 have none.
    """
    least = -(-length // most)
    count = next((n for n in range(least, least + least // 4 + 1) if length % n == 0), least)
    return count, -(-length // count)


def linear(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Multiply [B, T, D] by [D, ...] to get [B, T, ...], in the dtype of x.

    The product is computed on matrices: for higher-rank products XLA on CPU copies the operands of the gradients, which
    costs a sixth of a small model's update time.
    """
    matrix = weight.reshape(weight.shape[0], -1)
    if x.dtype == jnp.bfloat16 and matrix.dtype == jnp.float32:
        out = _narrow_product(x.reshape(-1, x.shape[-1]), matrix)
    else:
        # on CPU, the gradient of a tall weight takes half the time if it is computed as that of a wide one
        product = _tall_product if jax.default_backend() == "cpu" and matrix.shape[0] > matrix.shape[1] else jnp.matmul
        out = product(x.reshape(-1, x.shape[-1]), matrix.astype(x.dtype))
    return out.reshape(*x.shape[:-1], *weight.shape[1:])


@jax.custom_vjp
def _narrow_product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Multiply bfloat16 by a float32 weight, as bfloat16. The weight's gradient leaves the product as float32.

    As JAX derives it, each device's part would be rounded to bfloat16, and the parts be added up so over `mesh.fsdp`.
    """
    return x @ weight.astype(x.dtype)


def _narrow_product_forward(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _narrow_product(x, weight), (x, weight)


def _narrow_product_backward(saved: tuple[jax.Array, jax.Array], change: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weight = saved
    return change @ weight.astype(x.dtype).T, jnp.matmul(x.T, change, preferred_element_type=jnp.float32)


_narrow_product.defvjp(_narrow_product_forward, _narrow_product_backward)


@jax.custom_vjp
def _tall_product(x: jax.Array, weight: jax.Array) -> jax.Array:
    return x @ weight


def _tall_product_forward(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return x @ weight, (x, weight)


def _tall_product_backward(saved: tuple[jax.Array, jax.Array], change: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weight = saved
    # without the barrier, XLA would merge the transposition into the product
    return change @ weight.T, lax.optimization_barrier(change.T @ x).T


_tall_product.defvjp(_tall_product_forward, _tall_product_backward)


@jax.custom_vjp
def linear_by_rows(x: jax.Array, table: jax.Array) -> jax.Array:
    """Multiply [..., D] by the transpose of [V, D] to get [..., V].

    The gradient of the table is computed as that of its transpose. Otherwise XLA on CPU transposes the gradient of the
    logits, in the loop that computes it: a fifth of the update time of a small model.
    """
    return (x.reshape(-1, x.shape[-1]) @ table.T).reshape(*x.shape[:-1], -1)


def _linear_by_rows_forward(x: jax.Array, table: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return linear_by_rows(x, table), (x, table)


def _linear_by_rows_backward(saved: tuple[jax.Array, jax.Array], change: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, table = saved
    rows = change.reshape(-1, change.shape[-1])
    gradient = lax.optimization_barrier(x.reshape(-1, x.shape[-1]).T @ rows).T
    return (rows @ table).reshape(x.shape), gradient


linear_by_rows.defvjp(_linear_by_rows_forward, _linear_by_rows_backward)


def look_up(table: jax.Array, ids: jax.Array, cfg: Model) -> jax.Array:
    """Return the rows [B, T, D] of a table [n, D] in the activation dtype.

    Each device looks up its columns for all rows: neither the table nor its gradient is ever gathered. Rows are cast
    after the look-up: the gradient of a row that occurs thousands of times would stagnate if it were added up in
    bfloat16.
    """
    found = table[constrain(ids, "rows", None)].astype(cfg.activation_dtype)
    return constrain(found, "rows", None, "embed")


def project(x: jax.Array, weights: Params, name: str, cfg: Model) -> jax.Array:
    """Multiply [B, T, D] by the matrix `name`, with its LoRA adapter and its bias if the tree has them.

    The first axes of the matrix whose sizes multiply to D are its inputs.
    """

    def matrix(weight: jax.Array) -> jax.Array:
        inputs = next(n for n in range(1, weight.ndim) if math.prod(weight.shape[:n]) == x.shape[-1])
        return weight.reshape(x.shape[-1], *weight.shape[inputs:])

    out = linear(x, matrix(weights[name]))
    if cfg.lora is not None and (a := weights.get(f"{name}_lora_a")) is not None:
        out = out + cfg.lora.scale * linear(linear(x, matrix(a)), weights[f"{name}_lora_b"])
    return add_bias(out, weights, name)


def add_bias(x: jax.Array, weights: Params, name: str) -> jax.Array:
    """Add `name`_bias, if the tree has it, to x; shape and dtype are preserved.

    The sum is in float32, and so is that of the bias's gradient over all tokens, which would stagnate in bfloat16.
    """
    bias = weights.get(f"{name}_bias")
    return x if bias is None else (x.astype(jnp.float32) + bias).astype(x.dtype)


def weighted_sum(x: jax.Array, y: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """Return a x + b y for float32 scalars a and b, in the dtype of x.

    It is computed in float32, and so are the sums over all entries that are the gradients of the scalars.
    """

    def compute(x: jax.Array, y: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        return (a * x.astype(jnp.float32) + b * y.astype(jnp.float32)).astype(x.dtype)

    return jax.checkpoint(compute, prevent_cse=False)(x, y, a, b)  # keeps x and y as they are, not in float32


def scaled(x: jax.Array, factor: float) -> jax.Array:
    """Multiply by a constant of the config in float32, since bfloat16 would round the constant too."""
    return x if factor == 1 else (x.astype(jnp.float32) * factor).astype(x.dtype)


def norm(x: jax.Array, weights: Params, name: str, cfg: Model) -> jax.Array:
    """Normalize the last axis in float32: RMSNorm (https://arxiv.org/abs/1910.07467) or LayerNorm, by `model.norm`.

    weights: a tree that may hold `name` (the gain) and `name`_bias. A gain of several axes normalizes as many. Shape
    and dtype are preserved.
    """
    wide = x.astype(jnp.float32)
    axes = tuple(range(-weights[name].ndim, 0)) if name in weights else -1
    if cfg.norm == "layer":
        wide = wide - jnp.mean(wide, axis=axes, keepdims=True)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=axes, keepdims=True) + cfg.norm_eps)
    if cfg.norm == "rms_plus_one":
        wide = wide * (1 + weights[name])
    elif cfg.norm != "rms_plain":
        wide = wide * weights[name]
    if cfg.norm == "layer":
        wide = wide + weights[f"{name}_bias"]
    return wide.astype(x.dtype)


def plain_norm(x: jax.Array, cfg: Model) -> jax.Array:
    """Normalize the last axis as `norm` does, without a gain."""
    return norm(x, {}, "", cfg.model_copy(update={"norm": "rms_plain"}))


def rope_frequencies(cfg: Model, positions: jax.Array, *, local: bool) -> np.ndarray | jax.Array:
    """Return `rope_inv_freq` for positions [B, T]; that of longrope by the row's longest text, [B, 1, 1, n]."""
    scaling, frequencies = _rope_scaling(cfg, local), rope_inv_freq(cfg, local=local)
    if scaling is None or scaling.kind != "longrope":
        return frequencies
    is_long = jnp.max(positions, axis=1)[:, None, None, None] >= scaling.original_max_position_embeddings
    return jnp.where(is_long, rope_inv_freq(cfg, local=local, long=True), frequencies)


def rope_inv_freq(cfg: Model, *, local: bool, long: bool = False) -> np.ndarray:
    """Return radians per token for each rotated pair of a head's entries, float32, by `model.rope_scaling`.

    long: those of longrope in long texts.
    """
    half = cfg.rotated_dim // 2
    base = (cfg.rope_local_theta or cfg.rope_theta) if local else cfg.rope_theta
    frequencies = base ** (-np.arange(half, dtype=np.float64) / half)
    scaling = _rope_scaling(cfg, local)
    if scaling is None:
        return frequencies.astype(np.float32)
    if scaling.kind == "linear":
        return (frequencies / scaling.factor).astype(np.float32)
    if scaling.kind == "proportional":
        turned = np.arange(half) < int(scaling.partial_rotary_factor * cfg.rotated_dim // 2)
        return np.where(turned, frequencies / scaling.factor, 0).astype(np.float32)
    if scaling.kind == "longrope":
        return (frequencies / (scaling.long_factor if long else scaling.short_factor)).astype(np.float32)
    if scaling.kind == "yarn":
        first, last = (
            half * math.log(scaling.original_max_position_embeddings / (turns * 2 * math.pi)) / math.log(base)
            for turns in (scaling.beta_fast, scaling.beta_slow)
        )
        if scaling.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, cfg.rotated_dim - 1)
        kept = 1 - np.clip((np.arange(half) - first) / (last - first or 0.001), 0, 1)
    else:
        waves = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)  # in the original context
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = np.clip((waves - low) / (high - low), 0, 1)
    return (kept * frequencies + (1 - kept) * frequencies / scaling.factor).astype(np.float32)


def rope_amplitude(cfg: Model, *, local: bool) -> float:
    """Return the factor of the sines and cosines: the attention factor of yarn and longrope, else 1."""
    return getattr(_rope_scaling(cfg, local), "attention_factor", 1.0)


def scaled_by_position(query: jax.Array, positions: jax.Array, cfg: Model, *, local: bool) -> jax.Array:
    """Multiply queries [B, T, heads, head_dim] beyond the original context, by `llama_4_scaling_beta` of yarn.

    positions: [B, T], which count from 0 in each document, so a token sampled with a cache has the same factor.
    """
    scaling = _rope_scaling(cfg, local)
    if scaling is None or scaling.kind != "yarn" or not scaling.llama_4_scaling_beta:
        return query
    contexts = positions // scaling.original_max_position_embeddings
    factor = 1 + scaling.llama_4_scaling_beta * jnp.log1p(contexts.astype(jnp.float32))
    return query * factor[:, :, None, None].astype(query.dtype)


def _rope_scaling(cfg: Model, local: bool) -> RopeScaling | None:
    """Return the layer's scaling: a base of their own means that local layers have none."""
    return None if local and cfg.rope_local_theta else cfg.rope_scaling


def apply_rope(
    x: jax.Array, positions: jax.Array, frequencies: np.ndarray | jax.Array, amplitude: float = 1.0
) -> jax.Array:
    """Apply rotary position embedding (https://arxiv.org/abs/2104.09864), pairing the two halves of what is rotated.

    x: [B, T, heads, head_dim]; positions: [B, T] integers; frequencies: [..., n <= head_dim / 2], radians per token, of
    the first 2 n entries of a head, the others stay; amplitude: factor of what is rotated. Shape and dtype are
    preserved; angles are float32.
    """
    turned, rest = jnp.split(x, [2 * frequencies.shape[-1]], axis=-1)
    angles = positions[:, :, None, None].astype(jnp.float32) * frequencies
    sin, cos = ((amplitude * wave).astype(x.dtype) for wave in (jnp.sin(angles), jnp.cos(angles)))
    left, right = jnp.split(turned, 2, axis=-1)
    parts = [left * cos - right * sin, right * cos + left * sin]
    return jnp.concatenate([*parts, rest] if rest.shape[-1] else parts, axis=-1)


def gated(gate: jax.Array, up: jax.Array, cfg: Model) -> jax.Array:
    """Return the input of the last product of a gated feed-forward block, from the outputs of the first ones."""
    if cfg.mlp == "geglu":
        return jax.nn.gelu(gate, approximate=True) * up
    if cfg.mlp == "swiglu":
        return jax.nn.silu(gate) * up
    gate = jnp.minimum(gate, SWIGLU_LIMIT)
    return gate * jax.nn.sigmoid(SWIGLU_ALPHA * gate) * (1 + jnp.clip(up, -SWIGLU_LIMIT, SWIGLU_LIMIT))


def mlp(x: jax.Array, weights: Params, cfg: Model) -> jax.Array:
    """Apply the feed-forward block to [B, T, D]; shape and dtype are preserved."""

    def wide(name: str) -> jax.Array:
        out = project(x, weights, name, cfg)
        return constrain(checkpoint_name(out, "product"), "batch", None, "hidden")

    up = wide("up")
    if cfg.is_gated:
        inner = gated(wide("gate"), up, cfg)
    else:
        inner = jax.nn.gelu(up, approximate=True) if cfg.mlp == "gelu" else jnp.square(jax.nn.relu(up))
    return checkpoint_name(project(inner, weights, "down", cfg), "output")

"""Gated DeltaNet (https://arxiv.org/abs/2412.06464), the layers D of Qwen 3.5: attention with a memory of one size.

Each head keeps a matrix S, which maps keys to values. A token with key k, value v, decay a and learning rate b changes
it to a S + b k (v - (a S)^T k)^T, then reads it with its query. A short causal convolution mixes each entry of queries,
keys and values with those of the tokens before.

Rows are computed in chunks (section 3.3 of the paper): in a chunk, what each token writes depends on what those before
it wrote by a triangular system, so that all tokens together cost a few products of matrices. Always in float32.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.nn.initializers import Initializer, normal, ones

from conf.schema.training.layer_kinds import DELTA_CHUNK
from conf.schema.training.model import DeltaNet, Model
from trainer.distributed.mesh import constrain
from trainer.models.layers import norm, project
from trainer.models.weights import Params, Weight

MIXED = ("delta_query", "delta_key", "delta_value")
"""Projections that the convolution mixes."""
HEAD_AXES = ("kv_heads", "kv_heads", "heads")
"""Logical axes of their heads: both are split over `mesh.tensor`."""
precise = partial(jnp.einsum, precision=lax.Precision.HIGHEST)
"""TPUs would round the factors of a float32 product to bfloat16, and errors of the memory add up."""


class Inputs(NamedTuple):
    """What tokens give a layer."""

    mixed: tuple[jax.Array, ...]  # queries, keys, values [B, T, heads, head_dim], to be convolved
    log_decay: jax.Array  # float32 [B, T, value heads], at most 0
    rate: jax.Array  # float32 [B, T, value heads], between 0 and 1


class Memory(NamedTuple):
    """What a layer knows of earlier tokens: arrays, or their partitions."""

    recent: tuple[Any, ...]  # the newest entries of `Inputs.mixed`, [B, conv_kernel_dim - 1, heads, head_dim]
    state: Any  # float32 [B, value heads, key_head_dim, value_head_dim]


Recurrence = Callable[[Inputs, tuple[jax.Array, ...]], jax.Array]
"""Maps (inputs, the kernels of `MIXED` [conv_kernel_dim, heads, head_dim]) to what the tokens read, [B, T, value heads,
value_head_dim]."""


def compute(x: jax.Array, weights: Params, cfg: Model, recurrence: Recurrence) -> jax.Array:
    """Return the output [B, T, D] of a layer for normalized input [B, T, D]."""

    def projected(name: str, axis: str) -> jax.Array:
        out = checkpoint_name(project(x, weights, name, cfg), "attention")
        return constrain(out, "batch", None, axis, *(None,) * (out.ndim - 3))

    query, key, value = (projected(name, axis) for name, axis in zip(MIXED, HEAD_AXES, strict=True))
    gate = projected("delta_gate", "heads").astype(jnp.float32)
    time = jax.nn.softplus(projected("delta_decay", "heads").astype(jnp.float32) + weights["delta_time_bias"])
    inputs = Inputs(
        (query, key, value),
        -jnp.exp(weights["delta_decay_log"]) * time,
        jax.nn.sigmoid(projected("delta_rate", "heads").astype(jnp.float32)),
    )
    out = recurrence(inputs, tuple(weights[f"{name}_kernel"].astype(jnp.float32) for name in MIXED))
    plain = cfg.model_copy(update={"norm": "rms"})
    out = (norm(out, weights, "delta_norm", plain) * jax.nn.silu(gate)).astype(x.dtype)
    return checkpoint_name(project(out.reshape(*out.shape[:2], -1), weights, "delta_output", cfg), "output")


def over_rows(segments: jax.Array | None) -> Recurrence:
    """Return the recurrence of whole rows, which begins anew with each segment [B, T]; None: one document per row."""
    return lambda inputs, kernels: run(inputs, kernels, segments=segments)[0]


def empty_memory(cfg: DeltaNet, rows: int, dtype: Any) -> Memory:
    """Return the memory of no token."""
    keys, values = (cfg.num_key_heads, cfg.key_head_dim), (cfg.num_value_heads, cfg.value_head_dim)
    recent = tuple(jnp.zeros((rows, cfg.conv_kernel_dim - 1, *size), dtype) for size in (keys, keys, values))
    return Memory(recent, jnp.zeros((rows, cfg.num_value_heads, cfg.key_head_dim, cfg.value_head_dim)))


def run(
    inputs: Inputs,
    kernels: tuple[jax.Array, ...],
    memory: Memory | None = None,
    *,
    segments: jax.Array | None = None,
    counted: jax.Array | None = None,
) -> tuple[jax.Array, Memory]:
    """Return what the tokens of rows read, [B, T, value heads, value_head_dim] in float32, and the memory after them.

    memory: before the rows; segments: [B, T], where its number changes, a document begins; counted: bool [B, T], False
    for padding before and after the tokens, which leaves the memory as it is.
    """
    mixed, log_decay, rate = inputs
    rows, length = rate.shape[:2]
    if counted is not None:
        mixed = tuple(jnp.where(counted[..., None, None], x, 0) for x in mixed)
        log_decay, rate = (jnp.where(counted[..., None], x, 0) for x in (log_decay, rate))
    document = jnp.zeros((rows, length), jnp.int32)
    if segments is not None:
        changes = (segments[:, 1:] != segments[:, :-1]).astype(jnp.int32)
        document = document.at[:, 1:].set(jnp.cumsum(changes, axis=1))
    size = kernels[0].shape[0]
    before = [None] * 3 if memory is None else memory.recent
    joined = [_after(x, recent, size - 1) for x, recent in zip(mixed, before, strict=True)]
    query, key, value = (_convolved(x, w, document) for x, w in zip(joined, kernels, strict=True))
    query, key = (_repeated(_normalized(x), value.shape[2]) for x in (query, key))
    ends = jnp.full(rows, length)
    if counted is not None:
        ends = jnp.max(jnp.where(counted, jnp.arange(1, length + 1), 0), axis=1)
    recent = tuple(jax.vmap(lambda row, end: lax.dynamic_slice_in_dim(row, end, size - 1))(x, ends) for x in joined)
    query = query * query.shape[-1] ** -0.5
    if length == 1 and memory is not None:
        out, state = _one_token(query, key, value, log_decay, rate, memory.state)
    else:
        state = None if memory is None else memory.state
        out, state = _chunks(query, key, value, log_decay, rate, document, state)
    return out, Memory(recent, state)


def _after(x: jax.Array, recent: jax.Array | None, size: int) -> jax.Array:
    """Return [B, size + T, ...] with the tokens before the row, zeros if there are none."""
    if recent is None:
        return jnp.pad(x, ((0, 0), (size, 0), (0, 0), (0, 0)))
    return jnp.concatenate([recent.astype(x.dtype), x], axis=1)


def _convolved(x: jax.Array, kernel: jax.Array, document: jax.Array) -> jax.Array:
    """Return silu of the causal convolution of [B, size - 1 + T, ...] with [size, ...], within documents [B, T]."""
    size, length = len(kernel), document.shape[1]
    known = jnp.concatenate([jnp.zeros_like(document[:, :1])] * (size - 1) + [document], axis=1)
    total = jnp.zeros((), jnp.float32)
    for i in range(size):
        same = known[:, i : i + length] == document
        total = total + jnp.where(same[..., None, None], x[:, i : i + length].astype(jnp.float32) * kernel[i], 0)
    return jax.nn.silu(total)


def _normalized(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def _repeated(x: jax.Array, heads: int) -> jax.Array:
    """Return [B, T, heads, head_dim], where neighbouring value heads share a key head."""
    rows, length, own, width = x.shape
    shape = (rows, length, own, heads // own, width)
    return jnp.broadcast_to(x[:, :, :, None], shape).reshape(rows, length, heads, width)


def _one_token(
    query: jax.Array, key: jax.Array, value: jax.Array, log_decay: jax.Array, rate: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    query, key, value, decay, rate = (x[:, 0] for x in (query, key, value, jnp.exp(log_decay), rate))
    state = state * decay[..., None, None]
    wrong = rate[..., None] * (value - precise("bhkv,bhk->bhv", state, key))
    state = state + key[..., :, None] * wrong[..., None, :]
    return precise("bhkv,bhk->bhv", state, query)[:, None], state


def _chunks(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array,
    rate: jax.Array,
    document: jax.Array,
    state: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Return what [B, T, ...] read, and the state after them, by chunks of tokens."""
    rows, length, heads, width = value.shape
    size = min(DELTA_CHUNK, length)
    count = -(-length // size)

    def split(x: jax.Array, mode: str = "constant") -> jax.Array:
        """Return chunks first: [N, B, heads, C, ...]."""
        x = jnp.pad(x, ((0, 0), (0, count * size - length), *((0, 0),) * (x.ndim - 2)), mode=mode)
        x = x.reshape(rows, count, size, *x.shape[2:]).swapaxes(0, 1)
        return jnp.moveaxis(x, 2, 3) if x.ndim > 3 else x

    query, key, value, log_decay, rate = map(split, (query, key, value, log_decay, rate))
    document = split(document, "edge")
    total = jnp.cumsum(log_decay, axis=-1)
    same = document[..., :, None] == document[..., None, :]
    seen = (same & np.tri(size, dtype=bool))[:, :, None]
    decay = jnp.exp(jnp.where(seen, total[..., :, None] - total[..., None, :], -jnp.inf))
    scores = precise("nbhck,nbhsk->nbhcs", query, key) * decay
    system = jnp.where(np.tri(size, k=-1, dtype=bool), precise("nbhck,nbhsk->nbhcs", key, key) * decay, 0)
    inverse = _unit_inverse(system * rate[..., None])
    # the state before a chunk is of the document that the chunk before ended with
    last = document[:, :, -1:]
    first = jnp.concatenate([jnp.zeros_like(last[:1]), last[:-1]])
    kept = jnp.exp(total) * (document == first)[:, :, None]
    left = jnp.exp(total[..., -1:] - total) * (document == last)[:, :, None]
    wanted = precise("nbhcs,nbhsv->nbhcv", inverse, value * rate[..., None])
    known = precise("nbhcs,nbhsk->nbhck", inverse, key * (rate * kept)[..., None])

    def chunk(state: jax.Array, parts: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        query, key, scores, wanted, known, kept = parts
        written = wanted - precise("bhck,bhkv->bhcv", known, state)
        out = precise("bhck,bhkv->bhcv", query, state) + precise("bhcs,bhsv->bhcv", scores, written)
        return state * kept[..., None, None] + precise("bhck,bhcv->bhkv", key, written), out

    if state is None:
        state = jnp.zeros((rows, heads, key.shape[-1], width))
        state = constrain(state, "batch", "heads", None, None)
    parts = (query * kept[..., None], key * left[..., None], scores, wanted, known, kept[..., -1])
    state, out = lax.scan(chunk, state, parts)
    out = jnp.moveaxis(out, 3, 2).swapaxes(0, 1)  # [B, N, C, heads, head_dim]
    return out.reshape(rows, count * size, heads, width)[:, :length], state


@jax.custom_vjp
def _unit_inverse(lower: jax.Array) -> jax.Array:
    """Return the inverse of I + L, for a strictly lower triangular L [..., C, C], by products of matrices.

    Blocks on the diagonal are inverted, of 1, 2, 4 ... rows. A sum of powers of L would cancel where keys repeat.
    """
    size = lower.shape[-1]
    at = np.arange(size)
    inverse = jnp.broadcast_to(jnp.eye(size, dtype=lower.dtype), lower.shape)
    block = 1
    while block < size:
        pair = (at[:, None] // (2 * block) == at // (2 * block)) & (at[:, None] // block > at // block)
        below = jnp.where(pair, lower, 0)
        inverse = inverse - precise("...ab,...bc,...cd->...ad", inverse, below, inverse)
        block *= 2
    return inverse


def _unit_inverse_forward(lower: jax.Array) -> tuple[jax.Array, jax.Array]:
    inverse = _unit_inverse(lower)
    return inverse, inverse


def _unit_inverse_backward(inverse: jax.Array, change: jax.Array) -> tuple[jax.Array]:
    return (-precise("...ba,...bc,...dc->...ad", inverse, change, inverse),)


_unit_inverse.defvjp(_unit_inverse_forward, _unit_inverse_backward)


def weight_entries(cfg: Model, by_dim: Initializer) -> Iterator[tuple[str, Weight]]:
    """Yield the weights of one layer."""
    sizes = cfg.delta_net
    if sizes is None:
        return
    keys, values = (sizes.num_key_heads, sizes.key_head_dim), (sizes.num_value_heads, sizes.value_head_dim)
    for name, size, axis in zip(MIXED, (keys, keys, values), HEAD_AXES, strict=True):
        yield name, Weight((cfg.dim, *size), ("embed", axis, "head_dim"), by_dim)
        kernel = normal(sizes.conv_kernel_dim**-0.5)
        yield f"{name}_kernel", Weight((sizes.conv_kernel_dim, *size), (None, axis, "head_dim"), kernel)
    yield "delta_gate", Weight((cfg.dim, *values), ("embed", "heads", "head_dim"), by_dim)
    for name in ("delta_rate", "delta_decay"):
        yield name, Weight((cfg.dim, values[0]), ("embed", "heads"), by_dim)
    yield "delta_time_bias", Weight(values[:1], ("heads",), ones)
    yield "delta_decay_log", Weight(values[:1], ("heads",), _log_of_uniform)
    yield "delta_norm", Weight(values[1:], ("head_dim",), ones)
    output = normal((values[0] * values[1]) ** -0.5)
    yield "delta_output", Weight((*values, cfg.dim), ("heads", "head_dim", "embed"), output)


def _log_of_uniform(key: jax.Array, shape: Any, dtype: Any = jnp.float32, out_sharding: Any = None) -> jax.Array:
    """Draw the logarithm of a decay per unit of time between 0.01 and 16, as transformers does."""
    return jnp.log(jax.random.uniform(key, shape, dtype, 0.01, 16.0, out_sharding=out_sharding))

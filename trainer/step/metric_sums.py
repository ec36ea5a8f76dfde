"""Sums and counts that losses return instead of means, because they add up over any split of the batch.

The result therefore does not depend on the number of devices, however unevenly tokens are spread over them.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree

from trainer.distributed import mesh as meshes
from trainer.models.weights import Params


class Mean(NamedTuple):
    """Sum over (a part of) the batch, and the count or weight to divide it by."""

    total: jax.Array
    weight: jax.Array


class Max(NamedTuple):
    """Largest value in (a part of) the batch."""

    value: jax.Array


class Min(NamedTuple):
    """Smallest value in (a part of) the batch."""

    value: jax.Array


class EffectiveSampleSize(NamedTuple):
    """Kish's effective sample size of importance weights, as a share of their number: (sum w)^2 / (n sum w^2)."""

    total: jax.Array
    squares: jax.Array
    weight: jax.Array


Metric = Mean | Max | Min | EffectiveSampleSize
MetricSums = dict[str, Metric]
"""Scalars by name."""


def merge(a: MetricSums, b: MetricSums) -> MetricSums:
    """Combine the sums of two parts of the batch."""

    def both(x: Any, y: Any) -> Metric:
        match x:
            case Max():
                return Max(jnp.maximum(x.value, y.value))
            case Min():
                return Min(jnp.minimum(x.value, y.value))
        return type(x)(*(a + b for a, b in zip(x, y, strict=True)))

    return {name: both(entry, b[name]) for name, entry in a.items()}


def zero(sums: MetricSums) -> MetricSums:
    """Return the sums of an empty batch, with the same names. Merging them changes nothing."""
    empty = {
        Mean: Mean(*[jnp.float32(0)] * 2),
        EffectiveSampleSize: EffectiveSampleSize(*[jnp.float32(0)] * 3),
        Max: Max(jnp.float32(-jnp.inf)),
        Min: Min(jnp.float32(jnp.inf)),
    }
    return {name: empty[type(entry)] for name, entry in sums.items()}


def finalize(sums: MetricSums) -> dict[str, jax.Array]:
    """Return means and extremes by name. A mean over nothing is NaN; the loss is 0, because nothing has diverged."""

    def value(name: str, entry: Metric) -> jax.Array:
        if isinstance(entry, EffectiveSampleSize):
            return entry.total**2 / (entry.weight * entry.squares)
        if not isinstance(entry, Mean):
            return entry.value
        return jnp.where(entry.weight == 0, 0 if name == "loss" else jnp.nan, entry.total / entry.weight)

    return {name: value(name, entry) for name, entry in sums.items()}


def all_reduce(gradients: Params, sums: MetricSums) -> tuple[Params, MetricSums]:
    """Combine gradients and sums of all devices inside a `shard_map`, as one vector, plus a second for extremes."""
    if lax.axis_size(meshes.MESH_AXES) == 1:
        return gradients, sums  # the copies to and from the vector cost more than the rest of the optimizer on CPU
    extremes = {name: entry for name, entry in sums.items() if isinstance(entry, Max | Min)}
    flat, unravel = ravel_pytree((gradients, {n: entry for n, entry in sums.items() if n not in extremes}))
    gradients, sums = unravel(lax.psum(flat, meshes.MESH_AXES))
    if extremes:
        # a minimum is the negated maximum of negated values: one collective does both
        signed = jnp.stack([_sign(entry) * entry.value for entry in extremes.values()])
        largest = zip(extremes.items(), lax.pmax(signed, meshes.MESH_AXES), strict=True)
        sums |= {name: type(entry)(_sign(entry) * value) for (name, entry), value in largest}
    return gradients, sums


def _sign(extreme: Max | Min) -> float:
    return 1.0 if isinstance(extreme, Max) else -1.0

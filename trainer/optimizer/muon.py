"""Muon: orthogonalized momentum (https://kellerjordan.github.io/posts/muon/) for the matrices of the layers."""

from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec

from conf.schema.training.model import AnyModel
from conf.schema.training.optimizer import Muon
from trainer.distributed import mesh as meshes
from trainer.optimizer.rules import MatrixView, map_with_path, matrix_views, schedule_factor

NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b, c of a x + b x^3 + c x^5 from the Muon post: steep at 0, and close enough to 1 after five iterations."""

POLAR_EXPRESS_COEFFICIENTS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
"""Published with https://arxiv.org/abs/2505.16932 and used by nanochat: for 5 steps, with a margin of 2 %."""
NORM_MARGIN = 1.02
EPSILON = 1e-10


class MuonState(NamedTuple):
    """Number of updates, momentum of each weight, and mean squares per row or column of each matrix, or None."""

    done: Any
    momentum: Any
    variance: Any


def scale_by_muon(opt: Muon, cfg: AnyModel) -> optax.GradientTransformation:
    """Return the transformation from gradients to directions, for weights that are layer matrices.

    The device mesh in context shards the layers, so that a matrix's products need no other device.
    """
    shapes, by_count = matrix_views(cfg), schedule_factor(opt.momentum_schedule)

    def init(params: Any) -> Any:
        def zeros(path: str, x: jax.Array) -> jax.Array:
            layers, inputs, outputs = shapes[path].shape
            return jnp.zeros((layers, max(inputs, outputs)), x.dtype)

        variance = None if opt.normuon_b2 is None else map_with_path(zeros, params)
        return MuonState(jnp.int32(0), jax.tree.map(jnp.zeros_like, params), variance)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        kept = opt.momentum * by_count(state.done)
        ahead = momentum = jax.tree.map(lambda m, g: m + (1 - kept) * (g - m), state.momentum, updates)
        if opt.nesterov:
            ahead = jax.tree.map(lambda m, g: g + kept * (m - g), momentum, updates)
        matrices, tree = jax.tree.flatten(ahead)
        paths = jax.tree.leaves(map_with_path(lambda path, _: path, ahead))
        variances = jax.tree.leaves(state.variance) or [None] * len(paths)
        found = [
            _direction(x, variance, shapes[path], opt)
            for path, x, variance in zip(paths, matrices, variances, strict=True)
        ]
        directions, grown = (tree.unflatten(part) for part in zip(*found, strict=True))
        return directions, MuonState(state.done + 1, momentum, None if state.variance is None else grown)

    return optax.GradientTransformation(init, update)


def _direction(
    x: jax.Array, variance: jax.Array | None, view: MatrixView, opt: Muon
) -> tuple[jax.Array, jax.Array | None]:
    """Return one weight's direction, in the weight's shape, and its new mean squares."""
    layers = view.shape[0]
    out = orthogonalize(
        _shard_first_axis(x.reshape(view.shape)),
        opt.orthogonalization,
        opt.orthogonalization_steps,
        jnp.dtype(opt.orthogonalization_dtype),
    )
    if variance is not None and opt.normuon_b2 is not None:
        out, variance = normalize_neurons(out, _shard_first_axis(variance), opt.normuon_b2)
        variance = variance[:layers]
    whole = meshes.constrain(out[:layers], *(axes[0] for axes in view.axes))
    return whole.reshape(x.shape).astype(x.dtype), variance


def orthogonalize(
    x: jax.Array, method: Literal["newton_schulz", "polar_express"], steps: int, dtype: jnp.dtype
) -> jax.Array:
    """Drive all singular values of the matrices [N, m, n] near 1, in `dtype`, by successive odd polynomials."""
    product = partial(jnp.matmul, precision=lax.Precision.HIGHEST if dtype == jnp.float32 else None)
    wide = x.shape[1] <= x.shape[2]
    x = (x if wide else x.swapaxes(1, 2)).astype(dtype)
    norm = jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=(1, 2), keepdims=True))
    if method == "polar_express":
        polynomials, norm = POLAR_EXPRESS_COEFFICIENTS[:steps], norm * NORM_MARGIN + 1e-6
    else:
        polynomials, norm = (NEWTON_SCHULZ_COEFFICIENTS,) * steps, jnp.maximum(norm, 1e-7)
    x = (x / norm).astype(dtype)

    def polynomial(x: jax.Array, coefficients: jax.Array) -> tuple[jax.Array, None]:
        a, b, c = coefficients
        gram = product(x, x.swapaxes(1, 2))
        odd = (b * gram + c * product(gram, gram)).astype(dtype)
        return (a * x + product(odd, x)).astype(dtype), None

    x, _ = lax.scan(polynomial, x, jnp.float32(polynomials))  # unrolled, it would dominate compile time
    return x if wide else x.swapaxes(1, 2)


def normalize_neurons(x: jax.Array, variance: jax.Array, decay: float) -> tuple[jax.Array, jax.Array]:
    """Apply NorMuon (https://arxiv.org/abs/2510.05491) to matrices [N, m, n], and update its running mean.

    Rows or columns along the longer axis are scaled to similar size by a running mean square [N, max(m, n)]. The norm
    of each matrix is preserved.
    """
    _, inputs, outputs = x.shape
    across = 1 if outputs >= inputs else 2  # the axis to average over
    squares = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=across)
    variance = variance + (1 - decay) * (squares - variance)
    scale = lax.rsqrt(jnp.maximum(variance, EPSILON))
    before = jnp.sqrt(jnp.sum(squares, axis=1, keepdims=True))
    after = jnp.sqrt(jnp.sum(squares * jnp.square(scale), axis=1, keepdims=True))
    scale = scale * before / jnp.maximum(after, EPSILON / x.shape[across] ** 0.5)
    return x * jnp.expand_dims(scale, across).astype(x.dtype), variance


def _shard_first_axis(x: jax.Array) -> jax.Array:
    """Shard the first axis over the mesh in context, padded to a multiple of the devices."""
    mesh = meshes.context_mesh()
    if mesh is None:
        return x
    filled = jnp.pad(x, ((0, -x.shape[0] % mesh.size), *((0, 0),) * (x.ndim - 1)))
    return lax.with_sharding_constraint(filled, PartitionSpec(meshes.MESH_AXES))

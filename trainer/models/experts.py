"""Experts: a feed-forward block of several, of which a router gives each token the likeliest ones. None is dropped.

Copies of the tokens are sorted by expert and multiplied group by group. Where a mesh splits the weights, each device
takes its own rows: `mesh.fsdp` gathers the experts of a layer, `mesh.tensor` splits their inner width. `mesh.expert`
splits the experts, and gathers the rows: each device computes what its experts add for all of these.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.nn.initializers import Initializer

from conf.schema.training.model import Model
from trainer.distributed import mesh as meshes
from trainer.models.layers import gated, mlp, norm, plain_norm, project
from trainer.models.routes import Choose, chosen_alone
from trainer.models.weights import Params, Weight

MATRICES = {"expert_gate": ("embed", "hidden"), "expert_up": ("embed", "hidden"), "expert_down": ("hidden", "embed")}
"""Logical axes of one expert's matrices, [inputs, outputs]."""
AXES = {
    f"{name}{part}": ("experts", *axes)
    for name, (inputs, outputs) in MATRICES.items()
    for part, axes in (
        ("", (inputs, outputs)),
        ("_lora_a", (inputs, None)),
        ("_lora_b", (None, outputs)),
        ("_bias", (outputs,)),
    )
}
"""Logical axes of a layer's matrices of experts, and of the adapters and biases that these may have."""
BY_GROUP = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
"""The sum over the rows of each group."""


class Load(NamedTuple):
    """How evenly a layer's experts are used, or all layers' together; float32 scalars.

    Attributes:
        balance: the sum over this device's tokens of experts * (share of each expert in all choices of the batch) times
            (its probability), and times `per_token`: that many for each token if all are used alike.
        busiest: this device's tokens times the share of the busiest expert in all choices.
        tokens: this device's tokens.
    """

    balance: jax.Array
    busiest: jax.Array
    tokens: jax.Array


def weight_entries(cfg: Model, by_dim: Initializer, down: Initializer) -> Iterator[tuple[str, Weight]]:
    """Yield the router and the experts of a layer, and the gate of the one that all tokens take, if there is one."""
    assert cfg.experts is not None, "the caller has experts"
    count, sizes = cfg.experts.count, {"embed": cfg.dim, "hidden": cfg.mlp_dim}
    yield "router", Weight((cfg.dim, count), ("embed", "experts"), by_dim)
    for name, axes in MATRICES.items():
        shape = (count, *(sizes[axis] for axis in axes))
        yield name, Weight(shape, ("experts", *axes), down if name == "expert_down" else by_dim)
    if cfg.shared_dim:
        yield "shared_gate", Weight((cfg.dim, 1), ("embed", None), by_dim)


def uses_per_token(cfg: Model) -> dict[str, float]:
    """Return how often a token multiplies with all matrices of a name: the share of the experts that it takes.

    Biases are added.
    """
    share = 1.0 if cfg.experts is None else cfg.experts.per_token / cfg.experts.count
    return {name: 0.0 if name.endswith("_bias") else share for name in AXES}


def beside_dense(
    x: jax.Array, dense: jax.Array, weights: Params, cfg: Model, counted: jax.Array | None, choose: Choose
) -> tuple[jax.Array, Load | None]:
    """Return the sum, as in Gemma 4, of a dense block's output [B, T, D] and the experts', both normalized.

    x: the stream, of which the router reads a norm of its own; counted, choose: see `feed_forward`.
    """
    routed = plain_norm(x, cfg).astype(jnp.float32) * weights["router_scale"] * cfg.dim**-0.5
    out, load = feed_forward(norm(x, weights, "experts_norm", cfg), weights, cfg, counted, choose, routed)
    return norm(dense, weights, "post_dense_norm", cfg) + norm(out, weights, "post_experts_norm", cfg), load


def feed_forward(
    x: jax.Array,
    weights: Params,
    cfg: Model,
    counted: jax.Array | None = None,
    choose: Choose = chosen_alone,
    routed: jax.Array | None = None,
) -> tuple[jax.Array, Load | None]:
    """Apply the experts to [B, T, D]; shape and dtype are preserved.

    counted: float32 [B, T], the tokens that count for the load, which is None without them; choose: see `routes`;
    routed: what the router reads in place of x.
    """
    assert cfg.experts is not None, "the caller has experts"
    rows = x.reshape(-1, x.shape[-1])
    read = rows if routed is None else routed.reshape(rows.shape)
    probabilities = _probabilities(read, *(weights[name] for name in ("router", "router_bias") if name in weights))
    # recomputed for the backward pass, near ties could fall otherwise
    likeliest = lax.top_k(lax.stop_gradient(probabilities), cfg.experts.per_token)[1]
    chosen = checkpoint_name(choose(likeliest), "route")
    shares = jnp.take_along_axis(probabilities, chosen, axis=-1)
    if cfg.experts.norm_topk_prob:
        shares = shares / shares.sum(axis=-1, keepdims=True)
    if "expert_scale" in weights:
        shares = shares * weights["expert_scale"][chosen]
    own = {name: weights[name] for name in AXES if name in weights}
    down_bias = own.pop("expert_down_bias", None)
    if meshes.context_mesh() is None:
        out = _computed(rows, chosen, shares, own, cfg)
    else:
        extra = meshes.padding("batch", len(rows))
        padded = partial(jnp.pad, pad_width=((0, extra), (0, 0)))
        by_row = meshes.partition_spec("batch", None)
        per_device = jax.shard_map(
            partial(_computed, cfg=cfg, is_split=True),
            in_specs=(by_row, by_row, by_row, {name: meshes.partition_spec(*AXES[name]) for name in own}),
            out_specs=by_row,
            check_vma=False,
        )
        out = per_device(padded(rows), padded(chosen), padded(shares), own)[: len(rows)]
    if down_bias is not None:
        of_experts = (shares[..., None] * jax.nn.one_hot(chosen, cfg.experts.count)).sum(axis=1)
        added = jnp.matmul(of_experts, down_bias, precision=lax.Precision.HIGHEST)
        out = (out.astype(jnp.float32) + added).astype(out.dtype)
    load = None if counted is None else _load(probabilities, chosen, counted.reshape(-1))
    out = checkpoint_name(out.reshape(x.shape), "output")
    if cfg.shared_dim:
        out = out + jax.nn.sigmoid(project(x, weights, "shared_gate", cfg)) * mlp(x, weights, cfg)
    return out, load


def _probabilities(rows: jax.Array, router: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """Return each token's probabilities of the experts, [N, experts]: all in float32, which decides near ties."""
    logits = jnp.matmul(rows.astype(jnp.float32), router.astype(jnp.float32), precision=lax.Precision.HIGHEST)
    return jax.nn.softmax(logits if bias is None else logits + bias, axis=-1)


def _load(probabilities: jax.Array, chosen: jax.Array, counted: jax.Array) -> Load:
    """Return the load of a layer; where each device has its own rows, shares are those of all devices."""
    count = probabilities.shape[-1]
    uses = meshes.over_devices(jnp.zeros(count, jnp.float32).at[chosen].add(counted[:, None]))
    tokens = counted.sum()
    shares = uses / jnp.maximum(uses.sum(), 1)
    by_expert = jnp.einsum("n,ne->e", counted, probabilities, precision=lax.Precision.HIGHEST)
    return Load(count * chosen.shape[1] * (shares * by_expert).sum(), tokens * shares.max(), tokens)


def _computed(
    rows: jax.Array, chosen: jax.Array, shares: jax.Array, weights: Params, cfg: Model, is_split: bool = False
) -> jax.Array:
    """Return what the experts add for rows [N, D], from their choices and the shares of these [N, per_token].

    weights: those of `AXES` that the layer has; the bias of down is left to the caller.
    is_split: they are one device's parts of those of a mesh.
    """
    per_token, count = chosen.shape[1], len(weights["expert_gate"])
    parts = lax.axis_size("expert") if is_split else 1
    if parts > 1:
        rows, chosen, shares = (lax.all_gather(x, "expert", tiled=True) for x in (rows, chosen, shares))
        # counted from the first one here, so that rows of the experts of other devices are the last
        chosen = (chosen - lax.axis_index("expert") * count) % (count * parts)
    order = jnp.argsort(chosen.reshape(-1), stable=True)
    places = jnp.argsort(order)
    sizes = jnp.zeros(count, jnp.int32).at[chosen.reshape(-1)].add(1, mode="drop")
    taken = _permuted(jnp.repeat(rows, per_token, axis=0), order, places)

    def times(x: jax.Array, name: str) -> jax.Array:
        gathered = AXES[name].index("embed") if "embed" in AXES[name] else 0
        return _grouped_product(x, weights[name], sizes, gathered if is_split else None)

    def product(x: jax.Array, name: str) -> jax.Array:
        out = times(x, name)
        if cfg.lora is not None and f"{name}_lora_a" in weights:
            out = out + cfg.lora.scale * times(times(x, f"{name}_lora_a"), f"{name}_lora_b")
        bias = weights.get(f"{name}_bias")
        return out if bias is None else _plus_bias(out, bias, chosen.reshape(-1)[order])

    gate_out, up_out = (checkpoint_name(product(taken, name), "product") for name in ("expert_gate", "expert_up"))
    # shared out before the last product: after it, the gradient of the shares would need what that gives
    share = _permuted(shares.reshape(-1, 1), order, places)
    inner = (gated(gate_out, up_out, cfg) * share).astype(rows.dtype)
    out = _permuted(product(inner, "expert_down"), places, order)
    mixed = out.reshape(-1, per_token, out.shape[-1]).astype(jnp.float32).sum(axis=1).astype(rows.dtype)
    if parts > 1:
        mixed = lax.psum_scatter(mixed, "expert", tiled=True)
    return lax.psum(mixed, "tensor") if is_split else mixed


@jax.custom_vjp
def _plus_bias(x: jax.Array, bias: jax.Array, of_row: jax.Array) -> jax.Array:
    """Add each row's bias, of [groups, O], to [N, O]; the bias's gradient is a product, in float32, and no scatter."""
    return (x.astype(jnp.float32) + bias[of_row]).astype(x.dtype)


def _plus_bias_forward(
    x: jax.Array, bias: jax.Array, of_row: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _plus_bias(x, bias, of_row), (bias, of_row)


def _plus_bias_backward(saved: tuple[jax.Array, jax.Array], change: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    bias, of_row = saved
    members = jax.nn.one_hot(of_row, len(bias), dtype=change.dtype)
    of_bias = jnp.einsum(
        "ng,no->go", members, change, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    return change, of_bias, None


_plus_bias.defvjp(_plus_bias_forward, _plus_bias_backward)


@jax.custom_vjp
def _permuted(x: jax.Array, order: jax.Array, places: jax.Array) -> jax.Array:
    """Return the rows x[order]; places: the inverse, with which the gradient is a permutation too and no scatter."""
    del places
    return x[order]


def _permuted_forward(x: jax.Array, order: jax.Array, places: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _permuted(x, order, places), places


def _permuted_backward(places: jax.Array, change: jax.Array) -> tuple[jax.Array, None, None]:
    return change[places], None, None


_permuted.defvjp(_permuted_forward, _permuted_backward)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _grouped_product(x: jax.Array, weight: jax.Array, sizes: jax.Array, gathered: int | None) -> jax.Array:
    """Multiply rows [N, I], sorted by group, by [groups, I, O] to get [N, O] in the dtype of x.

    sizes: rows of each group; gathered: the axis of the weight that `mesh.fsdp` splits, 0 if none, None without a mesh.
    The weight's gradient leaves its product in float32, and is added up so over the devices; gathered weights are not
    kept for it.
    """
    return _by_group(x, _gathered(weight, x.dtype, gathered), sizes, gathered is not None)


def _by_group(x: jax.Array, weight: jax.Array, sizes: jax.Array, is_split: bool) -> jax.Array:
    """Multiply each row with the matrix of its group; rows of other devices' experts, the last, give 0."""
    out = lax.ragged_dot(x, weight, sizes)
    if not is_split or lax.axis_size("expert") == 1:
        return out
    return jnp.where(jnp.arange(len(x))[:, None] < sizes.sum(), out, 0)  # kernels may leave them undefined


def _gathered(weight: jax.Array, dtype: jnp.dtype, axis: int | None) -> jax.Array:
    weight = weight.astype(dtype)
    return lax.all_gather(weight, "fsdp", axis=axis, tiled=True) if axis else weight


def _grouped_product_forward(
    x: Any, weight: Any, sizes: Any, gathered: int | None
) -> tuple[jax.Array, tuple[jax.Array | None, jax.Array, jax.Array]]:
    rows: jax.Array = x.value
    own: jax.Array = weight.value
    of_groups: jax.Array = sizes.value
    return _grouped_product(rows, own, of_groups, gathered), (rows if weight.perturbed else None, own, of_groups)


def _grouped_product_backward(
    gathered: int | None, saved: tuple[jax.Array | None, jax.Array, jax.Array], change: jax.Array
) -> tuple[jax.Array, jax.Array | None, None]:
    x, weight, sizes = saved
    of_x = _by_group(change, _gathered(weight, change.dtype, gathered).swapaxes(1, 2), sizes, gathered is not None)
    if x is None:  # frozen weights, as those with adapters are, have no gradient
        return of_x, None, None
    of_weight = lax.ragged_dot_general(x, change, sizes, BY_GROUP, preferred_element_type=jnp.float32)
    if gathered:
        of_weight = lax.psum_scatter(of_weight, "fsdp", scatter_dimension=gathered, tiled=True)
    return of_x, of_weight.astype(weight.dtype), None


_grouped_product.defvjp(_grouped_product_forward, _grouped_product_backward, symbolic_zeros=True)

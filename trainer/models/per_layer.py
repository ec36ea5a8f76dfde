"""Embeddings of the tokens that each layer has for itself, as in Gemma 4 (and Gemma 3n).

A layer mixes its row of the token with a projection of the model's embedding. After its feed-forward block, the stream
chooses by a gate what of that is added to it. The tables together are larger than the model's: they are stacked over
layers, so that each layer looks up its own rows and no token has all of them at once.
"""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.nn.initializers import Initializer, normal

from conf.schema.training.model import Model
from trainer.distributed.mesh import constrain
from trainer.models.layers import linear, look_up, norm
from trainer.models.weights import Params, Weight

LayerInput = Callable[[jax.Array, Params], jax.Array]
"""Maps (embeddings [B, T, D], the layer's weights) to what the layer has of its own, [B, T, per_layer_dim]."""


def layer_input(params: Params, cfg: Model, tokens: jax.Array) -> LayerInput | None:
    """Return the function that computes a layer's own input for tokens [B, T]; None if layers have none."""
    if not cfg.per_layer_dim:
        return None

    def own(first: jax.Array, weights: Params) -> jax.Array:
        rows = look_up(constrain(weights["per_layer_table"], "vocab", "embed"), tokens, cfg)
        rows = rows * jnp.asarray(cfg.per_layer_dim**0.5, rows.dtype)
        mixed = linear(first, weights["per_layer_input"]) * jnp.asarray(cfg.dim**-0.5, first.dtype)
        mixed = norm(mixed, params, "per_layer_norm", cfg)
        return constrain((mixed + rows) * jnp.asarray(2**-0.5, rows.dtype), "batch", None, "hidden")

    return own


def compute(x: jax.Array, own: jax.Array, weights: Params, cfg: Model) -> jax.Array:
    """Return what a layer adds to the stream [B, T, D] for its own input."""
    gate = constrain(checkpoint_name(linear(x, weights["per_layer_gate"]), "product"), "batch", None, "hidden")
    out = linear(jax.nn.gelu(gate, approximate=True) * own, weights["per_layer_output"])
    return norm(checkpoint_name(out, "output"), weights, "post_per_layer_norm", cfg)


def weight_entries(cfg: Model, by_dim: Initializer) -> Iterator[tuple[str, Weight]]:
    """Yield the weights of one layer, without its norm."""
    own = normal(cfg.per_layer_dim**-0.5)
    yield "per_layer_table", Weight((cfg.vocab_size, cfg.per_layer_dim), ("vocab", "embed"), own)
    for name in ("per_layer_input", "per_layer_gate"):
        yield name, Weight((cfg.dim, cfg.per_layer_dim), ("embed", "hidden"), by_dim)
    yield "per_layer_output", Weight((cfg.per_layer_dim, cfg.dim), ("hidden", "embed"), own)

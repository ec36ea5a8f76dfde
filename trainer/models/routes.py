"""Routes: the experts that each token takes. The sampler records them, and an update takes the same again.

That is rollout routing replay (https://arxiv.org/abs/2510.11370): the choice is the sampler's, but how much each chosen
expert counts follows from the router that learns, which so has a gradient.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from conf.schema.training.model import Model

Choose = Callable[[jax.Array], jax.Array]
"""Maps the likeliest experts of each token, int32 [N, per_token], to those that it takes."""


def chosen_alone(likeliest: jax.Array) -> jax.Array:
    """Return the router's own choice."""
    return likeliest


def dtype(cfg: Model) -> jnp.dtype:
    """Return the smallest dtype that has a number for each expert."""
    assert cfg.experts is not None, "the schema requires them"
    return jnp.dtype(jnp.uint8 if cfg.experts.count <= 256 else jnp.uint16)


def per_row(cfg: Model) -> int:
    """Return the routes of a token."""
    assert cfg.experts is not None, "the schema requires them"
    return cfg.num_layers * cfg.experts.per_token


def recorder(into: list[jax.Array]) -> Choose:
    """Return the router's own choice, which appends what it chooses."""

    def choose(likeliest: jax.Array) -> jax.Array:
        into.append(likeliest)
        return likeliest

    return choose


def joined(recorded: Sequence[jax.Array], cfg: Model, *shape: int) -> jax.Array:
    """Return what was recorded of each layer, one after the other: [*shape, layers * per_token]."""
    return jnp.concatenate([one.astype(dtype(cfg)).reshape(*shape, -1) for one in recorded], axis=-1)


@dataclass
class Replay:
    """Routes that a forward pass takes in place of its own.

    Attributes:
        routes: int16 [B, T, layers * per_token], negative where the router chooses.
        changed: how many of them the router would not have chosen, float32; set by the pass.
    """

    routes: jax.Array
    changed: Any = 0.0

    @classmethod
    def of(cls, batch: Mapping[str, jax.Array]) -> "Replay | None":
        """Return the replay of a batch, up to the last token that its mask [B, T - 1] needs; None without routes."""
        if "routes" not in batch:
            return None
        needed = jnp.pad(lax.cummax(batch["mask"], axis=1, reverse=True), ((0, 0), (0, 1)))
        return cls(jnp.where(needed[..., None] > 0, batch["routes"].astype(jnp.int16), -1))

    @property
    def known(self) -> jax.Array:
        """How many routes there are, float32."""
        return (self.routes >= 0).sum(dtype=jnp.float32)

    def choose(self, layer: jax.Array, changed: list[Any]) -> Choose:
        """Return the choice of a layer; it appends how many of its routes differ from the router's own."""
        return partial(self._chosen, layer, changed)

    def _chosen(self, layer: jax.Array, changed: list[Any], likeliest: jax.Array) -> jax.Array:
        per_token = likeliest.shape[1]
        given = lax.dynamic_slice_in_dim(self.routes, layer * per_token, per_token, axis=2)
        given = given.reshape(likeliest.shape).astype(likeliest.dtype)
        is_own = (given[:, :, None] == likeliest[:, None]).any(axis=2)
        changed.append(((given >= 0) & ~is_own).sum(dtype=jnp.float32))
        return jnp.where(given < 0, likeliest, given)

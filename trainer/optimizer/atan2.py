"""AdamATan2: Adam's moments, divided by atan2 (https://arxiv.org/abs/2407.05872), so that no eps sets a scale."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class AdamAtan2State(NamedTuple):
    """Number of updates, and both moments of each weight."""

    done: Any
    mu: Any
    nu: Any


def scale_by_adam_atan2(b1: float, b2: float) -> optax.GradientTransformation:
    """Return the transformation from gradients to atan2(m, sqrt(v / (1 - b2^t))) / (1 - b1^t)."""

    def init(params: Any) -> Any:
        return AdamAtan2State(jnp.int32(0), *(jax.tree.map(jnp.zeros_like, params) for _ in range(2)))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        done = state.done + 1
        mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mu, updates)
        nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, state.nu, updates)
        first, second = 1 - jnp.float32(b1) ** done, jnp.sqrt(1 - jnp.float32(b2) ** done)
        steps = jax.tree.map(lambda m, v: jnp.arctan2(m, jnp.sqrt(v) / second) / first, mu, nu)
        return steps, AdamAtan2State(done, mu, nu)

    return optax.GradientTransformation(init, update)

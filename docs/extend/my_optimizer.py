"""Optimizer rule: an optax transformation from gradients to directions."""

import jax
import jax.numpy as jnp
import optax


def signs(b1: float = 0.9) -> optax.GradientTransformation:
    """Return the sign of the gradient's moving average (https://arxiv.org/abs/1802.04434)."""

    def init(params):
        return jax.tree.map(jnp.zeros_like, params)

    def update(gradients, average, params=None):
        average = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, average, gradients)
        return jax.tree.map(jnp.sign, average), average

    return optax.GradientTransformation(init, update)

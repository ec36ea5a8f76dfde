"""The step along a direction: learning rates, and weight decay that is not part of any moment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from trainer.optimizer.rules import UpdateRule, map_with_path
from trainer.optimizer.schedules import ScheduleFn


class DescentState(NamedTuple):
    """Updates done, an int32 scalar."""

    done: Any


def apply_update_rules(
    rules: Mapping[str, UpdateRule], rate: ScheduleFn, decay: ScheduleFn
) -> optax.GradientTransformation:
    """Directions in, updates out: - rate * lr * (direction + decay * weight_decay * weight), by each weight's rule.

    rate, decay: shares of the peak values. A cautious weight decays only where its direction has its sign, or is 0.
    """

    def init(params: Any) -> Any:
        del params
        return DescentState(jnp.int32(0))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        rates, decays = rate(state.done), decay(state.done)

        def step(path: str, direction: jax.Array, weight: jax.Array) -> jax.Array:
            rule = rules[path]
            if rule.weight_decay:
                shrunk = decays * rule.weight_decay * weight
                direction = direction + (jnp.where(direction * weight >= 0, shrunk, 0) if rule.cautious else shrunk)
            return -rates * rule.lr * direction

        return map_with_path(step, updates, params), DescentState(state.done + 1)

    return optax.GradientTransformation(init, update)

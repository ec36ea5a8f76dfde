"""The step along a direction: learning rates and decoupled weight decay."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from trainer.optimizer.rules import UpdateRule, map_with_path
from trainer.optimizer.schedules import ScheduleFn


class DescentState(NamedTuple):
    """Number of updates, an int32 scalar."""

    done: Any


def apply_update_rules(
    rules: Mapping[str, UpdateRule], rate: ScheduleFn, decay: ScheduleFn
) -> optax.GradientTransformation:
    """Turn directions into updates by each weight's rule: - rate * lr * (direction + decay * weight_decay * weight).

    rate, decay: fractions of the peak values. A cautious weight decays only where its direction has its sign, or is 0.
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

"""Schedules as functions of the number of earlier updates."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from conf.schema.training.optimizer import (
    ConstantSchedule,
    DecaySchedule,
    PiecewiseSchedule,
    Schedule,
    WarmupStableDecaySchedule,
)

ScheduleFn = Callable[[Any], jax.Array]
"""Maps the number of earlier updates to the fraction of the peak, float32."""


def schedule_factor(schedule: Schedule | None) -> ScheduleFn:
    """Return the schedule as a function; None is constant 1.

    Update n (from 1) of a warm-up has n / warmup_steps, so the first one already moves the weights. A decay begins at
    the peak with the first update of its phase, and ends after `horizon_steps` updates.
    """
    if schedule is None:
        return lambda count: jnp.ones_like(jnp.float32(count))
    if isinstance(schedule, PiecewiseSchedule):
        steps, shares = zip(*schedule.points, strict=True)
        return lambda count: jnp.interp(jnp.float32(count), jnp.float32(steps), jnp.float32(shares))
    warmup, rest = schedule.warmup_steps, _main_schedule(schedule)
    return lambda count: jnp.float32(jnp.where(count < warmup, (count + 1) / max(warmup, 1), rest(count - warmup)))


def _main_schedule(schedule: ConstantSchedule | DecaySchedule | WarmupStableDecaySchedule) -> optax.Schedule:
    """Return the schedule as a function of the updates since the warm-up."""
    if isinstance(schedule, ConstantSchedule):
        return optax.schedules.constant_schedule(1.0)
    length, final = schedule.horizon_steps - schedule.warmup_steps, schedule.final_fraction
    if isinstance(schedule, DecaySchedule):
        if schedule.kind == "cosine":
            return optax.schedules.cosine_decay_schedule(1.0, length, alpha=final)
        return optax.schedules.linear_schedule(1.0, final, length)
    stable = length - schedule.decay_steps
    return optax.schedules.linear_schedule(1.0, final, schedule.decay_steps, transition_begin=stable)

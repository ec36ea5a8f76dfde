"""The optimizer: clip the global gradient norm, then AdamW under a learning-rate schedule. All parts are optax's."""

from __future__ import annotations

import optax

from conf.optimizer import Optimizer


def schedule(cfg: Optimizer) -> optax.Schedule:
    """Learning rate of the update after `count` earlier ones.

    Update number n (from 1) of the warm-up has lr * n / warmup_steps, so that the first one already moves the weights;
    a decay ends with update number horizon_steps.
    """
    warmup = cfg.schedule.warmup_steps
    if cfg.schedule.kind == "constant":
        rest = optax.schedules.constant_schedule(cfg.lr)
    else:
        length = cfg.schedule.horizon_steps - warmup
        final = cfg.schedule.final_fraction
        if cfg.schedule.kind == "cosine":
            rest = optax.schedules.cosine_decay_schedule(cfg.lr, length, alpha=final)
        else:
            rest = optax.schedules.linear_schedule(cfg.lr, cfg.lr * final, length)
    rise = optax.schedules.linear_schedule(0.0, cfg.lr, max(warmup, 1))
    by_number = optax.schedules.join_schedules([rise, rest], [warmup])
    return lambda count: by_number(count + 1)


def build(cfg: Optimizer) -> optax.GradientTransformation:
    """Gradients in, updates out; state is optax's."""
    return optax.chain(
        optax.clip_by_global_norm(cfg.clip_norm),
        optax.adamw(schedule(cfg), b1=cfg.b1, b2=cfg.b2, eps=cfg.epsilon, weight_decay=cfg.weight_decay),
    )

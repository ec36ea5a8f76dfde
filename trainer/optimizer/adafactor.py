"""Adafactor (https://arxiv.org/abs/1804.04235) from optax, applied to the matrices of each layer."""

from typing import Any

import jax
import optax

from conf.schema.training.model import AnyModel
from conf.schema.training.optimizer import Adafactor
from trainer.optimizer.matrices import matrix_views
from trainer.optimizer.rules import map_with_path

MIN_SCALE = 1e-3
"""Minimum root mean square used to scale a weight's update, so that zero-initialized weights move."""


def scale_by_adafactor(opt: Adafactor, cfg: AnyModel) -> optax.GradientTransformation:
    """Return the transformation from gradients to directions, for weights in the layers or outside them, not both.

    Every matrix has factored moments, however small, and its own root mean square in each layer.
    """
    parts = [optax.scale_by_factored_rms(decay_rate=opt.decay_exponent, epsilon=opt.eps, min_dim_size_to_factor=1)]
    if opt.update_clip is not None:
        parts.append(optax.clip_by_block_rms(opt.update_clip))
    if opt.scale_by_weight:
        parts.append(optax.scale_by_param_block_rms(MIN_SCALE))
    if opt.b1 is not None:
        parts.append(optax.ema(opt.b1, debias=False))
    one, shapes = optax.chain(*parts), matrix_views(cfg)

    def viewed(tree: Any) -> Any:
        return map_with_path(lambda path, x: x.reshape(shapes[path].shape), tree)

    def stacked(tree: Any) -> bool:
        found = {shapes[path].is_stacked for path in jax.tree.leaves(map_with_path(lambda path, _: path, tree))}
        return found == {True}

    def init(params: Any) -> Any:
        return (jax.vmap(one.init) if stacked(params) else one.init)(viewed(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        each = jax.vmap(one.update) if stacked(updates) else one.update
        directions, state = each(viewed(updates), state, viewed(params))
        return jax.tree.map(lambda d, g: d.reshape(g.shape), directions, updates), state

    return optax.GradientTransformation(init, update)

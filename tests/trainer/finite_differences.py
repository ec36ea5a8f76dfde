"""A gradient against finite differences."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np


def check_gradient(graded: Callable[[Any], tuple[Any, Any]], params: Any) -> None:
    """Compare the slope of a loss along a random direction. graded: params to the loss and its gradient, jitted."""
    random, step = np.random.default_rng(0), 1e-2
    direction = jax.tree.map(lambda x: random.normal(size=x.shape).astype(np.float32), params)
    _, gradient = graded(params)
    ahead, behind = (
        graded(jax.tree.map(lambda x, d, s=sign: np.asarray(x) + s * step / 2 * d, params, direction))[0]
        for sign in (1, -1)
    )
    found = sum(np.vdot(g, d) for g, d in zip(jax.tree.leaves(gradient), jax.tree.leaves(direction), strict=True))
    np.testing.assert_allclose(found, (ahead - behind) / step, rtol=2e-2)

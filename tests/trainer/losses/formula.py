"""A policy loss against its formula: the value, and the gradient of every token by finite differences."""

from collections.abc import Callable

import jax
import numpy as np

from conf.schema.training.loop import GrpoLoop
from tests.trainer.losses.test_references import ENTROPY, NOW, batch
from trainer.losses import grpo

STEP = 1e-6


def check_against(formula: Callable[[np.ndarray], float], cfg: GrpoLoop) -> None:
    """Compare the loss that `cfg` names with `formula`, a function of the policy's log-probabilities [B, T]."""

    def value(now, entropy, fields):
        total, count = grpo.policy_loss_terms(now, entropy, fields, cfg)["loss"]
        return total / count

    with jax.enable_x64(True):
        found, slope = jax.value_and_grad(value)(NOW, ENTROPY, batch(np.float64))
    np.testing.assert_allclose(found, formula(NOW), atol=1e-9)
    np.testing.assert_allclose(value(np.float32(NOW), np.float32(ENTROPY), batch()), formula(NOW), atol=1e-6)
    assert np.abs(slope).max() > 0.01
    for row, t in np.ndindex(NOW.shape):
        moved = np.zeros(NOW.shape)
        moved[row, t] = STEP
        difference = (formula(NOW + moved) - formula(NOW - moved)) / (2 * STEP)
        np.testing.assert_allclose(slope[row, t], difference, atol=1e-8, err_msg=f"{row}, {t}")

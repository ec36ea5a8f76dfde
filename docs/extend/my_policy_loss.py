"""Policy loss as a class: SAPO, whose soft gate takes the place of the clip (https://arxiv.org/abs/2511.20347)."""

import jax
import jax.numpy as jnp

from trainer.losses.policy import Grpo


class Sapo(Grpo):
    """A token's objective flattens on either side of a ratio of 1, faster if its advantage is negative."""

    def __init__(self, loop, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> None:
        super().__init__(loop)
        self.tau_pos, self.tau_neg = tau_pos, tau_neg

    def objective(self, tokens, ratio):
        """Return what is maximized, of each token [B, T], and metrics by name."""
        tau = jnp.where(tokens.advantages > 0, self.tau_pos, self.tau_neg)
        gate = jax.nn.sigmoid(tau * (ratio - 1))
        return 4 / tau * gate * tokens.advantages, {"gate_slope": tokens.share(4 * gate * (1 - gate))}

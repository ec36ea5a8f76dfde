"""How often the policy is right: held-out questions, answered with the likeliest tokens."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from conf.loop import GrpoLoop
from trainer import rollout
from trainer.data.problem import Question
from trainer.data.prompting import Prompting
from trainer.distributed import place_batch
from trainer.rewards.pool import Pool
from trainer.sampler import Sampler
from trainer.weights import Params


class Evaluation:
    """The fixed questions of every evaluation, and what answers and checks them."""

    def __init__(
        self,
        held_out: Sequence[Question],
        prompting: Prompting,
        loop: GrpoLoop,
        mesh: Mesh,
        sample: Sampler,
        checks: Pool,
    ) -> None:
        self.held_out, self._prompting = held_out, prompting
        self._loop, self._mesh, self._sample, self._checks = loop, mesh, sample, checks
        self._key = jax.random.key(0)  # at temperature 0 nothing comes of it
        self._total = jax.jit(jnp.sum)

    def accuracy(self, params: Params) -> float:
        """Share of the questions that the policy answers rightly when it takes the likeliest tokens."""
        rows, right = rollout.rows_per_rollout(self._loop), 0.0
        for start in range(0, len(self.held_out), rows):
            asked = self.held_out[start : start + rows]
            filled = [asked[i % len(asked)] for i in range(rows)]
            drawn = rollout.draw(self._sample, params, filled, self._loop, self._mesh, self._key, 0.0, self._prompting)
            correct = rollout.correct(drawn, filled, self._checks) * (np.arange(rows) < len(asked))
            right += float(self._total(place_batch(correct, self._mesh)))
        return right / len(self.held_out)

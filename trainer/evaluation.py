"""How often the policy is right: held-out questions, answered with the likeliest tokens."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from conf.loop import GrpoLoop
from trainer import mesh as meshes
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
        sampler: Sampler,
        checks: Pool,
    ) -> None:
        self.held_out, self._prompting = held_out, prompting
        self._loop, self._mesh, self._sampler, self._checks = loop, mesh, sampler, checks
        self._key = jax.random.key(0)  # at temperature 0 nothing comes of it
        self._total = jax.jit(jnp.sum)

    def accuracy(self, params: Params) -> float:
        """Share of the questions that the policy answers rightly when it takes the likeliest tokens."""
        count, copy = len(self.held_out), self._sampler.load(params)
        drawn = rollout.draw(
            self._sampler, copy, self.held_out, 1, self._loop, self._mesh, self._key, 0.0, self._prompting
        )
        correct = rollout.correct(drawn, self.held_out, self._checks)
        shards = meshes.shards(self._mesh, "batch")
        filled = np.pad(correct, (0, -count % shards))
        return float(self._total(place_batch(filled, self._mesh))) / count

"""How often the policy is right: held-out questions, answered with the likeliest tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax

from trainer.data.problem import Question
from trainer.data.prompting import Prompting
from trainer.distributed import gather_tree
from trainer.rewards.pool import Pool
from trainer.sampler import Sampler
from trainer.weights import Params


class Evaluation:
    """The fixed questions of every evaluation, and what answers and checks them."""

    def __init__(self, held_out: Sequence[Question], prompting: Prompting, sampler: Sampler, checks: Pool) -> None:
        self.held_out, self._prompting = held_out, prompting
        self._sampler, self._checks = sampler, checks
        self._key = jax.random.key(0)  # at temperature 0 nothing comes of it

    def accuracy(self, params: Params, count: int | None = None, between: Callable[[], None] = lambda: None) -> float:
        """Share of the first `count` questions, or of all, that the policy answers rightly when it takes the likeliest
        tokens. between: called between chunks of decoding; what it raises ends the evaluation."""
        asked = self.held_out[:count]
        prompts = [question.tokens for question in asked]
        drawn = self._sampler.draw(self._sampler.load(params), prompts, 1, self._key, 0.0, between)
        checks = {
            row.row: self._checks.submit(
                ["answer_match"], self._prompting.decode(row.tokens.tolist()), asked[row.row].answer
            )
            for row in drawn
            if row.row % jax.process_count() == jax.process_index()
        }
        own = {str(row): check.result().scores["answer_match"] for row, check in checks.items()}
        return sum(gather_tree(own).values()) / len(asked)

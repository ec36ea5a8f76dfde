"""Pack prompts and responses into rows of a batch."""

from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh

from conf.schema.training.loop import GrpoLoop
from conf.schema.training.model import Model
from trainer.data.problem import Question
from trainer.data.prompting import PromptEncoder
from trainer.distributed.batch import Batch
from trainer.environments.episodes import Episode
from trainer.sampler import Sampler, SamplerSettings, StopCriteria

PAD_ID = 0
"""Pads the end of a row, where no token attends."""


def build_sampler(cfg: Model, loop: GrpoLoop, mesh: Mesh, prompting: PromptEncoder) -> Sampler:
    """Return the sampler for rollouts and evaluations, which share its programs."""
    return Sampler(
        cfg, sampler_settings(loop), mesh, StopCriteria(prompting.stop_tokens, loop.sampler.stop, prompting.decode)
    )


def sampler_settings(loop: GrpoLoop) -> SamplerSettings:
    """Return the sampler's settings. With an environment, what was said before a turn is part of its prompt."""
    turns = loop.environment
    prompt, new = loop.max_prompt_length, loop.max_new_tokens
    if turns.name is not None:
        prompt, new = loop.row_widths[-1], turns.max_turn_tokens or new
    return SamplerSettings.from_config(loop.sampler, prompt, new, loop.rows * loop.updates_per_rollout)


def supervised_batch(questions: Sequence[Question], loop: GrpoLoop, episodes: Sequence[Episode] | None = None) -> Batch:
    """Return a batch for `grpo.supervised_loss`, with worked responses truncated to the sampler's maximum length.

    episodes: with the worked responses, where there is an environment.
    """
    worked = [e.tokens for e in episodes] if episodes else [question.solution_tokens for question in questions]
    responses = [tokens[: loop.max_new_tokens] for tokens in worked]
    tokens, mask = pad_sequences([question.prompt_tokens for question in questions], responses, loop.row_widths[-1])
    if episodes:
        mask[mask == 1] = np.concatenate([episode.by_model[: loop.max_new_tokens] for episode in episodes])
    return {"tokens": tokens, "mask": mask}


def pad_sequences(prompts: list[list[int]], responses: list[list[int]], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Concatenate prompt and response, padded on the right: int32 [B, width], and mask float32 [B, width - 1].

    The mask is 1 where the next token belongs to the response.
    """
    tokens = np.full((len(prompts), width), PAD_ID, np.int32)
    mask = np.zeros((len(prompts), width - 1), np.float32)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        end = len(prompt) + len(response)
        tokens[row, :end] = prompt + response
        mask[row, len(prompt) - 1 : end - 1] = 1
    return tokens, mask

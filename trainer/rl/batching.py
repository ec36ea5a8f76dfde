"""Pack prompts and responses into rows of a batch."""

from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh

from conf.schema.training.loop import GrpoLoop
from conf.schema.training.model import Model
from trainer.data.problem import Question
from trainer.data.prompting import PromptEncoder
from trainer.distributed.batch import Batch
from trainer.sampler import Sampler, SamplerSettings, StopCriteria

PAD_ID = 0
"""Pads the end of a row, where no token attends."""


def build_sampler(cfg: Model, loop: GrpoLoop, mesh: Mesh, prompting: PromptEncoder) -> Sampler:
    """Return the sampler for rollouts and evaluations, which share its programs."""
    return Sampler(
        cfg, sampler_settings(loop), mesh, StopCriteria(prompting.stop_tokens, loop.sampler.stop, prompting.decode)
    )


def sampler_settings(loop: GrpoLoop) -> SamplerSettings:
    return SamplerSettings.from_config(
        loop.sampler, loop.max_prompt_length, loop.max_new_tokens, loop.rows * loop.updates_per_rollout
    )


def supervised_batch(questions: Sequence[Question], loop: GrpoLoop) -> Batch:
    """Return a batch for `grpo.supervised_loss`, with worked responses truncated to the sampler's maximum length."""
    responses = [question.solution_tokens[: loop.max_new_tokens] for question in questions]
    tokens, mask = pad_sequences([question.prompt_tokens for question in questions], responses, loop.row_widths[-1])
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

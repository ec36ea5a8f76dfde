"""Greedy replies of each family of models, against transformers' `generate` and nanochat's own program."""

import jax
import numpy as np
import pytest

from tests.conftest import deep
from tests.trainer.conftest import make_mesh
from tests.trainer.models.reference_models import described, expected_of, params_of
from trainer.sampler import Sampler, SamplerSettings, StopCriteria


# gpt2 has the biases of qwen2; llama3 has nothing that qwen3 has not
@pytest.mark.parametrize(
    "family", ["gemma2", "llama_biases", *deep("gemma3", "gpt2", "nanochat", "qwen3", "qwen2_window")]
)
def test_greedy_replies_equal_the_reference(family):
    """Prompts of eight lengths, some longer than the window of local layers; the reference answered each alone."""
    expected, cfg = expected_of(family), described(family, scan_layers=family != "llama_biases", remat="none")
    lengths, count = expected["prompt_lengths"], expected["generated"].shape[1]
    prompts = [row[:length].tolist() for row, length in zip(expected["prompts"], lengths, strict=True)]
    settings = SamplerSettings(max(lengths), count, slots=3, chunk=4)  # so that rows follow each other
    sampler = Sampler(cfg, settings, make_mesh(1, 1, 1), StopCriteria(()))
    copy = sampler.load_params(params_of(family))
    found = {drawn.row: drawn.tokens for drawn in sampler.generate(copy, prompts, 1, jax.random.key(0), 0.0)}
    assert len(np.unique(expected["generated"])) > 4  # replies that change on the way
    np.testing.assert_array_equal([found[row] for row in range(len(prompts))], expected["generated"])

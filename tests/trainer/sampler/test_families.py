"""Greedy replies of each family of models, against transformers' `generate` and nanochat's own program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from tests.conftest import deep
from tests.paths import ROOT
from tests.trainer.conftest import make_mesh
from tests.trainer.models import nanochat
from trainer.pretrained import hf_families, hf_files
from trainer.sampler import Sampler, SamplerSettings, StopCriteria

FIXTURES = ROOT / "tests" / "trainer" / "fixtures"


# gpt2 has the biases of qwen2; llama3 has nothing that qwen3 has not
@pytest.mark.parametrize("family", ["gemma2", *deep("gemma3", "gpt2", "nanochat", "qwen3")])
def test_greedy_replies_equal_the_reference(family):
    """Prompts of eight lengths, some longer than the window of local layers; the reference answered each alone."""
    with np.load(FIXTURES / family / "expected.npz") as file:
        expected = dict(file)
    computed = {"scan_layers": True, "remat": "full", "activation_dtype": "float32"}
    if family == "nanochat":
        cfg, params = nanochat.cfg(**computed), nanochat.params()
    else:
        folder = epath.Path(FIXTURES / family)
        cfg = hf_families.model_from_config(hf_files.read_config(folder), **computed)
        params = hf_files.read_params(folder, cfg)
    lengths, count = expected["prompt_lengths"], expected["generated"].shape[1]
    prompts = [row[:length].tolist() for row, length in zip(expected["prompts"], lengths, strict=True)]
    settings = SamplerSettings(max(lengths), count, slots=3, chunk=4)  # so that rows follow each other
    sampler = Sampler(cfg, settings, make_mesh(1, 1, 1), StopCriteria(()))
    copy = sampler.load_params(jax.tree.map(jnp.asarray, params))
    found = {drawn.row: drawn.tokens for drawn in sampler.generate(copy, prompts, 1, jax.random.key(0), 0.0)}
    assert len(np.unique(expected["generated"])) > 4  # replies that change on the way
    np.testing.assert_array_equal([found[row] for row in range(len(prompts))], expected["generated"])

"""The cache is as long as the rows in flight need: what it holds survives each change, and responses stay the same."""

from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.trainer.conftest import make_mesh
from tests.trainer.sampler.test_engine import OFTEN, drawn, first_params, trainers
from trainer.sampler import SamplerSettings, cache, settings
from trainer.sampler.engine import _Generation


@pytest.fixture
def resized(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Let even a cache of a few tokens have several lengths; return the changes as they happen."""
    monkeypatch.setattr(settings, "MIN_CACHE_LENGTH", 4)
    monkeypatch.setattr(settings, "LANES", 1)
    seen: list[tuple[int, int]] = []
    fit = _Generation._fit_cache

    def noted(generation: _Generation) -> None:
        old = generation.cache_length
        fit(generation)
        if old:
            seen.append((old, generation.cache_length))
        assert generation.slots is not None
        assert max(ring.shape[2] for ring in generation.slots.cache.values) <= generation.cache_length

    monkeypatch.setattr(_Generation, "_fit_cache", noted)
    return seen


def test_windows_are_never_longer_than_the_cache(tiny, resized):
    """The rings of local layers have their window's length where the cache is longer, and overwrite what is masked."""
    local = tiny.model_copy(update={"num_layers": 1, "attention_pattern": "L", "sliding_window": 7})
    found = drawn(local, ends=OFTEN, slots=3, chunk=1)
    assert {old < new for old, new in resized if old != new} == {True, False}
    for response, logprobs in zip(found, trainers(local, first_params(local), found), strict=True):
        np.testing.assert_allclose(response.logprobs, logprobs, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("old", "new"), [(4, 9), (9, 4), (6, 6), (1, 5)])
@pytest.mark.parametrize("on_cpu", [True, False])
def test_each_token_stays_at_the_place_of_its_age(tiny, old, new, on_cpu):
    """Place (step - age) % size holds the token of that age; ages begin at 1 before the next token is written."""
    ages, kept = np.arange(1, old + 1), np.arange(1, min(old, new) + 1)
    keys_of = (lambda x: x.swapaxes(2, 3)) if on_cpu else (lambda x: x)
    cfg = tiny.model_copy(update={"num_layers": 1, "attention_pattern": "G"})
    resize = jax.jit(cache.resize, static_argnums=(1, 2))
    for step in (0, 3, 17, 1000):
        ring = np.zeros(old, np.float32)
        ring[(step - ages) % old] = ages
        rings = jnp.broadcast_to(ring[:, None], (2, 1, old, 3))
        with jax.sharding.use_abstract_mesh(make_mesh(1, 1, 1).abstract_mesh) if on_cpu else nullcontext():
            [keys], [values], _ = resize(cache.KVCache((keys_of(rings),), (rings,)), cfg, new, jnp.int32(step))
        for made in (keys_of(keys), values):
            assert made.shape == (2, 1, new, 3)
            np.testing.assert_array_equal(np.asarray(made)[1, 0, (step - kept) % new, 2], kept)


@pytest.mark.parametrize(
    ("prompt", "response", "bucket", "lengths"),
    [
        (512, 1536, 128, [256, 512, 1024, 2048]),
        (64, 64, 64, [128]),
        (300, 900, 300, [256, 384, 640, 1200]),
        (512, 128, 128, [256]),
        (7936, 256, 248, [256, 512]),
        (7936, 256, 7936, [4096, 8192]),
        (1024, 31_744, 1024, [1024, 2048, 4096, 8192, 16_384, 32_768]),
    ],
)
def test_the_lengths_of_a_cache(prompt, response, bucket, lengths):
    """Not below 256, where little is saved, nor below what the longest prompt of the bucket needs in any case."""
    found = SamplerSettings(prompt, response, slots=8, chunk=64)
    assert bucket in found.buckets
    assert found.cache_lengths(bucket) == lengths

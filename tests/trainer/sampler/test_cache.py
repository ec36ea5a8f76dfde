"""The cache is as long as the rows in flight need: what it holds survives each change, and responses stay the same."""

from __future__ import annotations

import gc
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conf.schema.training.settings import Mesh
from tests.trainer.conftest import make_mesh
from tests.trainer.sampler.test_engine import OFTEN, PROMPTS, assert_same, drawn, params_of, trainers
from trainer.sampler import SamplerSettings, cache, settings
from trainer.sampler.engine import _Generation
from trainer.sampler.programs import SamplerPrograms

SIZES = [5, 9, 18]
LONGEST_FIRST = sorted(PROMPTS, key=len, reverse=True)
"""The last rows in flight are short ones."""


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


ON_DEVICES = {"sizes": (1, 8, 1), "mesh": Mesh(data=-1, fsdp=1, tensor=2), "slots": 4}


@pytest.mark.deep
@pytest.mark.parametrize("changes", [{"slots": 3}, ON_DEVICES], ids=["one", "eight"])
def test_the_same_tokens_in_a_cache_that_grows_and_shrinks(tiny, resized, monkeypatch, changes):
    """As in a cache of one length; and a change over two lengths holds no more than two caches."""
    cfg = tiny.model_copy(update={"attention_pattern": "G"})
    held: list[set[int]] = []
    build, before = SamplerPrograms._build_resize, jax.live_arrays()  # those of other tests

    def watched(programs, length, slots):
        resize = build(programs, length, slots)

        def count_caches_first(old):
            gc.collect()
            shape = old.cache.values[0].shape
            own = [x for x in jax.live_arrays() if not any(x is other for other in before)]
            alive = [x.shape for x in own if x.ndim == 4 and not x.is_deleted()]
            held.append({each[2] for each in alive if (*each[:2], each[3]) == (*shape[:2], shape[3])})
            return resize(old)

        return count_caches_first

    monkeypatch.setattr(SamplerPrograms, "_build_resize", watched)
    found = drawn(cfg, ends=OFTEN, prompts=LONGEST_FIRST, chunk=1, **changes)
    assert {old < new for old, new in resized if old != new} == {True, False}
    assert {size for pair in resized for size in pair} == set(SIZES)
    assert {len(sizes) for sizes in held} == {1}
    if "mesh" not in changes:
        assert {(5, 18), (18, 5)} & set(resized), "so that there is a length between"
    monkeypatch.undo()
    assert_same(drawn(cfg, ends=OFTEN, prompts=LONGEST_FIRST), found)


def test_windows_are_never_longer_than_the_cache(tiny, resized):
    """The rings of local layers have their window's length where the cache is longer, and overwrite what is masked."""
    local = tiny.model_copy(update={"num_layers": 1, "attention_pattern": "L", "sliding_window": 7})
    found = drawn(local, ends=OFTEN, slots=3, chunk=1)
    assert {old < new for old, new in resized if old != new} == {True, False}
    for response, logprobs in zip(found, trainers(local, params_of(local), found), strict=True):
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
            [keys], [values] = resize(cache.KVCache((keys_of(rings),), (rings,)), cfg, new, jnp.int32(step))
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

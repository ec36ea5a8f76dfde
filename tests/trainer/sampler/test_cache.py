"""The cache is as long as the rows in flight need: what it holds survives each change, and responses stay the same."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conf.schema.training.settings import Mesh
from tests.trainer.sampler.test_engine import OFTEN, PROMPTS, assert_same, drawn, drawn_once
from trainer.sampler import SamplerSettings, cache, settings
from trainer.sampler.programs import SamplerPrograms

SIZES = [5, 9, 18]
LONGEST_FIRST = sorted(PROMPTS, key=len, reverse=True)
"""The last rows in flight are short ones."""


@pytest.fixture
def expected(tiny):
    """In a cache of one length."""
    return drawn(tiny, ends=OFTEN, prompts=LONGEST_FIRST)


@pytest.fixture
def resized(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Let even a cache of a few tokens have several lengths; return the changes as they happen."""
    monkeypatch.setattr(settings, "MIN_CACHE_LENGTH", 4)
    monkeypatch.setattr(settings, "LANES", 1)
    seen: list[tuple[int, int]] = []
    resize = SamplerPrograms.resize_cache

    def noted(programs, slots, old, new):
        seen.append((old, new))
        held = [ring.shape[2] for ring in slots.cache.keys]
        made = resize(programs, slots, old, new)
        assert max(held) <= old
        assert max(ring.shape[2] for ring in made.cache.keys) <= new
        return made

    monkeypatch.setattr(SamplerPrograms, "resize_cache", noted)
    return seen


@pytest.mark.parametrize(
    "changes",
    [
        {"slots": 7, "chunk": 2},
        pytest.param({"sizes": (4, 1, 1), "slots": 8, "chunk": 2}, marks=pytest.mark.deep),
        {"sizes": (1, 8, 1), "mesh": Mesh(data=-1, fsdp=1, tensor=2), "slots": 4, "chunk": 1},
    ],
    ids=str,
)
def test_the_same_tokens_in_a_cache_that_grows_and_shrinks(tiny, expected, resized, changes):
    found = drawn(tiny, ends=OFTEN, prompts=LONGEST_FIRST, **changes)
    assert {old < new for old, new in resized if old != new} == {True, False}
    assert {size for pair in resized for size in pair} == set(SIZES)
    assert_same(expected, found)


def test_windows_are_never_longer_than_the_cache(tiny, resized, monkeypatch):
    """The rings of local layers have their window's length where the cache is longer."""
    local = tiny.model_copy(update={"attention_pattern": "LG", "sliding_window": 7})
    found = drawn(local, ends=OFTEN, slots=3, chunk=1)
    assert {old < new for old, new in resized if old != new} == {True, False}
    monkeypatch.undo()
    assert_same(drawn_once(local, OFTEN), found)


@pytest.mark.parametrize("step", [0, 3, 17, 1000])
@pytest.mark.parametrize(("old", "new"), [(4, 9), (9, 4), (6, 6), (1, 5)])
def test_each_token_stays_at_the_place_of_its_age(tiny, step, old, new):
    """Place (step - age) % size holds the token of that age; ages begin at 1 before the next token is written."""
    ages = np.arange(1, old + 1)
    ring = np.zeros(old, np.float32)
    ring[(step - ages) % old] = ages
    rings = (jnp.broadcast_to(ring[:, None], (2, 1, old, 3)),)
    cfg = tiny.model_copy(update={"num_layers": 1, "attention_pattern": "G"})
    [keys], [values] = jax.jit(cache.resize, static_argnums=(1, 2))(
        cache.KVCache(rings, rings), cfg, new, jnp.int32(step)
    )
    kept = np.arange(1, min(old, new) + 1)
    for made in (keys, values):
        assert made.shape == (2, 1, new, 3)
        np.testing.assert_array_equal(np.asarray(made)[1, 0, (step - kept) % new, 2], kept)


@pytest.mark.parametrize(
    ("prompt", "response", "lengths"),
    [
        (512, 1536, [512, 1024, 2048]),
        (64, 64, [128]),
        (300, 900, [640, 1200]),
        (1024, 31_744, [8192, 16_384, 32_768]),
    ],
)
def test_the_lengths_of_a_cache(prompt, response, lengths):
    """No more than three, since each has programs of its own; not below 512, where little is saved."""
    found = SamplerSettings(prompt, response, slots=8, chunk=64)
    assert found.cache_lengths == lengths
    assert [found.cache_length_for(length) for length in (1, lengths[0], lengths[-1])] == [
        lengths[0],
        lengths[0],
        lengths[-1],
    ]

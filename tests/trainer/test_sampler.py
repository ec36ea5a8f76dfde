"""The sampler against decoding without a cache, against the trainer's log-probabilities, and on other meshes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.trainer.conftest import mesh_of
from trainer import chunked, model, sampler, weights
from trainer.distributed import place_batch
from trainer.tokenizer import EOS, PAD

RESPONSE = 10


@pytest.fixture
def prompts() -> sampler.Prompts:
    random = np.random.default_rng(0)
    lengths = np.array([3, 7, 5, 8, 1, 8, 2, 6], np.int32)
    tokens = np.full((8, 8), PAD, np.int32)
    for row, length in enumerate(lengths):
        tokens[row, :length] = random.integers(0, 256, length)
    return sampler.Prompts(tokens, lengths, np.arange(8, dtype=np.int32))


initial = jax.jit(weights.init, static_argnums=0)
forward = jax.jit(model.forward, static_argnums=1)


def drawn(cfg, prompts, sizes=(1, 1, 1), temperature=1.0, seed=0, bias_eos=0.0):
    mesh = mesh_of(*sizes)
    params = initial(cfg, jax.random.key(0))
    params["embedding"] = params["embedding"].at[EOS].add(bias_eos)
    with jax.set_mesh(mesh):
        sharded = jax.device_put(params, weights.shardings(cfg, mesh))
        draw = sampler.build(cfg, RESPONSE, mesh)
        found = draw(sharded, place_batch(prompts, mesh), jax.random.key(seed), jnp.float32(temperature))
        return params, jax.tree.map(np.asarray, found)


def end_to_end(prompts, found) -> np.ndarray:
    """Prompt and response of each row, padded to the right."""
    rows = np.full((8, 8 + RESPONSE), PAD, np.int32)
    for row in range(8):
        start, length = int(prompts.lengths[row]), int(found.lengths[row])
        rows[row, :start] = prompts.tokens[row, :start]
        rows[row, start : start + length] = found.tokens[row, :length]
    return rows


def uncached(params, cfg, rows):
    """Hidden states of whole rows, no cache anywhere."""
    return forward(params, cfg, jnp.array(rows), jnp.broadcast_to(jnp.arange(rows.shape[1]), rows.shape))[0]


def test_greedy_equals_decoding_without_a_cache(tiny, prompts) -> None:
    params, found = drawn(tiny, prompts, temperature=0.0)
    hidden = uncached(params, tiny, end_to_end(prompts, found))
    likeliest = np.asarray(jnp.argmax(model.unembed(params, tiny, hidden), axis=-1))
    for row in range(8):
        start, length = int(prompts.lengths[row]), int(found.lengths[row])
        np.testing.assert_array_equal(likeliest[row, start - 1 : start + length - 1], found.tokens[row, :length])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_trainer(tiny, prompts, temperature) -> None:
    params, found = drawn(tiny, prompts, temperature=temperature)
    rows = end_to_end(prompts, found)
    targets = jnp.array(np.roll(rows, -1, axis=1))
    logprob, _ = chunked.token_logprobs(uncached(params, tiny, rows), params, targets, tiny, temperature)
    for row in range(8):
        start, length = int(prompts.lengths[row]), int(found.lengths[row])
        expected = np.asarray(logprob)[row, start - 1 : start + length - 1]
        np.testing.assert_allclose(found.logprobs[row, :length], expected, atol=1e-4)


@pytest.mark.parametrize("sizes", [(8, 1, 1), (2, 2, 2)])
def test_the_same_tokens_on_any_mesh(tiny, prompts, sizes) -> None:
    _, one = drawn(tiny, prompts)
    _, many = drawn(tiny, prompts, sizes)
    np.testing.assert_array_equal(one.tokens, many.tokens)
    np.testing.assert_array_equal(one.lengths, many.lengths)


def test_a_row_does_not_depend_on_the_rows_beside_it(tiny, prompts) -> None:
    _, all_rows = drawn(tiny, prompts)
    one = sampler.Prompts(*(x[5:6] for x in prompts))
    _, alone = drawn(tiny, one)
    np.testing.assert_array_equal(all_rows.tokens[5:6], alone.tokens)


def test_other_keys_give_other_tokens(tiny, prompts) -> None:
    assert not np.array_equal(drawn(tiny, prompts, seed=0)[1].tokens, drawn(tiny, prompts, seed=1)[1].tokens)


def test_a_row_ends_at_eos_and_pads_after(tiny, prompts) -> None:
    _, found = drawn(tiny, prompts, bias_eos=0.15)
    ended = found.lengths < RESPONSE
    assert ended.any()
    for row in np.flatnonzero(ended):
        length = found.lengths[row]
        assert found.tokens[row, length - 1] == EOS
        assert (found.tokens[row, length:] == PAD).all()
        assert (found.logprobs[row, length:] == 0).all()
        assert EOS not in found.tokens[row, : length - 1]


def test_frequencies_follow_the_softmax() -> None:
    """Chi-square of 20,000 draws from a distribution over 8 tokens; the bound is the 99.9th percentile."""
    logits = jnp.array([0.0, 1.0, -1.0, 2.0, 0.5, -0.5, 1.5, -2.0])
    count, temperature = 20_000, 0.8
    keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(0), i))(jnp.arange(count))
    choose = jax.jit(sampler._choose)
    token, _ = choose(jnp.broadcast_to(logits, (count, 8)), keys, jnp.int32(3), jnp.float32(temperature))
    expected = np.asarray(jax.nn.softmax(logits / temperature)) * count
    observed = np.bincount(np.asarray(token), minlength=8)
    assert ((observed - expected) ** 2 / expected).sum() < 24.3

"""What is compiled: no weight is gathered for a token, no logits but a token's, caches of local layers hold windows."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conf.schema.training.model import Model
from conf.schema.training.settings import Mesh
from tests.groups import load_group
from tests.trainer.conftest import make_mesh
from trainer.models import weights
from trainer.sampler import Distribution, SamplerSettings, decode
from trainer.sampler.decode import Said, change_logits, sample_token, truncate_logits
from trainer.sampler.programs import SamplerPrograms

SLOTS, PROMPT, RESPONSE = 16, 24, 40
VOCAB = 2 * 127
"""What has 127 as a factor is the vocabulary, or a device's part of it."""


def model_of(**changes: object) -> Model:
    sizes = {"dim": 40, "mlp_dim": 88, "num_heads": 4, "num_kv_heads": 2, "head_dim": 12, "sliding_window": 5}
    return Model(**load_group("model/tiny") | sizes | {"vocab_size": VOCAB} | changes)


@pytest.fixture(scope="module", params=[1, 2])
def compiled(request: pytest.FixtureRequest) -> tuple[int, str]:
    """The decoding program on eight devices, over which the trainer splits all weights; by the sampler's `tensor`."""
    mesh = Mesh(data=-1, fsdp=1, tensor=request.param)
    settings = SamplerSettings(PROMPT, RESPONSE, SLOTS, chunk=8, dtype="float32", mesh=mesh)
    programs = SamplerPrograms(model_of(), settings, make_mesh(1, 8, 1), ends=(1,))
    function, arguments = next(f for name, *f, _ in programs.list_programs(samples=4) if name == "decode")
    return request.param, function.lower(*arguments).compile().as_text()


def shapes_of(hlo: str) -> set[tuple[int, ...]]:
    return {tuple(map(int, shape.split(","))) for shape in re.findall(r"\b\w*\d+\[([\d,]+)\]", hlo)}


def test_no_token_gathers_weights(compiled):
    """What is gathered at all is smaller than a device's part of any matrix."""
    tensor, hlo = compiled
    table = jax.tree.leaves(weights.weight_table(model_of())["layers"])
    least = min(math.prod(w.shape[1:]) for w in table if len(w.shape) > 2) // tensor
    gathers = [m[1] for m in re.finditer(r" = (.*?) all-gather(?:-start)?\(", hlo)]
    assert gathers  # the chunk's tokens, which every process is told
    assert max(math.prod(shape) for found in gathers for shape in shapes_of(found)) < least, gathers
    assert ("all-reduce" in hlo) == (tensor > 1)  # devices that hold all weights do not wait for each other


def test_logits_are_those_of_one_token_of_each_row(compiled):
    tensor, hlo = compiled
    rows = SLOTS // (8 // tensor)
    over_vocabulary = {shape for shape in shapes_of(hlo) if any(size % 127 == 0 for size in shape)}
    table = VOCAB * model_of().dim
    assert max(math.prod(shape) for shape in over_vocabulary) <= max(table, rows * VOCAB)
    assert {shape for shape in over_vocabulary if rows in shape}


def test_each_length_of_the_cache_has_programs_and_the_longest_decides_what_fits():
    settings = SamplerSettings(512, 1024, SLOTS, chunk=64)
    programs = SamplerPrograms(model_of(), settings, make_mesh(1, 1, 1), ends=(1,))
    found = {name: arguments for name, _, arguments, _ in programs.list_programs(samples=4)}
    of_each = {f"{name}{length}" for name in ("admit", "decode") for length in ("", "_768", "_384")}
    pairs = [(384, 768), (768, 1536)]
    resizes = {f"resize_{old}_to_{new}" for one, other in pairs for old, new in ((one, other), (other, one))}
    assert found.keys() == {"prefill", *of_each, *resizes}
    assert [found[name][1].cache.values[1].shape[2] for name in ("decode_768", "decode")] == [768, 1536]
    most = {name for name, *_ in programs.list_programs(samples=4, longest_only=True)}
    assert most == {"prefill", "admit", "decode", "resize_768_to_1536"}


def test_local_layers_hold_their_window_only():
    cfg = model_of(num_layers=3, attention_pattern="LLG")
    slots = jax.eval_shape(lambda: decode.init_slots(cfg, Distribution(), SLOTS, PROMPT + RESPONSE))
    assert [ring.shape for ring in slots.cache.values] == [(SLOTS, 2, n, 12) for n in (5, 5, 64)]


LOGITS = jnp.array([0.0, 1.0, -1.0, 2.0, 0.5, -0.5, 1.5, -2.0])
BOUND = 24.3
"""The 99.9th percentile of chi-square with 7 degrees of freedom."""


@pytest.mark.parametrize(
    ("drawn_from", "kept"),
    [
        (Distribution(), range(8)),
        (Distribution(top_k=8, top_p=1.0), range(8)),
        (Distribution(top_p=0.6), [3, 6]),
        (Distribution(top_k=4, top_p=0.9), [3, 6, 1]),  # of the four that top_k leaves, these have 0.91
        (Distribution(top_k=1), [3]),
        (Distribution(min_p=0.3), [3, 6]),  # at this temperature the third has exp(-1.25), 0.287 of the likeliest
        (Distribution(min_p=0.28), [3, 6, 1]),
        (Distribution(top_k=2, min_p=0.28), [3, 6]),
        (Distribution(logit_bias=((3, -100.0), (0, 0.0)), top_k=2), [6, 1]),
    ],
)
def test_frequencies_follow_the_softmax_of_what_is_left(drawn_from, kept):
    """20,000 draws, each with the key of a row of its own."""
    count, temperature = 20_000, 0.8
    keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(0), i))(jnp.arange(count))
    drawn = jax.jit(sample_token, static_argnums=4)
    at, rows = jnp.full(count, 3), jnp.broadcast_to(LOGITS, (count, 8))
    token, logprob = drawn(rows, keys, at, jnp.float32(temperature), drawn_from)
    weights = np.zeros(8)
    weights[list(kept)] = np.exp(np.asarray(LOGITS)[list(kept)] / temperature)
    expected = weights / weights.sum()
    observed = np.bincount(np.asarray(token), minlength=8)
    possible = expected > 0
    assert not observed[~possible].any()
    wanted = expected[possible] * count
    assert ((observed[possible] - wanted) ** 2 / wanted).sum() < BOUND
    np.testing.assert_allclose(np.exp(logprob), expected[token], rtol=1e-5)


def test_each_token_of_a_row_has_randomness_of_its_own():
    keys = jnp.broadcast_to(jax.random.key(0), (64,))
    token, _ = jax.jit(sample_token)(jnp.broadcast_to(LOGITS, (64, 8)), keys, jnp.arange(64), jnp.float32(1))
    assert len(np.unique(token)) > 4


def test_at_temperature_0_the_likeliest_token_is_taken():
    keys = jax.random.split(jax.random.key(0), 1)
    token, logprob = jax.jit(sample_token)(LOGITS[None], keys, jnp.zeros(1, int), jnp.float32(0))
    assert token.tolist() == [3]
    np.testing.assert_allclose(logprob, jax.nn.log_softmax(LOGITS)[3:4], rtol=1e-6)


def test_equal_logits_go_together():
    left = truncate_logits(jnp.array([[1.0, 2.0, 1.0, 0.0]]), Distribution(top_k=2))
    assert (left > -1e29).tolist() == [[True, True, True, False]]


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "drawn_from",
    [
        Distribution(),
        Distribution(top_k=1),
        Distribution(top_k=4),
        Distribution(top_p=0.5),
        Distribution(top_k=4, top_p=0.9),
        Distribution(min_p=0.2, logit_bias=((2, 1.0),)),
    ],
)
def test_logits_that_are_not_finite_show_and_leave_other_rows_alone(drawn_from, temperature, bad):
    """Not as token 0 at log-probability 0, which looks like certainty."""
    rows = jnp.stack([LOGITS, jnp.full(8, bad), LOGITS.at[5].set(bad), LOGITS.at[0].set(bad)])
    keys, at = jax.random.split(jax.random.key(0), 4), jnp.zeros(4, int)
    token, logprob = jax.jit(sample_token, static_argnums=4)(rows, keys, at, temperature, drawn_from)
    assert np.isnan(logprob).tolist() == [False, True, True, True]
    alone, known = sample_token(rows[:1], keys[:1], at[:1], jnp.float32(temperature), drawn_from)
    assert token[0] == alone[0]
    np.testing.assert_allclose(logprob[0], known[0], rtol=1e-6)


@pytest.mark.parametrize(
    ("repetition", "presence", "frequency"), [(1.3, 0, 0), (0.5, 0, 0), (1, 0.7, 0), (1, 0, -0.4), (2, 1, 1)]
)
def test_penalties_are_those_of_their_definitions(repetition, presence, frequency):
    """Written anew token by token: repetition counts prompt and response, the others the response alone."""
    prompt, response = [1, 2, 2, 7], [3, 3, 2, 5]
    said = Said(
        jnp.zeros((1, 8), bool).at[0, jnp.array(prompt)].set(True), jnp.bincount(jnp.array(response), length=8)[None]
    )
    drawn_from = Distribution(
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=((3, 2.0), (4, -1.0)),
    )
    found = change_logits(LOGITS[None], drawn_from, said)[0]
    for token, logit in enumerate(LOGITS.tolist()):
        logit += {3: 2.0, 4: -1.0}.get(token, 0)
        if token in prompt + response:
            logit = logit / repetition if logit > 0 else logit * repetition
        logit -= presence * (token in response) + frequency * response.count(token)
        assert found[token] == pytest.approx(logit, rel=1e-6)

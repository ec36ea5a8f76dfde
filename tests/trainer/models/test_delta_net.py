"""Gated DeltaNet: chunks of a row against one token after the other, documents, padding, and shared prompts."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conf.schema.training.layer_kinds import attended_entries
from conf.schema.training.model import DeltaNet, Model
from tests.trainer.models.reference_models import described, params_of
from trainer.losses import grpo
from trainer.models import decoder, delta_net
from trainer.models.shared_prompt import PromptGroup
from trainer.rl.programs import pad_sequences
from trainer.step import program

SIZES = DeltaNet(num_key_heads=2, num_value_heads=4, key_head_dim=6, value_head_dim=5, conv_kernel_dim=4)
LENGTH = 150
"""Two chunks and a part of one."""
run = jax.jit(delta_net.run)


@pytest.fixture(scope="module")
def given() -> tuple[delta_net.Inputs, tuple[jax.Array, ...]]:
    """Two rows that forget slowly."""
    random = np.random.default_rng(0)
    shapes = ((2, 6), (2, 6), (4, 5))

    def drawn(*shape: int) -> jax.Array:
        return jnp.asarray(random.normal(size=shape), jnp.float32)

    slow = -0.1 * jax.nn.softplus(drawn(2, LENGTH, 4))
    inputs = delta_net.Inputs(
        tuple(drawn(2, LENGTH, *shape) for shape in shapes), slow, jax.nn.sigmoid(drawn(2, LENGTH, 4))
    )
    return inputs, tuple(drawn(4, *shape) for shape in shapes)


def part(inputs: delta_net.Inputs, start: int, end: int) -> delta_net.Inputs:
    return jax.tree.map(lambda x: x[:, start:end], inputs)


def by_token(inputs: delta_net.Inputs, kernels: tuple[jax.Array, ...]) -> tuple[jax.Array, delta_net.Memory]:
    memory, found = delta_net.empty_memory(SIZES, 2, "float32"), []
    for i in range(inputs.rate.shape[1]):
        out, memory = run(part(inputs, i, i + 1), kernels, memory)
        found.append(out)
    return jnp.concatenate(found, axis=1), memory


def assert_close(found: object, wanted: object, of_largest: float = 5e-6) -> None:
    def compare(a: jax.Array, b: jax.Array) -> None:
        np.testing.assert_allclose(a, b, rtol=0, atol=of_largest * float(np.abs(b).max()))

    jax.tree.map(compare, found, wanted)


def test_a_row_is_its_tokens_one_after_the_other(given):
    """Also beyond the convolution, whose tokens the state knows."""
    whole, wanted = run(*given), by_token(*given)
    assert_close(whole, wanted)
    rest = run(part(given[0], 70, LENGTH), given[1], run(part(given[0], 0, 70), given[1])[1])
    assert_close((whole[0][:, 70:], whole[1]), rest)
    anew = run(part(given[0], 70, LENGTH), given[1])[0]
    assert np.abs(anew[:, 5:] - whole[0][:, 75:]).max() > 0.01


@pytest.mark.parametrize("starts", [(64,), (3, 65, 66, 128), (70, 140)])
def test_each_document_of_a_row_is_computed_as_by_itself(given, starts):
    """State and convolution begin anew, also within chunks and for documents that are longer than one."""
    edges = [0, *starts, LENGTH]
    segments = np.repeat(np.arange(1, len(edges)), np.diff(edges))
    found = run(*given, segments=jnp.asarray(np.tile(segments, (2, 1))))[0]
    alone = [run(part(given[0], a, b), given[1])[0] for a, b in pairwise(edges)]
    assert_close(found, jnp.concatenate(alone, axis=1))


def test_padding_leaves_the_memory_as_it_is(given):
    """On the right, of prompts of several lengths, one shorter than the convolution; and on the left."""
    inputs, kernels = given
    ends = jnp.array([2, 90])
    out, memory = run(inputs, kernels, counted=jnp.arange(LENGTH) < ends[:, None])
    begins = LENGTH - ends
    rolled = jax.tree.map(lambda x: jnp.stack([jnp.roll(x[i], begins[i], axis=0) for i in range(2)]), inputs)
    moved, other = run(rolled, kernels, counted=jnp.arange(LENGTH) >= begins[:, None])
    for i, end in enumerate((2, 90)):
        row = jax.tree.map(lambda x, i=i: x[i : i + 1], part(inputs, 0, end))
        alone, wanted = run(row, kernels)
        assert_close((out[i, :end], moved[i, LENGTH - end :]), (alone[0], alone[0]))
        for found in (memory, other):
            assert_close(jax.tree.map(lambda x, i=i: x[i : i + 1], found), wanted)


def test_tokens_that_repeat_are_inverted_exactly():
    """Powers of such a system reach 1e17."""
    lower = np.tril(np.ones((64, 64), np.float32), -1)
    found = np.asarray(delta_net._unit_inverse(jnp.asarray(lower)))
    np.testing.assert_array_equal(found, np.eye(64) - np.eye(64, k=-1))


def test_gradients_are_those_of_the_tokens(given):
    inputs, kernels = part(given[0], 0, 80), given[1]
    aims = np.random.default_rng(1).normal(size=(2, 80, 4, 5)).astype(np.float32)

    def scanned(inputs, kernels):
        def step(memory, one):
            out, memory = delta_net.run(jax.tree.map(lambda x: x[:, None], one), kernels, memory)
            return memory, out[:, 0]

        first = jax.tree.map(lambda x: x.swapaxes(0, 1), inputs)
        out = jax.lax.scan(step, delta_net.empty_memory(SIZES, 2, "float32"), first)[1]
        return (aims * out.swapaxes(0, 1)).sum()

    def together(inputs, kernels):
        return (aims * delta_net.run(inputs, kernels)[0]).sum()

    found, wanted = (jax.jit(jax.grad(each, argnums=(0, 1)))(inputs, kernels) for each in (together, scanned))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())


def test_products_of_a_row_are_those_that_are_counted(given):
    """Inverting takes 12 products forward and 2 backward, of which a third is counted forward, as of all others."""
    one = described("qwen3_5").model_copy(update={"num_layers": 1, "attention_pattern": "D", "delta_net": SIZES})
    jaxpr = jax.make_jaxpr(lambda *given: delta_net.run(*given)[0])(part(given[0], 0, 128), given[1])
    tokens, of_head = 2 * 128, 12 * 64**2 - 14 * 64**2 // 3
    inverses = 2 * tokens * SIZES.num_value_heads * of_head
    assert program._flops(jaxpr.jaxpr, 1) == 4 * attended_entries(one, 128) * tokens + inverses


def test_documents_of_a_row_have_the_hidden_states_of_rows_of_their_own():
    cfg, params = described("qwen3_5"), params_of("qwen3_5")
    tokens = np.random.default_rng(2).integers(0, 64, (1, 90))
    edges = (0, 5, 72, 90)
    segments = np.repeat(np.arange(1, 4), np.diff(edges))[None]
    positions = np.concatenate([np.arange(b - a) for a, b in pairwise(edges)])[None]
    forward = jax.jit(decoder.forward, static_argnums=1)
    found = forward(params, cfg, tokens, positions, segments)
    for a, b in pairwise(edges):
        alone = forward(params, cfg, tokens[:, a:b], positions[:, a:b])
        assert_close(found[:, a:b], alone, of_largest=1e-5)


def test_responses_that_share_a_prompt_are_computed_as_rows_by_themselves():
    """Log-probabilities and gradients; prompts and responses of all lengths."""
    cfg, params = described("qwen3_5", logit_chunk=4), params_of("qwen3_5")
    random = np.random.default_rng(0)
    prompts = [prompt for size in (7, 1, 4) for prompt in [random.integers(0, 64, size).tolist()] * 2]
    tokens, mask = pad_sequences(prompts, [random.integers(0, 64, n).tolist() for n in (9, 1, 5, 9, 2, 8)], 16)
    batch = {"tokens": jnp.asarray(tokens), "mask": jnp.asarray(mask)}
    aims = random.normal(size=mask.shape) * mask

    def scored(params, group):
        found = grpo.per_token_logps(params, cfg, batch, 0.7, group)[0] * mask
        return (aims * found).sum(), found

    each = jax.jit(jax.value_and_grad(scored, has_aux=True), static_argnums=1)
    ((_, together), slope), ((_, apart), wanted) = (each(params, group) for group in (PromptGroup(2, 7, 9), None))
    np.testing.assert_allclose(together, apart, rtol=0, atol=2e-5)
    norm = np.sqrt(sum(np.vdot(g, g) for g in jax.tree.leaves(wanted)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * norm), slope, wanted)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"delta_net": None}, "delta_net is of the layers D of attention_pattern: set both or none"),
        ({"attention_pattern": "G"}, "set both or none"),
        ({"biases": "qkv"}, "delta_net needs num_kv_shared_layers 0 and no biases of attention"),
        ({"residual": "mhc"}, "delta_net needs attention_form causal and residual plain"),
        ({"delta_net": SIZES.model_dump() | {"num_key_heads": 3}}, "num_value_heads .4. must be a multiple of"),
    ],
)
def test_what_recurrent_layers_lack_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Model(**described("qwen3_5").model_dump() | changes)

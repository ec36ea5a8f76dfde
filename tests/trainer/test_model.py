"""The decoder against transformers' Gemma 2, against itself with a cache, and its weight table."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from conf.runfile import RunFileError
from conf.training import Mesh, Model
from tests.trainer.conftest import mesh_of
from trainer import chunked, mesh, model, sampler

SHAPES = {  # as CONFIG in fixtures/make_gemma2.py
    "layers": 3,
    "dim": 32,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 12,
    "hidden": 48,
    "vocab": 97,
    "window": 5,
    "query_scalar": 10,
    "attention_softcap": 2.0,
    "final_softcap": 3.0,
}
LAYER = {  # our name: theirs, and the shape of one layer's weight after a transposition
    "attention_norm": ("input_layernorm", None),
    "query": ("self_attn.q_proj", (32, 4, 12)),
    "key": ("self_attn.k_proj", (32, 2, 12)),
    "value": ("self_attn.v_proj", (32, 2, 12)),
    "output": ("self_attn.o_proj", (4, 12, 32)),
    "post_attention_norm": ("post_attention_layernorm", None),
    "mlp_norm": ("pre_feedforward_layernorm", None),
    "gate": ("mlp.gate_proj", (32, 48)),
    "up": ("mlp.up_proj", (32, 48)),
    "down": ("mlp.down_proj", (48, 32)),
    "post_mlp_norm": ("post_feedforward_layernorm", None),
}


@pytest.fixture(scope="module")
def gemma() -> dict[str, np.ndarray]:
    """What transformers computed."""
    with np.load(Path(__file__).with_name("fixtures") / "gemma2.npz") as file:
        return dict(file)


@pytest.fixture(scope="module")
def weights(gemma: dict[str, np.ndarray]) -> model.Params:
    """Its weights in our tree."""

    def stacked(theirs: str, shape: tuple[int, ...] | None) -> jax.Array:
        layers = [gemma[f"weight/model.layers.{i}.{theirs}.weight"] for i in range(3)]
        return jnp.stack([layer if shape is None else layer.T.reshape(shape) for layer in layers])

    return {
        "embedding": jnp.array(gemma["weight/model.embed_tokens.weight"]),
        "layers": {ours: stacked(*theirs) for ours, theirs in LAYER.items()},
        "final_norm": jnp.array(gemma["weight/model.norm.weight"]),
    }


@pytest.fixture(params=[False, True], ids=["unrolled", "scanned"])
def gemma_cfg(tiny: Model, request: pytest.FixtureRequest) -> Model:
    remat = "full" if request.param else "none"
    return tiny.model_copy(update=SHAPES | {"scan_layers": request.param, "remat": remat, "logit_chunk": 7})


forward = jax.jit(model.forward, static_argnums=1)
unembed = jax.jit(model.unembed, static_argnums=1)


def positions_of(tokens: jax.Array) -> jax.Array:
    return jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)


def test_logits_equal_transformers(gemma, weights, gemma_cfg):
    tokens = jnp.array(gemma["tokens"])
    hidden, _ = forward(weights, gemma_cfg, tokens, positions_of(tokens))
    np.testing.assert_allclose(unembed(weights, gemma_cfg, hidden), gemma["logits"], rtol=0, atol=1e-5)


def test_loss_and_gradient_norm_equal_transformers(gemma, weights, gemma_cfg):
    tokens = jnp.array(gemma["tokens"])
    counted = jnp.ones_like(tokens).at[:, -1].set(0)  # the last token has no successor

    @jax.value_and_grad
    def loss(params: model.Params) -> jax.Array:
        hidden, _ = forward(params, gemma_cfg, tokens, positions_of(tokens))
        total = chunked.cross_entropy(hidden, params, jnp.roll(tokens, -1, axis=1), counted, gemma_cfg)
        return total / counted.sum()

    value, gradient = jax.jit(loss)(weights)
    norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(gradient)))
    np.testing.assert_allclose(value, gemma["loss"], rtol=1e-6)
    np.testing.assert_allclose(norm, gemma["gradient_norm"], rtol=1e-5)


def test_cached_decoding_equals_uncached(gemma, weights, gemma_cfg):
    """Prompts of unlike length, padded on the right and prefilled at once; then one token at a time."""
    tokens = jnp.array(gemma["tokens"])
    prompts, total = jnp.array([9, 14]), tokens.shape[1]
    prefill = tokens[:, :14].at[0, 9:].set(50)  # padding that must leave no trace
    hidden, cache = forward(
        weights, gemma_cfg, prefill, positions_of(prefill), cache=model.init_cache(gemma_cfg, 2, total)
    )
    for row in range(2):
        seen = unembed(weights, gemma_cfg, hidden[row, : prompts[row]])
        np.testing.assert_allclose(seen, gemma["logits"][row, : prompts[row]], rtol=0, atol=2e-5)
    for i in range(total - 14):
        at = (prompts + i)[:, None]
        token = jnp.take_along_axis(tokens, at, axis=1)
        hidden, cache = forward(weights, gemma_cfg, token, at, cache=cache)
        logits = unembed(weights, gemma_cfg, hidden[:, 0])
        np.testing.assert_allclose(logits, gemma["logits"][jnp.arange(2), at[:, 0]], rtol=0, atol=2e-5)


def test_greedy_replies_equal_transformers(gemma, weights, gemma_cfg):
    """Prompts of eight lengths in one batch; transformers answered each alone."""
    rows, longest = gemma["prompts"].shape
    lengths = gemma["prompt_lengths"]
    padded = np.where(np.arange(longest) < lengths[:, None], gemma["prompts"], 0)
    draw = sampler.build(gemma_cfg, gemma["generated"].shape[1], mesh_of(1, 1, 1))
    prompts = sampler.Prompts(padded, lengths, np.arange(rows, dtype=np.int32))
    found = draw(weights, prompts, jax.random.key(0), jnp.float32(0))
    assert len(np.unique(gemma["generated"])) > rows  # replies that change on the way
    np.testing.assert_array_equal(found.tokens, gemma["generated"])


def test_documents_in_one_row_do_not_see_each_other(tiny):
    params = jax.jit(model.init, static_argnums=0)(tiny, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (1, 20), 0, tiny.vocab)
    positions = jnp.concatenate([jnp.arange(12), jnp.arange(8)])[None]
    packed, _ = forward(params, tiny, tokens, positions, segments=(jnp.arange(20) >= 12)[None].astype(int))
    first, _ = forward(params, tiny, tokens[:, :12], positions[:, :12])
    second, _ = forward(params, tiny, tokens[:, 12:], positions[:, 12:])
    np.testing.assert_allclose(packed, jnp.concatenate([first, second], axis=1), atol=1e-5)


def test_a_cache_takes_no_segments(tiny):
    tokens = jnp.zeros((1, 2), int)
    with pytest.raises(ValueError, match="segments and a cache exclude each other"):
        forward({"embedding": jnp.zeros((512, 64))}, tiny, tokens, tokens, tokens, model.init_cache(tiny, 1, 2))


def test_bfloat16_activations_stay_close(gemma, weights, gemma_cfg):
    tokens = jnp.array(gemma["tokens"])
    hidden, _ = forward(
        weights, gemma_cfg.model_copy(update={"activation_dtype": "bfloat16"}), tokens, positions_of(tokens)
    )
    assert hidden.dtype == jnp.bfloat16
    assert jnp.abs(unembed(weights, gemma_cfg, hidden) - gemma["logits"]).mean() < 0.05


def test_gradients_equal_finite_differences(tiny):
    small = tiny.model_copy(update={"layers": 1, "dim": 8, "head_dim": 4, "hidden": 8, "vocab": 11, "logit_chunk": 3})
    tokens = jax.random.randint(jax.random.key(1), (2, 7), 0, 11)

    def loss(params: model.Params) -> jax.Array:
        hidden, _ = forward(params, small, tokens, positions_of(tokens))
        logprobs, entropy = chunked.token_logprobs(hidden, params, tokens, small, temperature=0.7)
        return logprobs.mean() + 0.1 * entropy.mean()

    params = jax.jit(model.init, static_argnums=0)(small, jax.random.key(0))
    check_grads(jax.jit(loss), (params,), order=1, modes=["rev"], atol=2e-2, rtol=2e-2, eps=1e-2)


def test_table_init_and_shapes_agree(tiny):
    params = jax.jit(lambda key: model.init(tiny, key))(jax.random.key(3))
    abstract = model.abstract(tiny)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(lambda x: (x.shape, x.dtype), abstract)
    assert sum(x.size for x in jax.tree.leaves(params)) == 156_224
    assert not params["layers"]["mlp_norm"].any()
    np.testing.assert_allclose(params["layers"]["down"].std(), 256**-0.5, rtol=0.05)


def test_published_size_of_gemma2_2b():
    from tests.trainer.conftest import group

    weights = jax.tree.leaves(model.weight_table(Model(**group("model/gemma2_2b"))))
    assert sum(int(np.prod(weight.shape)) for weight in weights) == 2_614_341_888 + 128 * 2304  # 128 padding rows


def test_shardings_name_what_cannot_be_split(tiny):
    with pytest.raises(RunFileError, match=r"mesh\.tensor: 4 devices cannot split the 2 kv_heads of layers\.key"):
        model.shardings(tiny, mesh.build(Mesh(data=-1, fsdp=1, tensor=4)))

"""The decoder against transformers through its checkpoints, nanochat against torch; its weight table."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from conf.config_json import FAMILIES as FAMILIES_OF_CONFIGS
from conf.config_json import WITH_IMAGES
from conf.formats import RunFileError
from conf.schema.training.model import KEYS_FREE_OF_WEIGHTS, Model
from conf.schema.training.settings import Mesh
from tests.conftest import wide
from tests.groups import CONF, load_group
from tests.paths import ROOT
from tests.trainer.conftest import make_mesh
from tests.trainer.models.reference_models import DERIVED, FAMILIES, VARIANTS, described, expected_of, params_of
from trainer.distributed import mesh
from trainer.losses import token_logprobs
from trainer.models import decoder, weights
from trainer.models.layers import linear, linear_by_rows
from trainer.pretrained import hf_families

forward = jax.jit(decoder.forward, static_argnums=1)
unembed = jax.jit(decoder.unembed, static_argnums=1)


def positions_of(tokens: jax.Array | np.ndarray) -> np.ndarray:
    return np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)


GRADED = ("gemma2", "gpt2", "nanochat", "qwen3_biases", "olmo2")
"""Together they have every kind of weight; gradients of the others are deep."""
EVERY = (*FAMILIES, "nanochat", *VARIANTS, *DERIVED)
ROWS = [(family, family in GRADED) for family in EVERY]
ROWS += [pytest.param(family, True, marks=pytest.mark.deep) for family in EVERY if family not in GRADED]


def bounds(family: str) -> tuple[float, float]:
    """Return how far logits, and in relation a gradient norm, may be from the reference's.

    A DeltaNet normalizes what its heads read, which magnifies the rounding of what is small, Gemma 4 with experts
    both branches: transformers is 1.9e-5 and 6e-7 from itself in float64.
    """
    if family.startswith(("qwen3_5", "gemma4_moe")):
        return 1e-5 * float(np.abs(expected_of(family)["logits"]).max()), 2e-6 if family == "gemma4_moe" else 1e-5
    return 1e-5, 1e-6 if family in DERIVED else 1e-5


@pytest.mark.parametrize(("family", "is_graded"), ROWS)
def test_logits_loss_and_gradient_norm_equal_the_reference(family, is_graded):
    """Layers of families are scanned, those of variants unrolled, and so are most that derive from another family."""
    unrolled = family in VARIANTS or (family in DERIVED and not is_graded)
    how = {"scan_layers": False, "remat": "none"} if unrolled else {"scan_layers": True, "remat": "full"}
    cfg, expected = described(family, logit_chunk=7, **how), expected_of(family)
    tokens = expected["tokens"]
    counted = np.ones_like(tokens)
    counted[:, -1] = 0  # the last token has no successor

    def loss(params: weights.Params) -> tuple[jax.Array, jax.Array]:
        hidden = decoder.forward(params, cfg, tokens, positions_of(tokens))
        total = token_logprobs.cross_entropy(hidden, params, np.roll(tokens, -1, axis=1), counted, cfg)
        return total / counted.sum(), decoder.unembed(params, cfg, hidden)

    computed = jax.jit(jax.value_and_grad(loss, has_aux=True) if is_graded else lambda params: (loss(params), None))
    (value, logits), gradient = computed(params_of(family))
    of_logits, of_norm = bounds(family)
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=of_logits)
    np.testing.assert_allclose(value, expected["loss"], rtol=1e-6)
    if is_graded:
        norm = np.sqrt(sum(np.vdot(g, g) for g in jax.tree.leaves(weights.trained_part(gradient, cfg))))
        np.testing.assert_allclose(norm, expected["gradient_norm"], rtol=of_norm)
    if family == "nanochat":
        for ours, theirs in (("residual_scale", "resid_lambdas"), ("embedding_scale", "x0_lambdas")):
            found = gradient["layers"][ours]
            np.testing.assert_allclose(found, expected[f"{theirs}_gradient"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("sizes", [(1, 2, 2), *wide((4, 1, 1), (2, 2, 1))], ids=str)
@pytest.mark.parametrize("family", ["olmo2", *wide(*(name for name in DERIVED if name != "olmo2"))])
def test_a_mesh_computes_what_one_device_does(family, sizes):
    """The rows twice, so that four devices have one each."""
    cfg, expected = described(family, scan_layers=False, remat="none"), expected_of(family)
    tokens = np.tile(expected["tokens"], (2, 1))
    devices = make_mesh(*sizes)
    placed = jax.device_put(params_of(family), weights.param_shardings(cfg, devices))

    def loss(params: weights.Params) -> tuple[jax.Array, jax.Array]:
        logits = decoder.unembed(params, cfg, decoder.forward(params, cfg, tokens, positions_of(tokens)))
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], axis=-1)
        return -chosen.mean(), logits

    with jax.set_mesh(devices):
        (value, logits), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(placed)
    of_logits, of_norm = bounds(family)
    np.testing.assert_allclose(logits[:2], expected["logits"], rtol=0, atol=of_logits)
    np.testing.assert_allclose(value, expected["loss"], rtol=1e-6)
    norm = np.sqrt(sum(np.vdot(g, g) for g in jax.tree.leaves(weights.trained_part(gradient, cfg))))
    np.testing.assert_allclose(norm, expected["gradient_norm"], rtol=of_norm)


def test_a_norm_over_all_heads_needs_weights():
    with pytest.raises(ValueError, match="qk_norm whole needs a norm with weights, not rms_plain"):
        described("nanochat", qk_norm="whole")


def test_bfloat16_activations_stay_close():
    """In unrolled layers. Gradients: tests/trainer/step/test_train_step.py."""
    cfg, expected = described("gemma2", scan_layers=False, remat="none"), expected_of("gemma2")
    low = cfg.model_copy(update={"activation_dtype": "bfloat16"})
    hidden = forward(params_of("gemma2"), low, expected["tokens"], positions_of(expected["tokens"]))
    assert hidden.dtype == jnp.bfloat16
    logits = np.asarray(unembed(params_of("gemma2"), cfg, hidden))
    assert np.abs(logits - expected["logits"]).mean() < 0.05


@pytest.mark.parametrize(
    ("product", "dtype", "shape"),
    [(linear, dtype, shape) for dtype in ("float32", "bfloat16") for shape in ((48, 8), (8, 48), (12, 2, 3))]
    + [(linear_by_rows, "float32", (48, 8))],
)
def test_gradients_of_a_product_are_those_of_the_einsum(product, dtype, shape):
    """Tall weights have a gradient of their own on CPU; so have logits, whose table is multiplied by its rows."""
    by_rows = product is linear_by_rows
    width, outputs = (shape[1], shape[:1]) if by_rows else (shape[0], shape[1:])
    x = jax.random.normal(jax.random.key(0), (2, 5, width), dtype)
    weight, change = (jax.random.normal(jax.random.key(i), size) for i, size in enumerate((shape, (2, 5, *outputs))))

    @partial(jax.jit, static_argnums=0)
    def computed(product, x, weight, change):
        out, pull = jax.vjp(product, x, weight)
        return out, *pull(change.astype(dtype))

    def einsum(x, weight):
        return jnp.einsum("btd,vd->btv" if by_rows else "btd,d...->bt...", x, weight.astype(dtype))

    for found, wanted in zip(computed(product, x, weight, change), computed(einsum, x, weight, change), strict=True):
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        tolerance = 1e-5 if dtype == "float32" else 0.1
        np.testing.assert_allclose(np.float32(found), np.float32(wanted), rtol=0, atol=tolerance)


def test_table_init_and_shapes_agree(tiny):
    params = jax.jit(lambda key: weights.init_params(tiny, key))(jax.random.key(3))
    abstract = weights.abstract_params(tiny)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(lambda x: (x.shape, x.dtype), abstract)
    assert sum(x.size for x in jax.tree.leaves(params)) == 156_224
    assert not params["layers"]["mlp_norm"].any()
    np.testing.assert_allclose(params["layers"]["down"].std(), 256**-0.5, rtol=0.05)


def test_shardings_name_what_cannot_be_split(tiny):
    with pytest.raises(RunFileError, match=r"mesh\.tensor: 4 devices cannot split the 2 kv_heads of layers\.key"):
        weights.param_shardings(tiny, mesh.build_mesh(Mesh(data=-1, fsdp=1, tensor=4)))


PUBLISHED = yaml.safe_load((ROOT / "tests" / "trainer" / "fixtures" / "published.yaml").read_text())
PADDING = {"gemma2_2b": 128, "gemma2_9b": 128}
"""Rows that DeepMind's tables have more than Hugging Face's."""


def test_every_model_is_compared():
    ours = {file.stem for file in (CONF / "model").glob("*.yaml")}
    assert ours == PUBLISHED.keys() | {"nanochat_d16", "nash_mhc_3b", "tiny", "trm", "pretrained", "hf"}
    table = (ROOT / "docs" / "models.md").read_text().partition("Any but")[0]
    assert sorted(re.findall(r"`(\w+)`(?=[^|]*\|[^|]*\|\n)", table)) == sorted(ours), "the page's first column"


def test_every_family_is_computed_here_and_has_a_size():
    """Ministral's published size says that it is a Mistral. Sampler, exports and adapters have lists of the same."""
    families = set(FAMILIES_OF_CONFIGS.values())
    assert families <= set(EVERY)
    kinds = {row["config"]["model_type"] for row in PUBLISHED.values()}
    assert {FAMILIES_OF_CONFIGS[WITH_IMAGES.get(kind, kind)] for kind in kinds} == families - {"ministral"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_is_the_published_one(name):
    """What is computed, and the number of weights; how it is computed, and first values, may differ."""
    ours, theirs = Model(**load_group(f"model/{name}")), hf_families.model_from_config(PUBLISHED[name]["config"])
    free = KEYS_FREE_OF_WEIGHTS - {"max_seq_len"}
    found, wanted = ours.model_dump(exclude=free), theirs.model_dump(exclude=free)
    wanted["vocab_size"] += PADDING.get(name, 0)
    assert found == wanted
    assert weights.num_params(ours) == PUBLISHED[name]["parameters"] + PADDING.get(name, 0) * ours.dim


def test_nanochat_d16_has_the_weights_of_the_original():
    """And two scalars for each layer."""
    assert weights.num_params(Model(**load_group("model/nanochat_d16"))) == 335_544_320 + 2 * 16

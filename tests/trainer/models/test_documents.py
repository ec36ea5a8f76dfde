"""Documents that share a row: hidden states and gradients are those of each document alone, with any kernel."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conf.schema.training.model import Model
from tests.conftest import deep
from tests.trainer.conftest import make_mesh
from trainer.distributed import mesh
from trainer.losses import token_logprobs
from trainer.models import attention, decoder, weights

LENGTHS = ((7, 12, 1), (12, 7))
"""Of the documents of each row; what is left of the row is padding. Each other length is compiled."""
ROW = 26


@pytest.fixture(params=["plain", "splash", "cudnn"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The TPU's is interpreted here; cuDNN's has no documents, so that the plain one stands in for it."""
    monkeypatch.setattr(attention, "splash_attention", partial(attention.splash_attention, interpret=True))
    return request.param


@pytest.fixture
def packed() -> dict[str, np.ndarray]:
    """A batch as the loop has it: segments count from 1, 0 is padding; positions restart at each document."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, 512, (2, ROW + 1), dtype=np.int32)
    segments, positions = np.zeros((2, 2, ROW), np.int32)
    for row, lengths in enumerate(LENGTHS):
        ends = np.cumsum(lengths)
        for number, (end, length) in enumerate(zip(ends, lengths, strict=True), start=1):
            segments[row, end - length : end] = number
            positions[row, end - length : end] = np.arange(length)
    counted = ((segments > 0) & (random.random((2, ROW)) < 0.8)).astype(np.float32)
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "weights": counted,
        "segments": segments,
        "positions": positions,
    }


def loss(params: weights.Params, cfg: Model, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """And the hidden states."""
    hidden = decoder.forward(params, cfg, batch["tokens"], batch["positions"], batch.get("segments"))
    return token_logprobs.cross_entropy(hidden, params, batch["targets"], batch["weights"], cfg), hidden


graded = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=1)


def apart(params: weights.Params, cfg: Model, batch: dict[str, np.ndarray]) -> tuple[np.ndarray, weights.Params]:
    """Hidden states [2, ROW, D] and the summed gradient, one document at a time, without padding or segments."""
    hidden = np.zeros((2, ROW, cfg.dim), np.float32)
    gradients = []
    for row, lengths in enumerate(LENGTHS):
        for end, length in zip(np.cumsum(lengths), lengths, strict=True):
            one = {k: v[row : row + 1, end - length : end] for k, v in batch.items() if k != "segments"}
            (_, found), gradient = graded(params, cfg, one)
            hidden[row, end - length : end] = found[0]
            gradients.append(gradient)
    return hidden, jax.tree.map(lambda *g: sum(g), *gradients)


@pytest.fixture(scope="module")
def alone() -> dict[str, tuple[np.ndarray, weights.Params]]:
    """Results of `apart`, by model."""
    return {}


@pytest.mark.parametrize("scan", [pytest.param(False, marks=pytest.mark.deep), True], ids=["unrolled", "scanned"])
def test_documents_of_a_row_are_each_alone(tiny, packed, kernel, scan, alone):
    cfg = tiny.model_copy(update={"num_layers": 3, "scan_layers": scan, "attention": kernel})
    params = jax.jit(weights.init_params, static_argnums=0)(cfg, jax.random.key(0))
    if not alone:
        alone["tiny"] = apart(params, cfg.model_copy(update={"attention": "plain", "scan_layers": False}), packed)
    hidden, gradient = alone["tiny"]
    (_, found), ours = graded(params, cfg, packed)
    real = packed["segments"] > 0
    np.testing.assert_allclose(np.asarray(found)[real], hidden[real], atol=2e-5)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


def test_another_document_of_the_row_leaves_no_trace(tiny, packed, kernel):
    cfg = tiny.model_copy(update={"attention": kernel})
    params = jax.jit(weights.init_params, static_argnums=0)(cfg, jax.random.key(0))
    other = packed | {"tokens": np.where(packed["segments"] == 2, 5, packed["tokens"])}
    (_, before), _ = graded(params, cfg, packed)
    (_, after), _ = graded(params, cfg, other)
    same = packed["segments"] != 2
    np.testing.assert_array_equal(np.asarray(before)[same], np.asarray(after)[same])


@pytest.mark.parametrize("kernel", ["splash", *deep("plain", "cudnn")], indirect=True)
def test_documents_on_a_mesh(tiny, packed, kernel):
    """Rows, heads and weights split over eight devices."""
    cfg = tiny.model_copy(update={"attention": kernel, "scan_layers": True, "remat": "attention"})
    params = jax.jit(weights.init_params, static_argnums=0)(cfg, jax.random.key(0))
    batch = jax.tree.map(lambda x: np.concatenate([x, x[::-1]]), packed)
    (one, hidden), gradient = graded(params, cfg.model_copy(update={"attention": "plain"}), batch)
    devices = make_mesh(2, 2, 2)
    with jax.set_mesh(devices):
        placed = jax.tree.map(lambda x: jax.device_put(jnp.array(x), mesh.named_sharding(devices, "batch")), batch)
        split = jax.device_put(params, weights.param_shardings(cfg, devices))
        (many, found), ours = graded(split, cfg, placed)
    np.testing.assert_allclose(many, one, rtol=1e-5)
    real = batch["segments"] > 0
    np.testing.assert_allclose(np.asarray(found)[real], np.asarray(hidden)[real], atol=2e-5)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)

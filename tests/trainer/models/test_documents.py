"""Documents that share a row: hidden states and gradients are those of each document alone, with any kernel."""

from functools import partial

import jax
import numpy as np
import pytest

from conf.schema.training.model import Model
from trainer.losses import token_logprobs
from trainer.models import attention, decoder, weights

LENGTHS = ((12, 1, 12), (1, 12))
"""Of the documents of each row; what is left of the row is padding. Each other length is compiled."""
ROW = 26


@pytest.fixture
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The TPU's is interpreted here; cuDNN's has no documents, so that the plain one stands in for it."""
    monkeypatch.setattr(attention, "splash_attention", partial(attention.splash_attention, interpret=True))
    return request.param


@pytest.fixture(scope="module")
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
    rows = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": counted}
    return rows | {"segments": segments, "positions": positions}


def loss(params: weights.Params, cfg: Model, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """And the hidden states."""
    hidden = decoder.forward(params, cfg, batch["tokens"], batch["positions"], batch.get("segments"))
    return token_logprobs.cross_entropy(hidden, params, batch["targets"], batch["weights"], cfg), hidden


graded = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=1)


@pytest.fixture(scope="module")
def small(tiny) -> Model:
    """Of one layer, whose window is shorter than a document."""
    return tiny.model_copy(update={"num_layers": 1, "attention_pattern": "L"})


@pytest.fixture(scope="module")
def params(small) -> weights.Params:
    return jax.jit(weights.init_params, static_argnums=0)(small, jax.random.key(0))


@pytest.fixture(scope="module")
def alone(small, packed, params) -> tuple[np.ndarray, np.ndarray, weights.Params]:
    """The summed loss and gradient, and hidden states [2, ROW, D]: one document at a time, without segments."""
    cfg = small.model_copy(update={"attention": "plain", "scan_layers": True})
    hidden, losses, gradients = np.zeros((2, ROW, cfg.dim), np.float32), [], []
    for row, lengths in enumerate(LENGTHS):
        for end, length in zip(np.cumsum(lengths), lengths, strict=True):
            one = {k: v[row : row + 1, end - length : end] for k, v in packed.items() if k != "segments"}
            (loss, found), gradient = graded(params, cfg, one)
            hidden[row, end - length : end] = found[0]
            losses.append(loss)
            gradients.append(gradient)
    return np.sum(losses), hidden, jax.tree.map(lambda *g: np.sum(g, axis=0), *gradients)


@pytest.mark.parametrize(
    ("kernel", "scan"),
    [("plain", True), *(pytest.param(*each, marks=pytest.mark.deep) for each in (("splash", False), ("cudnn", True)))],
    indirect=["kernel"],
)
def test_documents_of_a_row_are_each_alone(small, packed, params, kernel, scan, alone):
    """And what one of them holds leaves no trace in the others."""
    cfg = small.model_copy(update={"scan_layers": scan, "attention": kernel})
    (loss, found), ours = graded(params, cfg, packed)
    expected, hidden, gradient = alone
    real = packed["segments"] > 0
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(np.asarray(found)[real], hidden[real], atol=2e-5)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)
    other = packed | {"tokens": np.where(packed["segments"] == 2, 5, packed["tokens"])}
    (_, after), _ = graded(params, cfg, other)
    same = packed["segments"] != 2
    np.testing.assert_array_equal(np.asarray(found)[same], np.asarray(after)[same])

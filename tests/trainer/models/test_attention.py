"""Every kernel against the plain reference: soft-cap, windows, grouped queries, padding, documents; and gradients."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conf.schema.training.model import Model
from tests.trainer.conftest import make_mesh
from trainer.losses import token_logprobs
from trainer.models import attention, decoder, weights


def inputs(cfg: Model, length: int, key: int = 0) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Query, key and value of two rows."""
    keys = jax.random.split(jax.random.key(key), 3)
    shapes = ((2, length, heads, cfg.head_dim) for heads in (cfg.num_heads, cfg.num_kv_heads, cfg.num_kv_heads))
    return tuple(jax.random.normal(k, shape) for k, shape in zip(keys, shapes, strict=True))


def rows_of(length: int) -> jax.Array:
    """Three documents in the first row, and one and padding in the second: [2, length]."""
    index = jnp.arange(length)
    return jnp.stack([(index > 9).astype(int) + (index > length // 2), (index > length - 20).astype(int)])


def plain(query, key, value, segments, window, cfg, sinks=None):
    cfg = cfg.model_copy(update={"attention": "plain"})
    return attention.self_attention(query, key, value, segments, window, cfg, sinks)


def sinks_of(cfg: Model) -> jax.Array:
    """One head attends to nothing mostly, another hardly."""
    return jnp.linspace(-4, 6, cfg.num_heads)


def written_out(query, key, value, segments, window, cap, sinks=None):
    """One token and one head at a time, in float64."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    out = np.zeros_like(query)
    for row, at, head in np.ndindex(query.shape[:3]):
        kv_head = head * key.shape[2] // query.shape[2]
        first = 0 if window is None else max(0, at - window + 1)
        seen = [s for s in range(first, at + 1) if segments is None or segments[row, s] == segments[row, at]]
        logits = key[row, seen, kv_head] @ query[row, at, head]
        logits = logits if cap is None else cap * np.tanh(logits / cap)
        logits = logits if sinks is None else np.append(logits, sinks[head])
        weights = np.exp(logits - logits.max())
        seen += [] if sinks is None else [-1]
        value_of = value if sinks is None else np.concatenate([value, 0 * value[:, :1]], axis=1)
        out[row, at, head] = weights / weights.sum() @ value_of[row, seen, kv_head]
    return out


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize(
    ("window", "cap", "documents"), [(None, None, True), (None, 2.0, False), (1, 2.0, True), (7, None, False)]
)
def test_plain_equals_what_is_written_out(tiny, window, cap, documents, with_sinks):
    cfg = tiny.model_copy(update={"attn_logit_softcap": cap})
    query, key, value = inputs(cfg, 30)
    segments = rows_of(30) if documents else None
    sinks = sinks_of(cfg) if with_sinks else None
    found = jax.jit(lambda *qkv: plain(*qkv, segments, window, cfg, sinks))(query, key, value)
    np.testing.assert_allclose(found, written_out(query, key, value, segments, window, cap, sinks), atol=2e-6)


@pytest.mark.parametrize(
    ("length", "window", "cap", "documents", "with_sinks"),
    [
        (200, 33, 2.0, True, False),
        (128, None, None, False, False),
        (200, 33, None, True, True),
        (128, None, None, False, True),
        pytest.param(384, 128, None, False, True, marks=pytest.mark.deep),
    ],
)
def test_splash_equals_plain(tiny, length, window, cap, documents, with_sinks):
    """Interpreted, since no TPU is here. Without a window one kernel computes all gradients."""
    cfg = tiny.model_copy(update={"attn_logit_softcap": cap})
    query, key, value = inputs(cfg, length)
    weights = jax.random.normal(jax.random.key(9), query.shape)
    segments, sinks = rows_of(length) if documents else None, sinks_of(cfg) if with_sinks else None

    def computed(attend):
        def total(*given):
            out = attend(*given)
            return (out * weights).sum(), out

        given = (query, key, value, sinks)[: 3 + with_sinks]
        wanted = tuple(range(len(given)))
        (_, out), gradients = jax.jit(jax.value_and_grad(total, argnums=wanted, has_aux=True))(*given)
        return out, gradients

    out, found = computed(
        lambda q, k, v, *own: attention.splash_attention(
            q, k, v, segments, *own, window=window, cfg=cfg, interpret=True
        )
    )
    expected, wanted = computed(lambda q, k, v, *own: plain(q, k, v, segments, window, cfg, *own))
    np.testing.assert_allclose(out, expected, atol=2e-5)
    jax.tree.map(lambda ours, theirs: np.testing.assert_allclose(ours, theirs, atol=2e-4), found, wanted)


def test_a_kernel_runs_on_each_device_with_its_rows_and_heads(tiny):
    """Through shard_map on a mesh of eight; a stand-in for the kernel tells what it was given."""
    query, key, value = inputs(tiny, 16)
    seen = []

    def kernel(query, key, value, segments):
        seen.append((query.shape, key.shape, segments.shape))
        return plain(query, key, value, segments, None, tiny)

    with jax.set_mesh(make_mesh(1, 2, 2)):
        found = jax.jit(lambda *args: attention.run_per_device(kernel, *args))(query, key, value, rows_of(16))
    assert seen == [((1, 16, 2, 16), (1, 16, 1, 16), (1, 16))]
    np.testing.assert_allclose(found, plain(query, key, value, rows_of(16), None, tiny), atol=1e-6)


def test_a_kernel_on_each_device_gets_the_sinks_of_its_heads_and_their_gradients_are_added_up(tiny):
    query, key, value = inputs(tiny, 16)

    def kernel(query, key, value, segments, sinks):
        assert sinks.shape == (query.shape[2],) == (2,)
        return plain(query, key, value, segments, 5, tiny, sinks)

    def gradient(compute):
        return jax.jit(jax.grad(lambda sinks: (compute(sinks) * query).sum()))(sinks_of(tiny))

    wanted = gradient(lambda sinks: plain(query, key, value, None, 5, tiny, sinks))
    with jax.set_mesh(make_mesh(1, 2, 2)):
        found = gradient(lambda sinks: attention.run_per_device(kernel, query, key, value, None, sinks))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_the_kernel_is_chosen_by_backend_and_model(tiny):
    capped = tiny.model_copy(update={"activation_dtype": "bfloat16"})
    free = capped.model_copy(update={"attn_logit_softcap": None})
    chosen = [attention.choose_kernel(capped, backend) for backend in ("cpu", "tpu", "gpu")]
    assert chosen == ["plain", "splash", "plain"]
    assert attention.choose_kernel(free, "gpu") == "cudnn"
    assert attention.choose_kernel(free.model_copy(update={"attention_sinks": True}), "gpu") == "plain"
    assert attention.choose_kernel(free.model_copy(update={"attention": "plain"}), "tpu") == "plain"


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
    hidden, parts = np.zeros((2, ROW, cfg.dim), np.float32), []
    for row, lengths in enumerate(LENGTHS):
        for end, length in zip(np.cumsum(lengths), lengths, strict=True):
            one = {k: v[row : row + 1, end - length : end] for k, v in packed.items() if k != "segments"}
            (loss, found), gradient = graded(params, cfg, one)
            hidden[row, end - length : end] = found[0]
            parts.append((loss, gradient))
    total, gradient = jax.tree.map(lambda *each: np.sum(each, axis=0), *parts)
    return total, hidden, gradient


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
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), ours, gradient)
    other = packed | {"tokens": np.where(packed["segments"] == 2, 5, packed["tokens"])}
    (_, after), _ = graded(params, cfg, other)
    same = packed["segments"] != 2
    np.testing.assert_array_equal(np.asarray(found)[same], np.asarray(after)[same])

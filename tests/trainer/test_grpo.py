"""The loss of GRPO and its gradient against the paper's formula, written out in NumPy, one token at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conf.decoder import Model
from conf.loop import GrpoLoop
from tests.groups import group
from trainer import grpo, model, weights

ROWS, WIDTH = 6, 9

logprobs = jax.jit(grpo.logprobs, static_argnums=1)


@pytest.fixture(scope="module")
def loop() -> GrpoLoop:
    return GrpoLoop(**group("loop/grpo") | {"clip": 0.2, "kl": 0.3, "temperature": 0.7})


@pytest.fixture(scope="module")
def small() -> Model:
    sizes = {"layers": 1, "dim": 8, "head_dim": 4, "hidden": 8, "vocab": 11, "logit_chunk": 3}
    return Model(**group("model/tiny") | sizes)


@pytest.fixture(scope="module")
def case(small, loop):
    """Weights and a batch whose policy has moved: some ratios are inside the clip's bounds, some on either side."""
    params = jax.jit(weights.init, static_argnums=0)(small, jax.random.key(0))
    random = np.random.default_rng(1)
    batch = {"tokens": random.integers(0, small.vocab, (ROWS, WIDTH), dtype=np.int32)}
    now = np.asarray(logprobs(params, small, batch, loop.temperature)[0])
    starts, ends = random.integers(0, 4, ROWS), random.integers(4, WIDTH, ROWS)
    at = np.arange(WIDTH - 1)
    batch |= {
        "mask": ((at >= starts[:, None]) & (at < ends[:, None])).astype(np.float32),
        "old": now + random.normal(0, 0.3, now.shape).astype(np.float32),
        "reference": now + random.normal(0, 0.5, now.shape).astype(np.float32),
        "advantage": np.array([1.2, -0.7, 0.0, 0.4, -1.5, 0.6], np.float32),
    }
    batch |= {name: random.normal(size=ROWS).astype(np.float32) for name in grpo.FACTS}
    return params, batch, now


def written_out(now: np.ndarray, batch: dict[str, np.ndarray], loop: GrpoLoop) -> tuple[float, np.ndarray, dict]:
    """Sum over rows of each row's mean loss, its derivative by every log-probability, and what is counted."""
    total, slope = 0.0, np.zeros(now.shape)
    seen: dict[str, list[float]] = {"ratio": [], "kl": [], "clip_fraction": []}
    for row in range(ROWS):
        count, advantage = batch["mask"][row].sum(), float(batch["advantage"][row])
        for t in np.flatnonzero(batch["mask"][row]):
            ratio = np.exp(float(now[row, t]) - float(batch["old"][row, t]))
            bounded = min(max(ratio, 1 - loop.clip), 1 + loop.clip)
            apart = float(batch["reference"][row, t]) - float(now[row, t])
            kl = np.exp(apart) - apart - 1
            cut = bounded * advantage < ratio * advantage
            total += (loop.kl * kl - min(ratio * advantage, bounded * advantage)) / count
            slope[row, t] = (loop.kl * (1 - np.exp(apart)) - (0.0 if cut else ratio * advantage)) / count
            for name, value in (("ratio", ratio), ("kl", kl), ("clip_fraction", cut)):
                seen[name].append(float(value))
    return total, slope, seen


def test_loss_and_metrics_equal_the_formula(small, loop, case):
    params, batch, now = case
    sums = jax.jit(grpo.loss(small, loop))(params, batch)
    total, _, seen = written_out(now, batch, loop)
    assert 0 < sum(seen["clip_fraction"]) < len(seen["ratio"]) / 2
    np.testing.assert_allclose(sums["loss"][0], total, rtol=1e-5)
    assert sums["loss"][1] == ROWS
    for name, values in seen.items():
        np.testing.assert_allclose(sums[name][0], sum(values), rtol=1e-4, err_msg=name)
        assert sums[name][1] == len(values) == batch["mask"].sum()
    for name in grpo.FACTS:
        np.testing.assert_allclose(sums[name][0], batch[name].sum(), rtol=1e-4, atol=1e-6, err_msg=name)
        assert sums[name][1] == ROWS


def test_gradient_equals_the_formula(small, loop, case):
    """The formula's slope at every log-probability, carried back to the weights."""
    params, batch, now = case
    gradient = jax.jit(jax.grad(lambda p: grpo.loss(small, loop)(p, batch)["loss"][0]))(params)
    _, slope, _ = written_out(now, batch, loop)

    @jax.jit
    def back(params, slope):
        return jax.vjp(lambda p: grpo.logprobs(p, small, batch, loop.temperature)[0], params)[1](slope)[0]

    expected = back(params, jnp.asarray(slope, jnp.float32))
    assert max(jnp.abs(leaf).max() for leaf in jax.tree.leaves(expected)) > 0.1
    for ours, theirs in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_slope_equals_finite_differences(loop, case):
    """Central differences of the formula in float64; no ratio is near a bound, where the loss has a kink."""
    _, batch, now = case
    exact = {name: value.astype(np.float64) for name, value in batch.items()}
    ratio = np.exp(now - batch["old"])
    assert min(np.abs(ratio - 1 - loop.clip).min(), np.abs(ratio - 1 + loop.clip).min()) > 1e-4
    _, slope, _ = written_out(now.astype(np.float64), exact, loop)
    step = 1e-6
    for row, t in np.ndindex(now.shape):
        moved = np.zeros(now.shape)
        moved[row, t] = step
        above, below = (written_out(now + sign * moved, exact, loop)[0] for sign in (1, -1))
        np.testing.assert_allclose(slope[row, t], (above - below) / (2 * step), atol=1e-7)


def test_what_lies_outside_the_response_changes_nothing(small, loop, case):
    params, batch, _ = case
    outside = batch["mask"] == 0
    other = batch | {name: np.where(outside, batch[name] - 1, batch[name]) for name in ("old", "reference")}
    gradient = jax.jit(jax.grad(lambda p, b: grpo.loss(small, loop)(p, b)["loss"][0]))
    for a, b in zip(jax.tree.leaves(gradient(params, batch)), jax.tree.leaves(gradient(params, other)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_an_empty_response_counts_as_a_row_without_loss(small, loop, case):
    params, batch, now = case
    empty = batch | {"mask": batch["mask"] * (np.arange(ROWS) != 1)[:, None].astype(np.float32)}
    sums = jax.jit(grpo.loss(small, loop))(params, empty)
    np.testing.assert_allclose(sums["loss"][0], written_out(now, empty, loop)[0], rtol=1e-5)
    assert sums["loss"][1] == ROWS


def test_logprobs_are_those_of_the_next_token(small, case):
    params, batch, _ = case
    tokens = batch["tokens"]

    @jax.jit
    def all_scores(params):
        hidden, _ = model.forward(params, small, tokens, jnp.broadcast_to(jnp.arange(WIDTH), tokens.shape))
        return jax.nn.log_softmax(model.unembed(params, small, hidden) / 0.7)

    scores = np.asarray(all_scores(params))[:, :-1]
    logprob, entropy = logprobs(params, small, batch, 0.7)
    np.testing.assert_allclose(logprob, np.take_along_axis(scores, tokens[:, 1:, None], 2)[..., 0], atol=1e-5)
    np.testing.assert_allclose(entropy, -(np.exp(scores) * scores).sum(-1), atol=1e-5)


def test_supervised_loss_is_the_mean_over_response_tokens(small, case):
    params, batch, _ = case
    sums = jax.jit(grpo.supervised_loss(small))(params, {name: batch[name] for name in ("tokens", "mask")})
    logprob, _ = logprobs(params, small, batch, 1.0)
    np.testing.assert_allclose(sums["loss"][0], -(logprob * batch["mask"]).sum(), rtol=1e-5)
    assert sums["loss"][1] == batch["mask"].sum()


@pytest.mark.parametrize(
    ("std", "expected"),
    [
        ("population", [1, -1, -1, 1]),  # deviation 1/2
        ("sample", [0.75**0.5, -(0.75**0.5), -(0.75**0.5), 0.75**0.5]),  # deviation 1/sqrt(3)
        ("none", [0.5, -0.5, -0.5, 0.5]),
    ],
)
def test_advantages_by_hand(std, expected):
    rewards = np.array([[1, 0, 0, 1], [3, 3, 3, 3], [10, 8, 8, 10]], np.float32)
    found = grpo.advantages(rewards, std)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found[0], expected, rtol=1e-5)
    np.testing.assert_array_equal(found[1], 0)  # all equal: nothing to learn
    np.testing.assert_allclose(found[2], np.array(expected) * (2 if std == "none" else 1), rtol=1e-5)


@pytest.mark.parametrize("std", ["population", "sample"])
def test_almost_equal_rewards_do_not_explode(std):
    rewards = np.array([[1, 1, 1, 1 + 2**-20]], np.float32)
    assert np.abs(grpo.advantages(rewards, std)).max() < 1

"""From weights to the loss and back, and over devices; the losses themselves are tested in test_losses.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conf.schema.training.loop import GrpoLoop
from conf.schema.training.model import Model
from conf.schema.training.run_yaml import RunFile
from tests.conftest import wide
from tests.groups import load_group
from tests.trainer.conftest import make_mesh
from trainer.distributed.runtime import shard_batch
from trainer.losses import grpo
from trainer.models import decoder, weights
from trainer.rl import programs
from trainer.step import train_step

ROWS, WIDTH = 6, 9

logprobs = jax.jit(grpo.per_token_logps, static_argnums=1)


@pytest.fixture(scope="module")
def loop() -> GrpoLoop:
    return GrpoLoop(**load_group("loop/grpo") | {"kl_coef": 0.3, "temperature": 0.7, "updates_per_rollout": 2})


@pytest.fixture(scope="module")
def small() -> Model:
    sizes = {"num_layers": 1, "dim": 8, "head_dim": 4, "mlp_dim": 8, "vocab_size": 11, "logit_chunk": 3}
    return Model(**load_group("model/tiny") | sizes)


@pytest.fixture(scope="module")
def case(small, loop):
    """Weights and a batch whose policy has moved: some ratios are inside the clip's bounds, some on either side."""
    params = jax.jit(weights.init_params, static_argnums=0)(small, jax.random.key(0))
    random = np.random.default_rng(1)
    batch = {"tokens": random.integers(0, small.vocab_size, (ROWS, WIDTH), dtype=np.int32)}
    now = np.asarray(logprobs(params, small, batch, loop.temperature)[0])
    starts, ends = random.integers(0, 4, ROWS), random.integers(4, WIDTH, ROWS)
    at = np.arange(WIDTH - 1)
    batch |= {
        "mask": ((at >= starts[:, None]) & (at < ends[:, None])).astype(np.float32),
        "weight": np.ones(ROWS, np.float32),
        "sampler": now + random.normal(0, 0.3, now.shape).astype(np.float32),
        "old": now + random.normal(0, 0.3, now.shape).astype(np.float32),
        "reference": now + random.normal(0, 0.5, now.shape).astype(np.float32),
        "advantage": np.array([1.2, -0.7, 0.0, 0.4, -1.5, 0.6], np.float32),
    }
    return params, batch, now


@pytest.fixture(scope="module")
def differentiate(small, loop):
    return differentiator(small, loop)


def differentiator(small: Model, loop: GrpoLoop):
    """(params, batch) to ((loss, sums), gradient), compiled once."""

    def total(params, batch):
        sums = grpo.loss(small, loop)(params, batch)
        return sums["loss"][0], sums

    return jax.jit(jax.value_and_grad(total, has_aux=True))


def test_loss_is_that_of_the_log_probabilities(small, loop, case, differentiate):
    """Carried through the model to the weights; the loss itself is tested in test_losses.py."""
    params, batch, now = case
    (_, sums), gradient = differentiate(params, batch)
    _, entropy = logprobs(params, small, batch, loop.temperature)
    for name, entry in grpo.policy_loss_terms(now, entropy, batch, loop).items():
        np.testing.assert_allclose(sums[name], entry, rtol=1e-4, err_msg=name)

    slope = jax.jit(jax.grad(lambda x: grpo.policy_loss_terms(x, entropy, batch, loop)["loss"][0]))(now)
    pull = jax.jit(lambda p, s: jax.vjp(lambda p: grpo.per_token_logps(p, small, batch, loop.temperature)[0], p)[1](s))
    (expected,) = pull(params, slope)
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected)) > 0.1
    for ours, theirs in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_the_policy_that_drew_is_the_one_that_learns_where_each_rollout_has_one_update(
    small, loop, case, differentiate
):
    """`old` is then what the update computes: the gradient is that of a batch that has it from the policy itself."""
    params, batch, now = case
    once = differentiator(small, loop.model_copy(update={"updates_per_rollout": 1}))
    ((ours, _), mine), ((theirs, _), others) = (
        once(params, batch),
        differentiate(params, batch | {"old": now}),
    )
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), mine, others)


def test_advantages_of_0_have_a_gradient_of_exactly_0(small, loop, case):
    """Without a KL: a reward that is the same for all moves no weight."""
    params, batch, _ = case
    free = differentiator(small, loop.model_copy(update={"kl_coef": 0.0}))
    _, gradient = free(params, batch | {"advantage": np.zeros(ROWS, np.float32)})
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(gradient))


@pytest.mark.parametrize(("updates", "kl_coef"), [(1, 0.1), (2, 0.1), (2, 0.0)])
def test_the_old_policy_is_scored_for_several_updates_and_the_reference_where_the_kl_has_a_weight(
    grpo_run, updates, kl_coef
):
    """The first weights, which are the reference, score themselves alike. Without a weight no reference is held."""
    changes = {"updates_per_rollout": updates, "kl_coef": kl_coef}
    experiment, mesh = RunFile.model_validate(grpo_run | {"loop": grpo_run["loop"] | changes}), make_mesh(1, 2, 1)
    tokens = np.random.default_rng(0).integers(0, 256, (16, 20), dtype=np.int32)
    batch = {"tokens": tokens, "mask": np.ones((16, 19), np.float32)}
    with jax.set_mesh(mesh):
        placed = weights.param_shardings(experiment.model, mesh)
        first = jax.jit(weights.init_params, static_argnums=0, out_shardings=placed)
        params = first(experiment.model, jax.random.key(0))
        reference = programs.initial_reference(params, experiment, mesh)
        score = programs.build_logprobs(experiment, experiment.loop, mesh)
        old, of_reference = jax.device_get(score(params, reference, shard_batch(batch, mesh)))
    assert old.any() == (updates > 1)
    assert of_reference.any() == (kl_coef > 0)
    if updates > 1 and kl_coef:
        np.testing.assert_allclose(of_reference, old, rtol=1e-5)
    assert (reference == programs.abstract_reference(experiment, mesh) == {}) == (kl_coef == 0)


def test_an_empty_response_counts_as_a_row_without_loss(small, loop, case, differentiate):
    params, batch, _ = case
    empty = batch | {"mask": batch["mask"] * (np.arange(ROWS) != 1)[:, None].astype(np.float32)}
    (_, sums), _ = differentiate(params, empty)
    others = np.arange(ROWS) != 1
    fewer = jax.jit(grpo.loss(small, loop))(params, {name: value[others] for name, value in batch.items()})
    np.testing.assert_allclose(sums["loss"][0], fewer["loss"][0], rtol=1e-5)
    assert sums["loss"][1] == ROWS


@pytest.mark.parametrize("name", ["dr_grpo", *wide("grpo")])
def test_a_batch_in_a_longer_bucket_is_the_same_batch(small, case, name):
    """Loss, its count, gradient and what is told, whatever lies before, between and behind responses."""
    params, batch, _ = case
    cfg = GrpoLoop(**load_group(f"loop/{name}") | {"kl_coef": 0.1, "max_new_tokens": WIDTH})
    random, padded = np.random.default_rng(3), dict(batch)
    padded["tokens"] = np.pad(batch["tokens"], ((0, 0), (0, 5)), constant_values=7)
    for field in ("mask", *grpo.TOKEN_FIELDS):
        wide = random.normal(size=(ROWS, 5)).astype(np.float32) * (field != "mask")
        outside = (field != "mask") * (batch["mask"] == 0).astype(np.float32)
        padded[field] = np.concatenate([batch[field] - outside, wide], axis=1)

    compute = differentiator(small, cfg)
    (_, sums), gradient = compute(params, batch)
    (_, wide_sums), wide_gradient = compute(params, padded)
    for a, b in zip(jax.tree.leaves((sums, gradient)), jax.tree.leaves((wide_sums, wide_gradient)), strict=True):
        np.testing.assert_allclose(b, a, rtol=0, atol=3e-6 * max(1, np.abs(a).max()))


def test_logprobs_are_those_of_the_next_token(small, case):
    params, batch, _ = case
    tokens = batch["tokens"]

    @jax.jit
    def all_scores(params):
        hidden = decoder.forward(params, small, tokens, jnp.broadcast_to(jnp.arange(WIDTH), tokens.shape))
        return jax.nn.log_softmax(decoder.unembed(params, small, hidden) / 0.7)

    scores = np.asarray(all_scores(params))[:, :-1]
    logprob, entropy = logprobs(params, small, batch, 0.7)
    np.testing.assert_allclose(logprob, np.take_along_axis(scores, tokens[:, 1:, None], 2)[..., 0], atol=1e-5)
    np.testing.assert_allclose(entropy, -(np.exp(scores) * scores).sum(-1), atol=1e-5)
    supervised = jax.jit(grpo.supervised_loss(small))(params, {name: batch[name] for name in ("tokens", "mask")})
    logprob, _ = logprobs(params, small, batch, 1.0)  # the loss is the mean over tokens of responses
    np.testing.assert_allclose(supervised["loss"], [-(logprob * batch["mask"]).sum(), batch["mask"].sum()], rtol=1e-5)


@pytest.mark.parametrize("name", ["dr_grpo", *wide("grpo", "token_mean", "gspo")])
def test_many_devices_or_parts_equal_one(small, case, name):
    """Update and metrics, however tokens and samples that are left out fall on devices and parts."""
    params, batch, _ = case
    batch = {k: np.concatenate([v, v[:2]]) for k, v in batch.items()}
    batch["weight"] = np.array([1, 0, 1, 1, 0, 0, 1, 1], np.float32)
    cfg = GrpoLoop(**load_group(f"loop/{name}") | {"kl_coef": 0.1, "max_new_tokens": WIDTH})

    def updated(sizes, parts):
        mesh = make_mesh(*sizes)
        split = {k: v.reshape(-1, parts, *v.shape[1:]).swapaxes(0, 1) for k, v in batch.items()}
        leaves = batch if parts == 1 else split
        with jax.set_mesh(mesh):
            loss = train_step.without_carry(grpo.loss(small, cfg))
            gradient = jax.jit(train_step.mean_gradient(loss, small, mesh, parts))
            return jax.device_get(gradient(params, leaves, None)[:2])

    expected, told = updated((1, 1, 1), 1)
    assert all(np.isfinite(value) for value in told.values())
    found, metrics = updated((2, 2, 1), 2)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)
    assert metrics.keys() == told.keys()
    for key, value in told.items():
        np.testing.assert_allclose(metrics[key], value, rtol=1e-4, atol=1e-6, err_msg=key)

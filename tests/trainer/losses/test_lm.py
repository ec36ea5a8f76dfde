"""The metrics of residual connections: values known in advance, scanned and unrolled; they are part of evaluations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conf.schema.training.loop import LmLoop
from tests.groups import load_group
from tests.trainer.models.test_residual import forward, initial, model_of, perturbed, tokens_and_positions
from trainer.losses import lm
from trainer.models import maha
from trainer.step import metric_sums


def measured(cfg, params):
    tokens, positions = tokens_and_positions()
    hidden, sums = jax.jit(lm.measured_forward, static_argnums=1)(params, cfg, tokens, positions)
    np.testing.assert_allclose(hidden, forward(params, cfg, tokens, positions), atol=1e-5)
    return {name.removeprefix("residual_"): float(x) for name, x in metric_sums.finalize(sums).items()}


@pytest.mark.deep
def test_one_average_of_all_channels_and_streams_that_all_go_to_the_first_are_seen():
    """The published mixing of channels leaves one average."""
    cfg = model_of(residual="nash_hc", hyper={"init_diag": False})
    found = measured(cfg, initial(cfg))
    assert found["product_diagonal"] == pytest.approx(1 / cfg.dim, rel=1e-3)
    assert found["product_gain"] == pytest.approx(1, abs=1e-3)
    cfg = model_of(residual="mhc", num_layers=1, hyper={"streams": 3}, scan_layers=True)
    params = initial(cfg)
    first = jnp.zeros(15).at[3:6].set(jnp.array([20.0, -20.0, -20.0]))
    params["layers"] |= {f"{name}_streams_bias": first[None] for name in ("attention", "mlp")}
    found = measured(cfg, params)
    assert found["concentration"] == pytest.approx(1, abs=1e-3)
    assert found["product_diagonal"] == pytest.approx(1 / 3, abs=0.05)


def test_evaluations_have_them_and_the_same_loss():
    cfg, (tokens, _) = model_of(residual="mhc_lite"), tokens_and_positions()
    params, ones = perturbed(cfg), jnp.ones(tokens.shape)
    batch = {"tokens": tokens, "targets": jnp.roll(tokens, -1, axis=1), "weights": ones}
    found = metric_sums.finalize(jax.jit(lm.build_eval(cfg, 1))(params, jnp.ones((2, cfg.vocab_size), int), batch))
    loss = metric_sums.finalize(jax.jit(lm.loss(cfg))(params, batch))["loss"]
    assert float(found["loss"]) == pytest.approx(float(loss), rel=1e-5)
    assert float(found["residual_row_error"]) < 1e-5
    assert float(found["residual_column_error"]) < 1e-5


def test_the_published_penalty_is_a_constant(monkeypatch):
    """It is a component of its own beside lm_loss, 0 where there is none, and of a loss of one's own too."""
    monkeypatch.setattr(lm, "load_extension", lambda *_: lambda logprobs, entropy: -2 * logprobs)
    own = LmLoop(**load_group("loop/lm") | {"loss": "losses:twice"})
    learned = {"scales": 2, "aggregation": "convex"}
    cfg = model_of(attention_form="maha", maha=learned | {"sparsity": 0.5})
    (tokens, _), params = tokens_and_positions(), perturbed(cfg)
    batch = {"tokens": tokens, "targets": jnp.roll(tokens, -1, axis=1), "weights": jnp.ones(tokens.shape)}
    found = metric_sums.finalize(jax.jit(lm.loss(cfg, own))(params, batch))
    assert float(found["sparsity"]) == pytest.approx(0.5 * cfg.num_layers, rel=1e-6)
    assert float(found["loss"]) == pytest.approx(float(2 * found["lm_loss"] + found["sparsity"]), rel=1e-6)
    for plain in (learned, {"scales": 2, "aggregation": "nash"}):
        free = model_of(attention_form="maha", maha=plain)
        assert maha.sparsity_penalty(free) == 0
        for loop in (None, own):
            assert set(jax.eval_shape(lm.loss(free, loop), params, batch)) == {"loss", "lm_loss", "sparsity"}

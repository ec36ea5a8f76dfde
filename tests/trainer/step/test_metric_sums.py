"""Sums of parts of a batch merge to those of the whole; nothing counts as nothing."""

import jax.numpy as jnp
import numpy as np

from trainer.step import metric_sums
from trainer.step.metric_sums import Max, Mean, Min


def sums_of(values: np.ndarray) -> metric_sums.MetricSums:
    x = jnp.asarray(values)
    return {"mean": Mean(x.sum(), jnp.float32(len(x))), "low": Min(x.min()), "high": Max(x.max())}


def test_parts_merge_to_the_whole_and_with_zero_nothing_changes():
    values = np.arange(-4, 4, dtype=np.float32)
    sums, zero = sums_of(values), metric_sums.zero(sums_of(values))
    for parts in ((sums_of(values[:3]), sums_of(values[3:])), (zero, sums), (sums, zero)):
        assert metric_sums.merge(*parts) == sums
    assert metric_sums.finalize(sums) == {"mean": -0.5, "low": -4, "high": 3}


def test_a_mean_over_nothing_is_unknown_but_the_loss_is_0():
    nothing = Mean(jnp.float32(0), jnp.float32(0))
    found = metric_sums.finalize({"loss": nothing, "steps": nothing})
    assert found["loss"] == 0
    assert np.isnan(found["steps"])

"""Sums of parts of a batch merge to those of the whole; nothing counts as nothing."""

import jax.numpy as jnp
import numpy as np
import pytest

from trainer.step import metric_sums
from trainer.step.metric_sums import Max, Mean, Min


def sums_of(values: np.ndarray) -> metric_sums.MetricSums:
    x = jnp.asarray(values)
    return {"mean": Mean(x.sum(), jnp.float32(len(x))), "low": Min(x.min()), "high": Max(x.max())}


@pytest.mark.parametrize("cut", [1, 3, 7])
def test_parts_merge_to_the_whole(cut):
    values = np.arange(-4, 4, dtype=np.float32)
    merged = metric_sums.merge(sums_of(values[:cut]), sums_of(values[cut:]))
    assert merged == sums_of(values)
    assert metric_sums.finalize(merged) == {"mean": -0.5, "low": -4, "high": 3}


def test_merged_with_zero_nothing_changes():
    sums = sums_of(np.array([-2.5, 7], np.float32))
    assert metric_sums.merge(metric_sums.zero(sums), sums) == sums
    assert metric_sums.merge(sums, metric_sums.zero(sums)) == sums


def test_a_mean_over_nothing_is_unknown_but_the_loss_is_0():
    nothing = Mean(jnp.float32(0), jnp.float32(0))
    found = metric_sums.finalize({"loss": nothing, "steps": nothing})
    assert found["loss"] == 0
    assert np.isnan(found["steps"])

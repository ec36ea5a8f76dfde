"""The updates between two lines of metrics are told of as one."""

import json
import math

import pytest

from trainer.telemetry.averages import MetricAverages

GOOD = {"loss": 1.0, "grad_norm": 1.0}


def test_means_extremes_and_the_newest() -> None:
    window = MetricAverages()
    for reward, ratio, rate in ((0.0, 0.9, 3.0), (1.0, 0.8, 2.0), (0.5, 1.1, 1.0)):
        window.add(GOOD | {"reward_mean": reward, "ratio_min": ratio, "ratio_max": ratio, "learning_rate": rate})
    expected = GOOD | {"reward_mean": 0.5, "ratio_min": 0.8, "ratio_max": 1.1, "learning_rate": 1.0}
    assert window.pop() == pytest.approx(expected)
    window.add(GOOD | {"reward_mean": 7.0})
    assert window.pop() == GOOD | {"reward_mean": 7.0}


@pytest.mark.parametrize("bad", [{"loss": math.nan}, {"grad_norm": math.inf}])
def test_an_update_that_was_left_out_counts_as_skipped_only(bad) -> None:
    window = MetricAverages()
    window.add(GOOD | {"kl": 2.0, "skipped": 0.0})
    window.add(GOOD | {"kl": math.nan, "skipped": 1.0} | bad)
    assert window.pop() == GOOD | {"kl": 2.0, "skipped": 1.0}


def test_where_all_were_left_out_there_is_no_mean() -> None:
    window = MetricAverages()
    window.add({"loss": math.nan, "grad_norm": 1.0, "skipped": 1.0})
    assert window.pop() == {"skipped": 1.0}


def test_a_checkpoint_amid_a_window_changes_nothing() -> None:
    whole, first = MetricAverages(), MetricAverages()
    updates = [GOOD | {"kl": 0.1 * i, "kl_max": 0.1 * i} for i in range(7)]
    for values in updates:
        whole.add(values)
    for values in updates[:3]:
        first.add(values)
    second = MetricAverages.from_json(json.loads(json.dumps(first.to_json())))
    for values in updates[3:]:
        second.add(values)
    assert second.pop() == whole.pop()

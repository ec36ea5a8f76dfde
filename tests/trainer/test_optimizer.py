"""Schedules by hand-computed values; the chain against AdamW written out."""

import numpy as np
import pytest

from conf.optimizer import Optimizer
from tests.groups import group
from trainer import optimizer


def with_schedule(**schedule) -> Optimizer:
    return Optimizer(**group("optimizer/adamw") | {"lr": 2.0, "schedule": schedule})


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ({"kind": "constant", "warmup_steps": 0}, [2, 2, 2]),
        ({"kind": "constant", "warmup_steps": 1}, [2, 2, 2]),
        ({"kind": "constant", "warmup_steps": 4}, [0.5, 1, 1.5, 2, 2]),
        ({"kind": "linear", "warmup_steps": 0, "horizon_steps": 4, "final_fraction": 0.0}, [1.5, 1, 0.5, 0, 0]),
        ({"kind": "linear", "warmup_steps": 2, "horizon_steps": 4, "final_fraction": 0.5}, [1, 2, 1.5, 1, 1]),
        ({"kind": "cosine", "warmup_steps": 0, "horizon_steps": 2, "final_fraction": 0.0}, [1, 0, 0]),
        ({"kind": "cosine", "warmup_steps": 1, "horizon_steps": 3, "final_fraction": 0.5}, [2, 1.5, 1, 1]),
    ],
)
def test_learning_rate_of_each_update(schedule, rates):
    rate = optimizer.schedule(with_schedule(**schedule))
    np.testing.assert_allclose([rate(count) for count in range(len(rates))], rates, atol=1e-6)


def test_updates_equal_adamw_written_out():
    cfg = Optimizer(
        **group("optimizer/adamw")
        | {"lr": 0.1, "weight_decay": 0.01, "clip_norm": 1.0, "schedule": {"kind": "constant", "warmup_steps": 2}}
    )
    chain, weight = optimizer.build(cfg), np.array([1.0, -2.0], np.float32)
    state, first, second, expected = chain.init(weight), 0.0, 0.0, weight.copy()
    for step, gradient in enumerate(np.array([[3, 4], [0.3, -0.4], [-0.1, 0.2]], np.float32), start=1):
        change, state = chain.update(gradient, state, weight)
        weight = weight + np.asarray(change)
        clipped = gradient / max(1.0, np.linalg.norm(gradient))
        first = 0.9 * first + 0.1 * clipped
        second = 0.95 * second + 0.05 * clipped**2
        ratio = (first / (1 - 0.9**step)) / (np.sqrt(second / (1 - 0.95**step)) + 1e-8)
        expected = expected - 0.1 * min(1.0, step / 2) * (ratio + 0.01 * expected)
        np.testing.assert_allclose(weight, expected, rtol=1e-5)

"""Schedules by hand-computed values."""

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from conf.schema.training.schedule import Schedule
from trainer.optimizer.schedules import schedule_factor


def read(**schedule):
    return TypeAdapter(Schedule).validate_python(schedule)


def stable(warmup: int, decay: int, horizon: int) -> dict:
    parts = {"warmup_steps": warmup, "decay_steps": decay, "horizon_steps": horizon}
    return parts | {"kind": "warmup_stable_decay", "final_fraction": 0.5}


LINEAR = {"kind": "linear", "warmup_steps": 0, "horizon_steps": 4}
COSINE = {"kind": "cosine", "warmup_steps": 0, "horizon_steps": 3}


@pytest.mark.parametrize(
    ("schedule", "shares", "zero_after"),
    [
        ({"kind": "constant", "warmup_steps": 0}, [1, 1, 1], None),
        ({"kind": "constant", "warmup_steps": 4}, [0.25, 0.5, 0.75, 1, 1], None),
        (LINEAR | {"final_fraction": 0.0}, [1, 0.75, 0.5, 0.25, 0, 0], 4),
        (LINEAR | {"warmup_steps": 2, "final_fraction": 0.5}, [0.5, 1, 1, 0.75, 0.5, 0.5], None),
        (COSINE | {"horizon_steps": 2, "final_fraction": 0.0}, [1, 0.5, 0, 0], 2),
        (COSINE | {"warmup_steps": 1, "final_fraction": 0.5}, [1, 1, 0.75, 0.5], None),
        (stable(0, 2, 4), [1, 1, 1, 0.75, 0.5, 0.5], None),
        (stable(0, 2, 4) | {"final_fraction": 0.0}, [1, 1, 1, 0.5, 0], 4),
        (stable(2, 2, 5), [0.5, 1, 1, 1, 0.75, 0.5], None),
        (stable(2, 2, 4), [0.5, 1, 1, 0.75, 0.5], None),
        ({"kind": "piecewise", "points": [[1, 0.5], [3, 1.0], [4, 0.0]]}, [0.5, 0.5, 0.75, 1, 0, 0], 4),
        (None, [1, 1], None),
    ],
)
def test_share_of_each_update(schedule, shares, zero_after):
    """And when nothing is left."""
    found = None if schedule is None else read(**schedule)
    assert found is None or found.zero_after == zero_after
    by_count = schedule_factor(found)
    np.testing.assert_allclose([by_count(count) for count in range(len(shares))], shares, atol=1e-6)


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (stable(3, 2, 4), r"warmup_steps \(3\) and decay_steps \(2\) together exceed horizon_steps \(4\)"),
        ({"kind": "piecewise", "points": [[2, 1.0], [2, 0.0]]}, "numbers of updates must ascend, not 2, 2"),
    ],
)
def test_parts_that_do_not_fit_are_refused(schedule, words):
    with pytest.raises(ValidationError, match=words):
        read(**schedule)

"""The training line, and that hostile text from a program is shown as it is."""

from __future__ import annotations

import pytest

from controller.run.text_screen import training_line


def test_the_training_line() -> None:
    metrics = {
        "phase": "grpo",
        "step": 120,
        "steps_total": 700.0,
        "loss": 0.12345,
        "accuracy": 0.5,
        "tokens_per_second": 12345.6,
        "step_time": 0.5,
    }
    line = training_line(metrics)
    assert line == "grpo step 120/700  loss 0.1235  accuracy 0.5  12,346 tok/s  ETA 4:50"
    assert training_line(metrics, usd_per_hour=19.2) == f"{line}, $1.55"  # 290 seconds of it


@pytest.mark.parametrize(
    ("metrics", "line"),
    [({"loss": 1.0}, None), ({"step": 3}, "step 3"), ({"step": 3, "loss": None}, "step 3")],
)
def test_what_is_missing_is_left_out(metrics: dict[str, float], line: str | None) -> None:
    assert training_line(metrics) == line

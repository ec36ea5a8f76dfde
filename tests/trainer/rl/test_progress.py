"""What a checkpoint of GRPO keeps beside arrays, against its golden file."""

from __future__ import annotations

from tests.golden import golden
from trainer.rl.progress import Progress
from trainer.telemetry.averages import MetricAverages


def test_the_position_is_what_its_golden_file_says() -> None:
    body = golden("grpo_position")
    progress = Progress("grpo", 3, 2, 0.1, 0.2, {"test_pass_at_1": 0.25})
    assert progress.to_json() == body["position"]
    assert Progress(**body["position"]) == progress
    assert MetricAverages(2, {"loss": 3.0}).to_json() == body["window"]
    assert MetricAverages.from_json(body["window"]).to_json() == body["window"]

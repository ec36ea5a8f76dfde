"""What a checkpoint of GRPO keeps beside arrays, against its golden file."""

from __future__ import annotations

from trainer.rl.journal import Position

from tests.golden import golden
from trainer.telemetry.averages import Window


def test_the_position_is_what_its_golden_file_says() -> None:
    body = golden("grpo_position")
    position = Position("grpo", 3, 2, 0.1, 0.2, {"test_pass_at_1": 0.25})
    assert position.to_json() == body["position"]
    assert Position.from_json(body["position"]) == position
    assert Window(2, {"loss": 3.0}).to_json() == body["window"]
    assert Window.from_json(body["window"]).to_json() == body["window"]

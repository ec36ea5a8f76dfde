"""The puzzle loop."""

from typing import Any

import pytest
from pydantic import ValidationError

from conf.schema.training.even import UnevenError
from conf.schema.training.puzzle import PuzzleLoop
from tests.groups import load_group


def make_loop(**changes: Any) -> PuzzleLoop:
    return PuzzleLoop.model_validate(load_group("loop/puzzle") | changes)


@pytest.mark.parametrize(("batch", "steps"), [(768, 65_104), (256, 195_312), (6144, 8_138)])
def test_epochs_become_updates(batch: int, steps: int) -> None:
    assert make_loop(batch_size=batch).steps == steps
    assert make_loop(batch_size=batch, steps=steps).steps == steps  # as a resolved config says it again


def test_config_errors() -> None:
    with pytest.raises(ValidationError, match=r"50000 epochs are 65104 updates; set either epochs or steps to null"):
        make_loop(steps=100)
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        make_loop(supervision_steps=0)
    with pytest.raises(UnevenError, match=r"769 puzzles cannot be split evenly over 64 devices; use 768 or") as caught:
        make_loop(batch_size=769).accumulation(64)
    assert caught.value.key == "loop.batch_size"

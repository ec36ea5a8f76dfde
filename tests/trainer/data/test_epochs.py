"""Every question once per epoch, none twice in a rollout, and the same from any point on."""

import numpy as np
import pytest

from trainer.data.epochs import EpochOrder


@pytest.mark.parametrize(("size", "count"), [(10, 3), (11, 11), (12, 4), (100, 7), (7, 6), (9, 8), (23, 12)])
def test_an_epoch_asks_every_question_once_and_no_rollout_asks_one_twice(size: int, count: int) -> None:
    order = EpochOrder(size, count, (3, 0))
    blocks = [order.block(number) for number in range(5 * size)]
    assert all(len(set(block)) == count for block in blocks)
    stream = np.concatenate(blocks)
    for epoch in range(5 * count):
        assert sorted(stream[epoch * size : (epoch + 1) * size]) == list(range(size))
    assert stream[:size].tolist() != stream[size : 2 * size].tolist()


def test_more_questions_than_there_are_come_as_evenly_as_they_can() -> None:
    counts = np.bincount(EpochOrder(3, 10, (0, 0)).block(4), minlength=3)
    assert counts.sum() == 10
    assert counts.min() >= 3


@pytest.mark.parametrize("first", [0, 1, 9, 40])
def test_the_number_of_a_rollout_is_all_that_its_questions_need(first: int) -> None:
    """As after a restart, or with async_depth."""
    whole, resumed = EpochOrder(50, 12, (1, 0)), EpochOrder(50, 12, (1, 0))
    expected = [whole.block(number).tolist() for number in range(45)]
    assert [resumed.block(number).tolist() for number in range(first, 45)] == expected[first:]
    assert resumed.block(0).tolist() == expected[0]
    assert EpochOrder(50, 12, (2, 0)).block(0).tolist() != expected[0]


def test_resampling_asks_other_questions() -> None:
    order = EpochOrder(50, 12, (1, 0))
    asked = [order.block(5), *(order.redraw(5, attempt) for attempt in (1, 2, 3))]
    assert len(set(np.concatenate(asked).tolist())) == 48
    assert order.redraw(5, 2).tolist() == EpochOrder(50, 12, (1, 0)).redraw(5, 2).tolist()
    assert len(order.redraw(5, 9)) == 12  # questions repeat when there are no others

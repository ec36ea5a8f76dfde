"""Global batches: the same on any number of processes, and after a restart."""

import numpy as np
import pytest

from conf.schema.training.data import TextData
from conf.schema.training.loop import LmLoop
from tests.groups import load_group
from trainer.data import batches

LOOP = LmLoop(**load_group("loop/lm") | {"total_batch_tokens": 80, "seq_len": 10, "eval_batches": 2})


@pytest.fixture
def data(tmp_path) -> TextData:
    path = tmp_path / "text"
    path.write_bytes(bytes(range(100)) * 2)
    return TextData(**load_group("data/text") | {"path": str(path), "eval_fraction": 0.5})


def test_the_rows_of_a_batch_do_not_depend_on_who_holds_them(data):
    whole = next(batches.Dataset(data).train_batches(LOOP, 1, range(8)))
    halves = [next(batches.Dataset(data).train_batches(LOOP, 1, rows)) for rows in (range(4), range(4, 8))]
    assert whole.keys() == batches.Dataset(data).batch_dtypes.keys()
    for name, dtype in batches.Dataset(data).batch_dtypes.items():
        assert whole[name].dtype == dtype
        np.testing.assert_array_equal(whole[name], np.concatenate([half[name] for half in halves]))


def test_a_position_restores_the_next_batch(data):
    stream = batches.Dataset(data).train_batches(LOOP, 1, range(8))
    next(stream)
    position, expected = stream.position(), next(stream)
    again = batches.Dataset(data).train_batches(LOOP, 1, range(8))
    again.restore(position)
    np.testing.assert_array_equal(next(again)["tokens"], expected["tokens"])

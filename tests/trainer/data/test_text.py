"""Batches of text: a function of (seed, step), with targets one ahead."""

import numpy as np
import pytest

from conf.data import TextData
from conf.runfile import RunFileError
from trainer.data import text


@pytest.fixture
def corpus(tmp_path) -> text.Text:
    path = tmp_path / "text"
    path.write_bytes(bytes(range(100)))
    return text.load(TextData(kind="text", path=str(path), validation_fraction=0.25), sequence=10)


def test_the_end_is_kept_for_validation(corpus):
    assert (len(corpus.train), len(corpus.validation)) == (75, 25)
    assert corpus.validation[0] == 75


def test_a_batch_is_a_function_of_seed_and_step(corpus):
    first, again, later, other = (
        text.train_batch(corpus, *at, 4, 10)["tokens"] for at in [(1, 2), (1, 2), (1, 3), (2, 2)]
    )
    np.testing.assert_array_equal(first, again)
    assert (first != later).any()
    assert (first != other).any()


def test_targets_are_the_next_tokens_and_every_window_occurs(corpus):
    batch = text.train_batch(corpus, 0, 0, 1000, 10)
    assert batch["tokens"].shape == batch["targets"].shape == (1000, 10)
    assert batch["tokens"].dtype == np.int32
    np.testing.assert_array_equal(batch["targets"], batch["tokens"] + 1)
    assert (batch["tokens"].min(), batch["targets"].max()) == (0, 74)


def test_validation_windows_follow_each_other_and_wrap(corpus):
    starts = [text.validation_batch(corpus, i, 1, 10)["tokens"][0, 0] for i in range(4)]
    assert starts == [75, 85, 75, 85]


@pytest.mark.parametrize(
    ("size", "words"), [(None, "there is no"), (12, r"10 bytes for train; loop.sequence \+ 1"), (20, "4 bytes for val")]
)
def test_bad_files(tmp_path, size, words):
    path = tmp_path / "text"
    if size:
        path.write_bytes(b"x" * size)
    with pytest.raises(RunFileError, match=rf"data\.path: .*{words}"):
        text.load(TextData(kind="text", path=str(path), validation_fraction=0.2), sequence=10)

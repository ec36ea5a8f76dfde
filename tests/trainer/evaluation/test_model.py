"""The model that evaluations see: what stands before an empty text, and numbers that are none."""

from typing import Any

import numpy as np
import pytest

from conf.schema.training.model import Model
from tests.groups import load_group
from tests.trainer.conftest import make_mesh
from trainer.evaluation.model import TextModel
from trainer.tokenizer.loading import ByteTokenizer


class Told(TextModel):
    """A model whose devices say what a test tells."""

    said: Any

    def _score_batch(self, batch: list[list[int]], width: int) -> tuple[np.ndarray, np.ndarray]:
        return np.array([self.said] * len(batch), np.float32), np.ones((len(batch), 3), bool)

    def _generate_batch(self, batch: list[list[int]], **_: Any) -> list[list[int]]:
        self.prompts = batch
        return [[104, 105] for _ in batch]


def model(bos: tuple[int, ...] = (), ends: tuple[int, ...] = (), said: Any = (-1.0, -2.0, 0.0)) -> Told:
    made = Told(Model(**load_group("model/tiny")), make_mesh(1, 1, 1), ByteTokenizer(), bos, ends)
    made.said = said
    made.load(7, {}, lambda: None)
    return made


@pytest.mark.parametrize(
    ("bos", "ends", "prefix"), [((257,), (258,), 257), ((), (258,), 258), ((), (), ord("\n")), ((257,), (), 257)]
)
def test_an_empty_text_begins_with_bos_or_eos_and_other_texts_with_bos_alone(bos, ends, prefix) -> None:
    made = model(bos, ends)
    assert (made.bos, made.prefix, made.eos) == (bos, prefix, ends[0] if ends else None)
    assert made.generate([[], [97]], 2) == ["hi", "hi"]
    assert made.prompts == [[prefix], [97]]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_scores_that_are_no_numbers_are_an_error_that_names_the_update(bad: float) -> None:
    [(found, _)] = model(said=(-1.0, -2.0, bad)).score([[1, 2, 3]])  # of the padding
    assert found.tolist() == [-1.0, -2.0]
    for said in ((bad, -2.0, 0.0), (-1.0, bad, 0.0)):
        with pytest.raises(ValueError, match="after update 7 the model's log-probabilities are not finite"):
            model(said=said).score([[1, 2, 3]])

"""Characters as tokens."""

import numpy as np
import pytest

from conf.schema.training.data import JsonlData, TextData
from conf.schema.training.run_yaml import RunFileError
from tests.groups import load_group
from trainer.data import batches

WORDS = "to be, or not: ünïcode 🙂"


@pytest.fixture
def data(tmp_path) -> TextData:
    path = tmp_path / "text.txt"
    path.write_text(WORDS)
    return TextData(**load_group("data/text") | {"path": str(path), "tokenizer": "characters"})


def test_ids_are_the_characters_of_the_text_in_order(data):
    tokenizer = batches.Dataset(data).tokenizer
    (ids,) = tokenizer.encode([WORDS])
    assert tokenizer.vocab_size == batches.Dataset(data).vocab_size == len(set(WORDS))
    assert [sorted(set(WORDS))[i] for i in ids] == list(WORDS)
    assert tokenizer.decode(ids) == WORDS
    assert int(np.sum(tokenizer.token_bytes()[ids])) == len(WORDS.encode())


def test_characters_of_the_validation_part_count_too(data, tmp_path):
    """What neither has is named."""
    other = tmp_path / "other.txt"
    other.write_text("Ω")
    both = data.model_copy(update={"eval_path": str(other), "eval_fraction": 0.0})
    assert batches.Dataset(both).vocab_size == batches.Dataset(data).vocab_size + 1
    with pytest.raises(RunFileError, match=r"data\.tokenizer: .*'Ω'"):
        batches.Dataset(data).tokenizer.encode(["to Ω"])


def test_only_a_text_has_characters():
    table = load_group("data/jsonl") | {"path": "rows.jsonl", "text_column": "text", "tokenizer": "characters"}
    with pytest.raises(RunFileError, match=r"data.tokenizer: characters requires a text, not jsonl"):
        _ = batches.Dataset(JsonlData(**table)).tokenizer

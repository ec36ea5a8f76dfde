"""Bytes as tokens."""

import pytest

from trainer import tokenizer


@pytest.mark.parametrize("text", ["", "7 + 2", "naïve — 日本 🚢", "a\x00b\n"])
def test_every_text_comes_back(text):
    ids = tokenizer.encode(text)
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == tokenizer.decode([tokenizer.BOS, *ids, tokenizer.EOS]) == text


def test_marks_lie_outside_the_bytes_and_inside_the_vocabulary():
    marks = {tokenizer.PAD, tokenizer.BOS, tokenizer.EOS}
    assert len(marks) == 3
    assert marks == set(range(256, tokenizer.VOCAB))


def test_bytes_that_are_no_text_are_marked():
    assert tokenizer.decode([0xFF, 65, tokenizer.PAD, 300]) == "\ufffdA"

"""Bytes as tokens."""

import pytest

from trainer.tokenizer import byte_level


@pytest.mark.parametrize("text", ["", "7 + 2", "naïve — 日本 🚢", "a\x00b\n"])
def test_every_text_comes_back(text):
    ids = byte_level.encode(text)
    assert ids == list(text.encode())
    assert byte_level.decode(ids) == byte_level.decode([byte_level.BOS_ID, *ids, byte_level.EOS_ID]) == text


def test_bytes_that_are_no_text_are_marked():
    assert byte_level.decode([0xFF, 65, byte_level.PAD, 300]) == "\ufffdA"

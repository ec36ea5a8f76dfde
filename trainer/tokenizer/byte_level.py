"""The byte-level tokenizer: ids 0 to 255 are the bytes of UTF-8, three more mark padding, start and end."""

from collections.abc import Sequence

PAD = 256
BOS_ID = 257
EOS_ID = 258

VOCAB_SIZE = 259
"""Vocabulary size that a model needs."""


def encode(text: str) -> list[int]:
    """Return the bytes of a text, without special tokens."""
    return list(text.encode())


def decode(ids: Sequence[int]) -> str:
    """Return the text without special tokens; bytes that are not UTF-8 become U+FFFD."""
    return bytes(i for i in ids if i < PAD).decode(errors="replace")

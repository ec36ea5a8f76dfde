"""The byte-level tokenizer: ids 0 to 255 are the bytes of UTF-8, three more mark padding, start and end."""

from __future__ import annotations

from collections.abc import Sequence

PAD = 256
BOS_ID = 257
EOS_ID = 258

VOCAB_SIZE = 259
"""Ids that a model must know."""


def encode(text: str) -> list[int]:
    """The bytes of a text, without marks."""
    return list(text.encode())


def decode(ids: Sequence[int]) -> str:
    """The text; marks are left out, and bytes that are no UTF-8 become U+FFFD."""
    return bytes(i for i in ids if i < PAD).decode(errors="replace")

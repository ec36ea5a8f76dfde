"""Pack documents into rows: a flat stream split at any token, or whole documents that share a row."""

from collections import deque
from typing import Any

import grain
import numpy as np
from grain.experimental import BestFitPackIterDataset

from trainer.data.documents import Documents, DocumentSplitter

NUM_BINS = 32
"""Rows filled at the same time; more rows mean less padding."""

Row = dict[str, np.ndarray]


def keep_whole(tokens: np.ndarray) -> list[np.ndarray]:
    """Keep a document whole, for a flat stream."""
    return [tokens] if len(tokens) else []


def token_target_pairs(sequence: int, *, split: bool) -> DocumentSplitter:
    """Return the splitter for documents that share rows: int32 [tokens, 3] of token, target and loss weight.

    Every token except a document's first is a target exactly once.
    """

    def cut(tokens: np.ndarray) -> list[np.ndarray] | str:
        found = np.concatenate([tokens[:-1, :1], tokens[1:]], axis=1)
        if len(found) > sequence and not split:
            return f"has {len(tokens)} tokens, more than loop.seq_len + 1 = {sequence + 1}"
        return [found[at : at + sequence] for at in range(0, len(found), sequence)]

    return cut


def packed_rows(documents: Documents, sequence: int, seed: int | None) -> grain.DatasetIterator:
    """Return rows of whole documents (see `token_target_pairs`), packed by best fit; a seed shuffles the bins."""
    packed = BestFitPackIterDataset(
        documents.map(lambda piece: {"pairs": piece}),
        length_struct={"pairs": sequence},
        num_packing_bins=NUM_BINS,
        shuffle_bins=seed is not None,
        seed=seed or 0,
    )
    return iter(packed.map(_to_row))


def padding_row(sequence: int, packing: str) -> Row:
    zeros = np.zeros(sequence, np.int32)
    plain = {"tokens": zeros, "targets": zeros, "weights": np.zeros(sequence, np.float32)}
    return plain | ({"segments": zeros, "positions": zeros} if packing == "documents" else {})


def _to_row(bins: dict[str, np.ndarray]) -> Row:
    tokens, targets, counts = bins["pairs"].T
    return {
        "tokens": tokens,
        "targets": targets,
        "weights": counts.astype(np.float32),
        "segments": bins["pairs_segment_ids"],
        "positions": bins["pairs_positions"],
    }


class FlatRows(grain.DatasetIterator):
    """Rows of a gapless stream; a row begins with the last target of the row before.

    The state is that of the documents before the next token's, and the token's offset in its document.
    """

    def __init__(self, documents: grain.DatasetIterator, sequence: int) -> None:
        super().__init__(documents)
        self._sequence = sequence
        self._buffer: deque[tuple[np.ndarray, Any]] = deque()  # documents, each with the state before it
        self._offset = 0

    def get_state(self) -> dict[str, Any]:
        return {"documents": self._buffer[0][1] if self._buffer else self._parent.get_state(), "token": self._offset}

    def set_state(self, state: dict[str, Any]) -> None:
        self._parent.set_state(state["documents"])
        self._buffer.clear()
        self._offset = state["token"]

    def __next__(self) -> Row:
        size = sum(len(tokens) for tokens, _ in self._buffer) - self._offset
        while size <= self._sequence:
            before = self._parent.get_state()
            try:
                tokens = next(self._parent)
            except StopIteration:
                break
            self._buffer.append((tokens, before))
            size += len(tokens)
        if size < 2:
            raise StopIteration
        return self._next_row()

    def _next_row(self) -> Row:
        """Return the next row, padded at the end of the stream."""
        row = np.zeros((self._sequence + 1, 2), np.int32)
        filled = 0
        for tokens, _ in self._buffer:
            start = self._offset if filled == 0 else 0
            piece = tokens[start : start + self._sequence + 1 - filled]
            row[filled : filled + len(piece)] = piece
            filled += len(piece)
        self._offset += self._sequence
        while self._buffer and self._offset >= len(self._buffer[0][0]):
            self._offset -= len(self._buffer.popleft()[0])
        ids, counts = row.T
        return {"tokens": ids[:-1], "targets": ids[1:], "weights": counts[1:].astype(np.float32)}

"""Batches for next-token prediction: what a process holds of each global batch.

The global batch does not depend on the number of processes or devices. A process asks for a contiguous range of its
rows; the rows, `loop.rows` of them, are dealt to a fixed number of logical streams, each with a position of its own.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from conf.data import Data, TextData
from conf.loop import LmLoop
from conf.runfile import RunFileError
from trainer.data import text

Batch = dict[str, np.ndarray]
"""`tokens`, `targets` int32 and `weights` float32 (0: does not count), each [rows, sequence]; where documents share a
row `segments` int32 (from 1; 0: padding) and `positions` int32 (from 0 in each document) besides."""

Position = dict[str, Any]
"""Where the streams stand, as JSON; those of all processes are merged by `|`."""


class Batches(Protocol):
    """An endless iterator of this process's rows of the next global batch."""

    def __iter__(self) -> Batches: ...

    def __next__(self) -> Batch:
        """The next batch. Raises RunFileError where the data cannot be read or hold nothing."""
        ...

    def position(self) -> Position:
        """Where this process's streams stand after the batch last handed out, whatever was read ahead."""
        ...

    def restore(self, position: Position) -> None:
        """Go on after the batch at which the processes, of any number, had these merged positions."""
        ...

    def close(self) -> None:
        """End the reading ahead."""
        ...


def training(data: Data, loop: LmLoop, seed: int, rows: range) -> Batches:
    """The rows `rows` of every global batch, from the beginning. Raises RunFileError where the data cannot be used."""
    return _Windows(text.load(_text(data), loop.sequence), loop, seed, rows)


def validation(data: Data, loop: LmLoop, rows: range) -> list[Batch]:
    """The rows `rows` of the `loop.eval_batches` batches of every evaluation, the same on any number of processes.

    What is left of the last batch has weight 0. Raises RunFileError.
    """
    corpus = text.load(_text(data), loop.sequence)
    batches = (text.validation_batch(corpus, i, loop.rows, loop.sequence) for i in range(loop.eval_batches))
    return [_share(batch, rows) for batch in batches]


def fields(data: Data) -> dict[str, str]:
    """The arrays of a batch and their types."""
    return {"tokens": "int32", "targets": "int32", "weights": "float32"}


def vocab_of(data: Data) -> int:
    """Ids that the model must know: `model.vocab` must not be below. Raises RunFileError."""
    return text.VOCAB


def token_bytes(data: Data) -> np.ndarray:
    """How many bytes of text each token stands for, int32 [vocab]; 0 for special tokens. For bits per byte."""
    return np.ones(text.VOCAB, np.int32)


class _Windows:
    """Random windows of one text; a batch is a function of (seed, step)."""

    def __init__(self, corpus: text.Text, loop: LmLoop, seed: int, rows: range) -> None:
        self._corpus, self._loop, self._seed, self._rows = corpus, loop, seed, rows
        self._step = 0

    def __iter__(self) -> _Windows:
        return self

    def __next__(self) -> Batch:
        batch = text.train_batch(self._corpus, self._seed, self._step, self._loop.rows, self._loop.sequence)
        self._step += 1
        return _share(batch, self._rows)

    def position(self) -> Position:
        return {"step": self._step}

    def restore(self, position: Position) -> None:
        self._step = position["step"]

    def close(self) -> None:
        pass


def _share(batch: Batch, rows: range) -> Batch:
    share = {name: values[rows.start : rows.stop] for name, values in batch.items()}
    return share | {"weights": np.ones(share["targets"].shape, np.float32)}


def _text(data: Data) -> TextData:
    if not isinstance(data, TextData):
        raise RunFileError(f"data.kind: the lm loop reads text, not {data.kind}")
    return data

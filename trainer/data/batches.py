"""Batches for next-token prediction: what a process holds of each global batch.

The global batch does not depend on the number of processes or devices. A process asks for a contiguous range of its
rows; the rows, `loop.rows` of them, are dealt to a fixed number of logical streams, each with a position of its own. A
process reads those streams whose rows it holds.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from conf.data import ArithmeticData, Data, Gsm8kData, JsonlData, ParquetData, TextData
from conf.loop import LmLoop
from conf.runfile import RunFileError
from trainer.data import windows
from trainer.tokenizer import loading
from trainer.tokenizer.characters import Characters
from trainer.tokenizer.loading import Tokenizer

Batch = dict[str, np.ndarray]
"""`tokens`, `targets` int32 and `weights` float32 (0: does not count), each [rows, sequence]; where documents share a
row `segments` int32 (from 1; 0: padding) and `positions` int32 (from 0 in each document) besides."""

Position = dict[str, Any]
"""Where the streams stand, as JSON; those of all processes are merged by `|`."""

BYTES = 256


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
        """Go on after the batch at which the processes, of any number, had these merged positions.

        Raises RunFileError where the position is none of these data.
        """
        ...

    def close(self) -> None:
        """End the reading ahead."""
        ...


def training(data: Data, loop: LmLoop, seed: int, rows: range) -> Batches:
    """The rows `rows` of every global batch, from the beginning. Raises RunFileError where the data cannot be used."""
    corpus = _corpus(data)
    if isinstance(corpus, TextData) and corpus.packing == "windows":
        return _Windows(corpus, loop, seed, rows)
    from trainer.data import streams

    return streams.training(corpus, tokenizer(data), loop, seed, rows)


def validation(data: Data, loop: LmLoop, rows: range) -> list[Batch]:
    """The rows `rows` of the `loop.eval_batches` batches of every evaluation, the same on any number of processes.

    Where the data end, the rows that are left have weight 0. Raises RunFileError.
    """
    corpus = _corpus(data)
    if isinstance(corpus, TextData) and corpus.packing == "windows":
        loaded = windows.load(corpus, tokenizer(data), loop.sequence)
        numbers = range(loop.eval_batches)
        return [windows.validation_batch(loaded, i, loop.rows, loop.sequence, rows) for i in numbers]
    from trainer.data import streams

    return streams.validation(corpus, tokenizer(data), loop, rows)


def fields(data: Data) -> dict[str, str]:
    """The arrays of a batch and their types."""
    plain = {"tokens": "int32", "targets": "int32", "weights": "float32"}
    return plain | ({"segments": "int32", "positions": "int32"} if _corpus(data).packing == "documents" else {})


def tokenizer(data: Data) -> Tokenizer:
    """What makes text of samples, and samples of text. Raises RunFileError."""
    corpus = _corpus(data)
    if corpus.tokenizer != loading.CHARACTERS:
        return loading.load(corpus.tokenizer)
    if not isinstance(corpus, TextData):
        raise RunFileError(f"data.tokenizer: characters are those of a text, not of {corpus.kind}; take bytes")
    return Characters(windows.texts(corpus))


def vocab_of(data: Data) -> int:
    """Ids that the model must know: `model.vocab` must not be below. Raises RunFileError."""
    known = tokenizer(data)
    return BYTES if _corpus(data).packing == "windows" and isinstance(known, loading.Bytes) else known.vocab


def check_vocab(data: Data, model_vocab: int) -> None:
    """Raise RunFileError where the tokenizer has ids that the model does not know."""
    if (wanted := vocab_of(data)) > model_vocab:
        words = f"{model_vocab} ids are too few for data.tokenizer={_corpus(data).tokenizer}, which has {wanted}"
        raise RunFileError(
            f"model.vocab: {words}; take at least {wanted}, or the tokenizer that belongs to the weights"
        )


def token_bytes(data: Data) -> np.ndarray:
    """How many bytes of text each token stands for, int32 [vocab_of(data)]; 0 for special tokens. For bits per byte."""
    return tokenizer(data).token_bytes()[: vocab_of(data)]


class _Windows:
    """Random windows of one text."""

    def __init__(self, data: TextData, loop: LmLoop, seed: int, rows: range) -> None:
        self._text = windows.load(data, tokenizer(data), loop.sequence)
        self._loop, self._seed, self._rows = loop, seed, rows
        self._step = 0

    def __iter__(self) -> _Windows:
        return self

    def __next__(self) -> Batch:
        self._step += 1
        loop = self._loop
        return windows.train_batch(self._text, self._seed, self._step - 1, loop.rows, loop.sequence, self._rows)

    def position(self) -> Position:
        return {"step": self._step}

    def restore(self, position: Position) -> None:
        if "step" not in position:
            raise RunFileError(
                "data.packing: the checkpoint's position is not one of windows; resume with its own data"
            )
        self._step = position["step"]

    def close(self) -> None:
        pass


def _corpus(data: Data) -> TextData | JsonlData | ParquetData:
    if isinstance(data, ArithmeticData | Gsm8kData):
        raise RunFileError(f"data.kind: the lm loop reads text, jsonl or parquet, not {data.kind}")
    return data

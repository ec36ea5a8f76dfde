"""Batches for next-token prediction: what a process holds of each global batch.

The global batch does not depend on the number of processes or devices. A process asks for a contiguous range of its
rows; the rows, `loop.rows` of them, are dealt to a fixed number of logical streams, each with a position of its own. A
process reads those streams whose rows it holds.

A batch has `tokens`, `targets` int32 and `weights` float32 (0: does not count), each [rows, sequence]; where documents
share a row also `segments` int32 (from 1; 0: padding) and `positions` int32 (from 0 in each document).
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Protocol

import numpy as np

from conf.schema.training.data import ArithmeticData, Data, Gsm8kData, JsonlData, ParquetData, TextData
from conf.schema.training.loop import LmLoop
from conf.schema.training.run_yaml import RunFileError
from trainer.data import windows
from trainer.distributed.batch import Batch
from trainer.tokenizer import loading
from trainer.tokenizer.characters import CharacterTokenizer
from trainer.tokenizer.loading import Tokenizer

Progress = dict[str, Any]
"""Where the streams stand, as JSON; those of all processes are merged by `|`."""

BYTE_VOCAB_SIZE = 256


class BatchStream(Protocol):
    """An endless iterator of this process's rows of the next global batch."""

    def __iter__(self) -> BatchStream: ...

    def __next__(self) -> Batch:
        """The next batch. Raises RunFileError where the data cannot be read or hold nothing."""
        ...

    def position(self) -> Progress:
        """Where this process's streams stand after the batch last handed out, whatever was read ahead."""
        ...

    def restore(self, position: Progress) -> None:
        """Go on after the batch at which the processes, of any number, had these merged positions.

        Raises RunFileError where the position is none of these data.
        """
        ...

    def close(self) -> None:
        """End the reading ahead."""
        ...


class Dataset:
    """What the section `data` names. Its tokenizer and, where it is held in memory, its text are read once.

    Raises RunFileError where a loop for language models cannot read this kind.
    """

    def __init__(self, data: Data) -> None:
        self._data = _corpus(data)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """What makes text of samples, and samples of text. Raises RunFileError."""
        if self._data.tokenizer != loading.CHARACTERS:
            return loading.load_tokenizer(self._data.tokenizer)
        if not isinstance(self._data, TextData):
            raise RunFileError(f"data.tokenizer: characters are those of a text, not of {self._data.kind}; take bytes")
        return CharacterTokenizer(windows.read_texts(self._data))

    @property
    def begin(self) -> list[int]:
        """The special token before each document, if there is one. Raises RunFileError."""
        special = self.tokenizer.special
        return [special[self._data.bos]] if self._data.bos in special else []

    @property
    def end(self) -> int | None:
        """The special token after each document. Raises RunFileError."""
        return self.tokenizer.special.get(self._data.eos or "")

    def training(self, loop: LmLoop, seed: int, rows: range) -> BatchStream:
        """The rows `rows` of every global batch, from the beginning. Raises RunFileError where they cannot be made."""
        if self._uses_windows:
            return _WindowBatches(self._window_text(loop), loop, seed, rows)
        from trainer.data import streams

        return streams.train_batches(self._data, self.tokenizer, loop, seed, rows)

    def validation(self, loop: LmLoop, rows: range) -> list[Batch]:
        """The rows `rows` of the `loop.eval_batches` batches of every evaluation, the same on any number of processes.

        Where the data end, the rows that are left have weight 0. Raises RunFileError.
        """
        if self._uses_windows:
            text, numbers = self._window_text(loop), range(loop.eval_batches)
            return [windows.validation_batch(text, i, loop.rows, loop.seq_len, rows) for i in numbers]
        from trainer.data import streams

        return streams.validation_batches(self._data, self.tokenizer, loop, rows)

    @property
    def fields(self) -> dict[str, str]:
        """The arrays of a batch and their types."""
        plain = {"tokens": "int32", "targets": "int32", "weights": "float32"}
        return plain | ({"segments": "int32", "positions": "int32"} if self._data.packing == "documents" else {})

    @property
    def vocab(self) -> int:
        """Ids that the model must know: `model.vocab_size` must not be below. Raises RunFileError."""
        return (
            BYTE_VOCAB_SIZE
            if self._uses_windows and isinstance(self.tokenizer, loading.ByteTokenizer)
            else self.tokenizer.vocab
        )

    def check_vocab_size(self, model_vocab: int) -> None:
        """Raise RunFileError where the tokenizer has ids that the model does not know."""
        if self.vocab > model_vocab:
            words = f"{model_vocab} ids are too few for data.tokenizer={self._data.tokenizer}, which has {self.vocab}"
            raise RunFileError(
                f"model.vocab_size: {words}; take at least {self.vocab}, or the tokenizer that belongs to the weights"
            )

    def token_bytes(self) -> np.ndarray:
        """How many bytes of text each token stands for, int32 [vocab]; 0 for special tokens. For bits per byte."""
        return self.tokenizer.token_bytes()[: self.vocab]

    @property
    def _uses_windows(self) -> bool:
        return self._data.packing == "windows"

    @cached_property
    def _text(self) -> windows.TextSplits:
        assert isinstance(self._data, TextData)
        return windows.load_text(self._data, self.tokenizer)

    def _window_text(self, loop: LmLoop) -> windows.TextSplits:
        self._text.check(loop.seq_len)
        return self._text


class _WindowBatches:
    """Random windows of one text."""

    def __init__(self, text: windows.TextSplits, loop: LmLoop, seed: int, rows: range) -> None:
        self._text, self._loop, self._seed, self._rows = text, loop, seed, rows
        self._step = 0

    def __iter__(self) -> _WindowBatches:
        return self

    def __next__(self) -> Batch:
        self._step += 1
        loop = self._loop
        return windows.train_batch(self._text, self._seed, self._step - 1, loop.rows, loop.seq_len, self._rows)

    def position(self) -> Progress:
        return {"step": self._step}

    def restore(self, position: Progress) -> None:
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

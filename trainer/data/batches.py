"""Batches for next-token prediction: what a process holds of each global batch.

The global batch does not depend on the number of processes or devices. A process asks for a contiguous range of its
rows; the rows, `loop.rows` of them, are dealt to a fixed number of logical streams, each with a position of its own. A
process reads those streams whose rows it holds.

A batch has `tokens`, `targets` int32 and `weights` float32 (0: does not count), each [rows, sequence]; where documents
share a row also `segments` int32 (from 1; 0: padding) and `positions` int32 (from 0 in each document).
"""

from functools import cached_property
from typing import Any, Protocol

import numpy as np

from conf.schema.training.data import CustomDocuments, Data, JsonlData, ParquetData, PuzzleData, TextData
from conf.schema.training.loop import LmLoop
from conf.schema.training.prompts import QuestionData
from conf.schema.training.run_yaml import RunFileError
from trainer.data import windows
from trainer.distributed.batch import Batch
from trainer.tokenizer import loading
from trainer.tokenizer.characters import CharacterTokenizer
from trainer.tokenizer.loading import Tokenizer

Progress = dict[str, Any]
"""Positions of the streams, as JSON; those of all processes are merged by `|`."""

BYTE_VOCAB_SIZE = 256


class Stream(Protocol):
    """This process's rows of the global batches, in order, without end."""

    def __next__(self) -> Batch:
        """Return the rows of the next batch. Raises RunFileError if the data cannot be read or are empty."""
        ...

    def position(self) -> Progress:
        """Return the positions of this process's streams after the last batch returned, regardless of prefetching."""
        ...

    def num_bad_lines(self) -> dict[str, int]:
        """Return how many lines each of this process's streams has skipped, by its position after the last batch.

        With packing: documents, the position is the beginning of the rows that are packed together.
        """
        ...


class BatchStream(Stream, Protocol):
    """A stream that can go on from an earlier position."""

    def restore(self, position: Progress) -> None:
        """Continue after the batch with these merged positions, saved by any number of processes.

        Raises RunFileError if the position does not belong to these data.
        """
        ...

    def close(self) -> None: ...


class Dataset:
    """The data set of section `data`. Reads its tokenizer, and text held in memory, only once.

    Raises RunFileError if the language-model loop does not support this kind.
    """

    def __init__(self, data: Data) -> None:
        self._data = _corpus(data)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Raises RunFileError."""
        if self._data.tokenizer != loading.CHARACTERS:
            return loading.load_tokenizer(self._data.tokenizer)
        if not isinstance(self._data, TextData):
            raise RunFileError(f"data.tokenizer: characters requires a text, not {self._data.kind}; use bytes")
        return CharacterTokenizer(windows.read_texts(self._data))

    @property
    def bos_ids(self) -> list[int]:
        """Return the special token before each document, if any. Raises RunFileError."""
        special = self.tokenizer.special_tokens
        return [special[self._data.bos]] if self._data.bos in special else []

    @property
    def eos_id(self) -> int | None:
        """Return the special token after each document. Raises RunFileError."""
        return self.tokenizer.special_tokens.get(self._data.eos or "")

    def train_batches(self, loop: LmLoop, seed: int, rows: range, ahead: bool = True) -> BatchStream:
        """Return `rows` of every global batch, from the beginning. Raises RunFileError if they cannot be built.

        ahead: whether to read before the first batch is asked for, as far as `data.prefetch_batches` says.
        """
        if self._uses_windows:
            return _WindowBatches(self._window_text(loop), loop, seed, rows)
        from trainer.data import streams

        return streams.train_batches(self._data, self.tokenizer, loop, seed, rows, ahead)

    def validation_batches(self, loop: LmLoop, rows: range) -> list[Batch]:
        """Return `rows` of the `loop.eval_batches` evaluation batches, which are the same for any number of processes.

        Rows past the end of the data have weight 0. Raises RunFileError.
        """
        if self._uses_windows:
            text, numbers = self._window_text(loop), range(loop.eval_batches)
            return [windows.validation_batch(text, i, loop.rows, loop.seq_len, rows) for i in numbers]
        from trainer.data import streams

        return streams.validation_batches(self._data, self.tokenizer, loop, rows)

    @property
    def batch_dtypes(self) -> dict[str, str]:
        """Return a batch's array names and their dtypes."""
        plain = {"tokens": "int32", "targets": "int32", "weights": "float32"}
        return plain | ({"segments": "int32", "positions": "int32"} if self._data.packing == "documents" else {})

    @property
    def vocab_size(self) -> int:
        """Return the smallest `model.vocab_size` that the data allow. Raises RunFileError."""
        has_bytes_only = self._uses_windows and isinstance(self.tokenizer, loading.ByteTokenizer)
        return BYTE_VOCAB_SIZE if has_bytes_only else self.tokenizer.vocab_size

    def check_vocab_size(self, model_vocab: int) -> None:
        """Raise RunFileError if the tokenizer has ids beyond the model's vocabulary."""
        loading.check_vocab_size(model_vocab, self.vocab_size, f"data.tokenizer={self._data.tokenizer}")

    def token_bytes(self) -> np.ndarray:
        """Return each token's bytes of text, int32 [vocab], for bits per byte; 0 for special tokens."""
        return self.tokenizer.token_bytes()[: self.vocab_size]

    @property
    def _uses_windows(self) -> bool:
        return self._data.packing == "windows"

    @cached_property
    def _loaded_text(self) -> windows.TextSplits:
        assert isinstance(self._data, TextData)
        return windows.load_text(self._data, self.tokenizer)

    def _window_text(self, loop: LmLoop) -> windows.TextSplits:
        self._loaded_text.check_length(loop.seq_len)
        return self._loaded_text


class _WindowBatches:
    """Batches of random windows of one text."""

    def __init__(self, text: windows.TextSplits, loop: LmLoop, seed: int, rows: range) -> None:
        self._text, self._loop, self._seed, self._rows = text, loop, seed, rows
        self._step = 0

    def __next__(self) -> Batch:
        self._step += 1
        loop = self._loop
        return windows.train_batch(self._text, self._seed, self._step - 1, loop.rows, loop.seq_len, self._rows)

    def position(self) -> Progress:
        return {"step": self._step}

    def num_bad_lines(self) -> dict[str, int]:
        return {}

    def restore(self, position: Progress) -> None:
        if "step" not in position:
            raise RunFileError(
                "data.packing: the checkpoint was not written with windows; resume with its data settings"
            )
        self._step = position["step"]

    def close(self) -> None:
        pass


def _corpus(data: Data) -> TextData | JsonlData | ParquetData | CustomDocuments:
    if isinstance(data, QuestionData | PuzzleData):
        raise RunFileError(f"data.kind: the lm loop requires text, jsonl, parquet or documents, not {data.kind}")
    return data

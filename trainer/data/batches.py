"""Batches for next-token prediction: what a process holds of each global batch.

The global batch does not depend on the number of processes or devices. A process asks for a contiguous range of its
rows; the rows, `loop.rows` of them, are dealt to a fixed number of logical streams, each with a position of its own. A
process reads those streams whose rows it holds.

A batch has `tokens`, `targets` int32 and `weights` float32 (0: does not count), each [rows, sequence]; where documents
share a row also `segments` int32 (from 1; 0: padding) and `positions` int32 (from 0 in each document).
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from conf.formats import RunFileError
from conf.schema.training.data import Data, PuzzleData, QuestionData, TableData, TextData
from conf.schema.training.loop import LmLoop
from conf.schema.training.refusals import characters_problem
from trainer.corpus import files
from trainer.distributed.mesh import Batch
from trainer.tokenizer import loading, text_bytes
from trainer.tokenizer.loading import ByteTokenizer, CharacterTokenizer, Tokenizer


@dataclass(frozen=True)
class TextSplits:
    """Tokens for training and for validation."""

    train: np.ndarray  # unsigned [tokens]
    validation: np.ndarray  # unsigned [tokens]
    sources: tuple[str, str]  # "data.path: FILE" of each, for messages

    def check_length(self, sequence: int) -> None:
        """Raise RunFileError if a part is too short for sequences of that length."""
        parts = {"train": self.train, "validation": self.validation}
        for source, (name, tokens) in zip(self.sources, parts.items(), strict=True):
            if len(tokens) <= sequence:
                raise RunFileError(f"{source} has {len(tokens)} tokens for {name}; loop.seq_len + 1 are required")


def load_text(data: TextData, tokenizer: Tokenizer) -> TextSplits:
    """Read the files. Raises RunFileError if any is missing."""
    train, source = _encode_files(data.path, "data.path", tokenizer), f"data.path: {data.path}"
    if data.eval_path is None:
        split = len(train) - int(len(train) * data.eval_fraction)
        return TextSplits(train[:split], train[split:], (source, source))
    validation = _encode_files(data.eval_path, "data.eval_path", tokenizer)
    return TextSplits(train, validation, (source, f"data.eval_path: {data.eval_path}"))


def train_batch(text: TextSplits, seed: int, step: int, batch: int, sequence: int, rows: range) -> Batch:
    """Return `rows` of a step's random windows: `tokens`, `targets`, `weights`, each [rows, sequence].

    They are a function of (seed, step).
    """
    starts = np.random.default_rng((seed, step)).integers(0, len(text.train) - sequence, batch)
    return _make_batch(text.train, starts[rows.start : rows.stop], sequence)


def validation_batch(text: TextSplits, index: int, batch: int, sequence: int, rows: range) -> Batch:
    """Return `rows` of a batch of consecutive windows without overlap; each token is a target once.

    Positions past the end have weight 0.
    """
    starts = (index * batch + np.array(rows)) * sequence
    ends = np.minimum(starts + sequence, len(text.validation) - 1)
    last = max(0, len(text.validation) - 1 - sequence)
    found = _make_batch(text.validation, np.minimum(starts, last), sequence)
    # the last window is cut short: it overlaps the one before, and what that had does not count again
    counted = np.minimum(starts, last)[:, None] + np.arange(sequence)
    found["weights"] = ((counted >= starts[:, None]) & (counted < ends[:, None])).astype(np.float32)
    return found


def _make_batch(tokens: np.ndarray, starts: np.ndarray, sequence: int) -> Batch:
    rows = tokens[starts[:, None] + np.arange(sequence + 1)].astype(np.int32)
    return {"tokens": rows[:, :-1], "targets": rows[:, 1:], "weights": np.ones((len(rows), sequence), np.float32)}


def _encode_files(pattern: str, key: str, tokenizer: Tokenizer) -> np.ndarray:
    return np.concatenate([_encode_file(file, key, tokenizer) for file in files.expand_glob(pattern, key)])


def _encode_file(file: str, key: str, tokenizer: Tokenizer) -> np.ndarray:
    text = _read(file, key)
    if isinstance(tokenizer, ByteTokenizer):
        return np.frombuffer(text.encode(), np.uint8)
    return tokenizer.encode([text])[0].astype(np.uint32)


def read_texts(data: TextData) -> list[str]:
    """Return all texts of the data set. Raises RunFileError."""
    places = {"data.path": data.path, "data.eval_path": data.eval_path}
    return [_read(file, key) for key, path in places.items() if path for file in files.expand_glob(path, key)]


def _read(file: str, key: str) -> str:
    with files.open_file(file) as stream:
        files.refuse_packed(stream, file, key)
        raw = stream.read()
    try:
        return raw.decode("utf-8-sig")  # a byte-order mark is no text
    except UnicodeDecodeError as error:
        raise RunFileError(f"{key}: {file} is not UTF-8 ({error.reason} at byte {error.start})") from None


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

    def left_out(self) -> dict[str, dict[str, int]]:
        """Return how many lines and long documents each of this process's streams has skipped, after the last batch.

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
        if isinstance(data, QuestionData | PuzzleData):
            raise RunFileError(f"data.kind: the lm loop requires text, jsonl, parquet or documents, not {data.kind}")
        self._data = data

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Raises RunFileError."""
        if self._data.tokenizer != loading.CHARACTERS:
            return loading.load_tokenizer(self._data.tokenizer)
        if not isinstance(self._data, TextData):
            raise RunFileError(f"data.tokenizer: {characters_problem(self._data)}")
        return CharacterTokenizer(read_texts(self._data))

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
            return [validation_batch(text, i, loop.rows, loop.seq_len, rows) for i in numbers]
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

    @cached_property
    def text_bytes(self) -> np.ndarray | str:
        """Return what bits per byte need of each token, int32 [2, vocab]; or why bytes cannot be told.

        First the bytes of text that it stands for, 0 for special tokens. Then the bytes that the token after it has
        too many: 1 where a document begins behind it, before which the tokenizer puts a space of its own.
        """
        found = text_bytes.measure(self.tokenizer)
        if isinstance(found, str):
            return found
        table = np.stack([found.of_token, np.zeros_like(found.of_token)])[:, : self.vocab_size]
        if not found.own_space or self._uses_windows:  # a text in windows is one document
            return table
        if isinstance(self._data, TableData) and self._data.template is not None:
            return "the tokenizer puts a space of its own before each answer"
        marks = [*self.bos_ids, *(() if self.eos_id is None else (self.eos_id,))]
        if not marks and self._data.packing == "stream":
            return (
                "the tokenizer puts a space of its own before each document; set data.bos or data.eos, which mark them"
            )
        table[1, marks] = 1
        return table

    @property
    def _uses_windows(self) -> bool:
        return self._data.packing == "windows"

    @cached_property
    def _loaded_text(self) -> TextSplits:
        assert isinstance(self._data, TextData)
        return load_text(self._data, self.tokenizer)

    def _window_text(self, loop: LmLoop) -> TextSplits:
        self._loaded_text.check_length(loop.seq_len)
        return self._loaded_text


class _WindowBatches:
    """Batches of random windows of one text."""

    def __init__(self, text: TextSplits, loop: LmLoop, seed: int, rows: range) -> None:
        self._text, self._loop, self._seed, self._rows = text, loop, seed, rows
        self._step = 0

    def __next__(self) -> Batch:
        self._step += 1
        loop = self._loop
        return train_batch(self._text, self._seed, self._step - 1, loop.rows, loop.seq_len, self._rows)

    def position(self) -> Progress:
        return {"step": self._step}

    def left_out(self) -> dict[str, dict[str, int]]:
        return {}

    def restore(self, position: Progress) -> None:
        if "step" not in position:
            raise RunFileError(
                "data.packing: the checkpoint was not written with windows; resume with its data settings"
            )
        self._step = position["step"]

    def close(self) -> None:
        pass

"""Random windows of a text that is held in memory as tokens; a batch is a function of (seed, step)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from conf.schema.training.data import TextData
from conf.schema.training.run_yaml import RunFileError
from trainer.corpus import files
from trainer.distributed.batch import Batch
from trainer.tokenizer.loading import Bytes, Tokenizer


@dataclass(frozen=True)
class Text:
    """Tokens to train on, and tokens kept for validation."""

    train: np.ndarray  # unsigned [tokens]
    validation: np.ndarray  # unsigned [tokens]
    sources: tuple[str, str]  # of each, "data.path: FILE": for messages

    def check(self, sequence: int) -> None:
        """Raise RunFileError where a part holds too little for sequences of that length."""
        parts = {"train": self.train, "validation": self.validation}
        for source, (name, tokens) in zip(self.sources, parts.items(), strict=True):
            if len(tokens) <= sequence:
                raise RunFileError(f"{source} has {len(tokens)} tokens for {name}; loop.seq_len + 1 are needed")


def load(data: TextData, tokenizer: Tokenizer) -> Text:
    """Read the files. Raises RunFileError where they are missing."""
    train, source = _tokens(data.path, "data.path", tokenizer), f"data.path: {data.path}"
    if data.eval_path is None:
        split = len(train) - int(len(train) * data.eval_fraction)
        return Text(train[:split], train[split:], (source, source))
    validation = _tokens(data.eval_path, "data.eval_path", tokenizer)
    return Text(train, validation, (source, f"data.eval_path: {data.eval_path}"))


def train_batch(text: Text, seed: int, step: int, batch: int, sequence: int, rows: range) -> Batch:
    """The rows `rows` of the random windows of a step: `tokens`, `targets`, `weights`, each [rows, sequence]."""
    starts = np.random.default_rng((seed, step)).integers(0, len(text.train) - sequence, batch)
    return _windows(text.train, starts[rows.start : rows.stop], sequence)


def validation_batch(text: Text, index: int, batch: int, sequence: int, rows: range) -> Batch:
    """The rows `rows` of a batch of the windows that follow each other without overlap, each token a target once.

    What is past the end has weight 0.
    """
    starts = (index * batch + np.array(rows)) * sequence
    ends = np.minimum(starts + sequence, len(text.validation) - 1)
    last = max(0, len(text.validation) - 1 - sequence)
    found = _windows(text.validation, np.minimum(starts, last), sequence)
    # the last window is cut short: it overlaps the one before, and what that had does not count again
    counted = np.minimum(starts, last)[:, None] + np.arange(sequence)
    found["weights"] = ((counted >= starts[:, None]) & (counted < ends[:, None])).astype(np.float32)
    return found


def _windows(tokens: np.ndarray, starts: np.ndarray, sequence: int) -> Batch:
    rows = tokens[starts[:, None] + np.arange(sequence + 1)].astype(np.int32)
    return {"tokens": rows[:, :-1], "targets": rows[:, 1:], "weights": np.ones((len(rows), sequence), np.float32)}


def _tokens(pattern: str, key: str, tokenizer: Tokenizer) -> np.ndarray:
    return np.concatenate([_of_file(file, key, tokenizer) for file in files.expand(pattern, key)])


def _of_file(file: str, key: str, tokenizer: Tokenizer) -> np.ndarray:
    text = _read(file, key)
    if isinstance(tokenizer, Bytes):
        return np.frombuffer(text.encode(), np.uint8)
    return tokenizer.encode([text])[0].astype(np.uint32)


def texts(data: TextData) -> list[str]:
    """All there is to read. Raises RunFileError."""
    places = {"data.path": data.path, "data.eval_path": data.eval_path}
    return [_read(file, key) for key, path in places.items() if path for file in files.expand(path, key)]


def _read(file: str, key: str) -> str:
    with files.opened(file) as stream:
        raw = stream.read()
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise RunFileError(f"{key}: {file} is not UTF-8 ({error.reason} at byte {error.start})") from None

"""Random windows of a text that is held in memory as tokens; a batch is a function of (seed, step)."""

from dataclasses import dataclass

import numpy as np

from conf.schema.training.data import TextData
from conf.schema.training.run_yaml import RunFileError
from trainer.corpus import files
from trainer.distributed.batch import Batch
from trainer.tokenizer.loading import ByteTokenizer, Tokenizer


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
    """Return `rows` of a step's random windows: `tokens`, `targets`, `weights`, each [rows, sequence]."""
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
        raw = stream.read()
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise RunFileError(f"{key}: {file} is not UTF-8 ({error.reason} at byte {error.start})") from None

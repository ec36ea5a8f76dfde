"""A text file as bytes; a batch is a function of (seed, step)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from etils import epath

from conf.data import TextData
from conf.runfile import RunFileError

VOCAB = 256
"""Token ids are bytes."""


@dataclass(frozen=True)
class Text:
    """Bytes to train on, and bytes kept for validation."""

    train: np.ndarray  # uint8 [tokens]
    validation: np.ndarray  # uint8 [tokens]


def load(cfg: TextData, sequence: int) -> Text:
    """Read the file. Raises RunFileError where it is missing or holds too little for sequences of that length."""
    path = epath.Path(cfg.path)
    if not path.exists():
        raise RunFileError(f"data.path: there is no {cfg.path}")
    everything = np.frombuffer(path.read_bytes(), np.uint8)
    split = len(everything) - int(len(everything) * cfg.validation_fraction)
    text = Text(train=everything[:split], validation=everything[split:])
    for part in ("train", "validation"):
        if (size := len(getattr(text, part))) <= sequence:
            raise RunFileError(f"data.path: {cfg.path} has {size} bytes for {part}; loop.sequence + 1 are needed")
    return text


def train_batch(text: Text, seed: int, step: int, batch: int, sequence: int) -> dict[str, np.ndarray]:
    """Random windows of the training part: `tokens` and `targets`, the next ones, each int32 [batch, sequence]."""
    random = np.random.default_rng((seed, step))
    return _windows(text.train, random.integers(0, len(text.train) - sequence, batch), sequence)


def validation_batch(text: Text, index: int, batch: int, sequence: int) -> dict[str, np.ndarray]:
    """The windows number index * batch onwards of the validation part, which follow each other without overlap.

    Past the end they start again from the beginning.
    """
    count = (len(text.validation) - 1) // sequence
    numbers = np.arange(index * batch, (index + 1) * batch) % count
    return _windows(text.validation, numbers * sequence, sequence)


def _windows(tokens: np.ndarray, starts: np.ndarray, sequence: int) -> dict[str, np.ndarray]:
    rows = tokens[starts[:, None] + np.arange(sequence + 1)].astype(np.int32)
    return {"tokens": rows[:, :-1], "targets": rows[:, 1:]}

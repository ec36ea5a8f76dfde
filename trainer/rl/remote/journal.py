"""The journal of a run: the samples of every rollout that it has trained on, a file each, in DIR/journal.

With the run's config it determines the weights, however the samples were drawn. A resumed run reads what an earlier
attempt has written, and `loop.replay` trains on a whole journal again.
"""

import logging
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
from etils import epath

from trainer.checkpoint.storage import RunStorage
from trainer.rl.remote import wire

FOLDER = "journal"
PARTIAL = ".partial"


class JournalError(ValueError):
    """A file of a journal is damaged, or of another rollout."""


class DrawnSample(NamedTuple):
    """A response with its scores.

    tokens: int32 [n]; logprobs: float32 [n]; versions: int32 [n], updates that the weights had seen when they drew each
    token; scores: float64 [4], as of `rollouts.score_sample`; finished: as of `Completion`.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    scores: np.ndarray
    finished: bool


def encode(number: int, samples: list[DrawnSample]) -> bytes:
    """Return the content of a rollout's file."""
    lengths = np.array([len(sample.tokens) for sample in samples], np.int32)
    joined = {name: np.concatenate([getattr(s, name) for s in samples]) for name in ("tokens", "logprobs", "versions")}
    scores, finished = np.stack([s.scores for s in samples]), np.array([s.finished for s in samples])
    return wire.pack({"rollout": number}, {**joined, "lengths": lengths, "scores": scores, "finished": finished})


def decode(content: bytes, number: int | None = None) -> list[DrawnSample]:
    """Return the samples that `encode` was given.

    Raises:
        JournalError: the content is damaged, or that of another rollout than `number`.
    """
    try:
        message, found = wire.unpack(content)
        ends = np.cumsum(found["lengths"])[:-1]
        parts = [np.split(found[name], ends) for name in ("tokens", "logprobs", "versions")]
        rows = list(zip(*parts, found["scores"], found["finished"].tolist(), strict=True))
        written = message["rollout"]
    except (ValueError, KeyError, TypeError, IndexError, EOFError, OSError, zipfile.BadZipFile) as error:
        raise JournalError(f"damaged: {type(error).__name__}: {error}") from error
    if number is not None and written != number:
        raise JournalError(f"it holds rollout {written}, not {number}")
    return [DrawnSample(*row) for row in rows]


class Journal:
    """The journal in a run's folder. Only one process writes.

    A file is written to this worker's disk first, and then to the run's folder. During an outage of the bucket it stays
    on the disk, where the next attempt on the pod finds it.
    """

    def __init__(self, folder: str, storage: RunStorage | None = None, disk: Path | None = None) -> None:
        """Open DIR/journal. The storage must answer.

        Args:
            folder: of the run.
            storage: of the run's folder, to write; without it, the journal is only read.
            disk: a folder on this worker's disk, to write.
        """
        self._folder, self._storage, self._disk = epath.Path(folder) / FOLDER, storage, disk
        self._waiting: list[int] = []
        self._uploaded: set[int] = set()
        if disk is not None:
            disk.mkdir(parents=True, exist_ok=True)
            self._uploaded = _numbers(self._folder)
            self._waiting = sorted(number for number in _numbers(epath.Path(disk)) if self._is_usable(number))

    def read(self, number: int) -> bytes | None:
        """Return the content of a rollout's file, or None if there is none.

        A journal that is written asks the bucket only for files that it has, so that an outage does not hold it up.
        """
        if number in self._waiting:
            return self._local(number).read_bytes()
        if self._disk is not None and number not in self._uploaded:
            return None
        path = self._path(number)
        return path.read_bytes() if path.exists() else None

    def write(self, number: int, content: bytes) -> None:
        """Write a rollout's file whole. Returns when it is on this worker's disk, at least."""
        draft = self._local(number).with_suffix(PARTIAL)
        draft.write_bytes(content)
        draft.rename(self._local(number))
        self._waiting.append(number)
        self.upload()

    def upload(self) -> int:
        """Copy what is only on this worker's disk to the run's folder; return how many files still are."""
        assert self._storage is not None, "opened to read"
        if self._waiting and self._storage.answers():
            with self._storage.tolerated(FOLDER):
                while self._waiting:
                    self._upload(self._waiting[0])
                    self._uploaded.add(self._waiting[0])
                    self._local(self._waiting.pop(0)).unlink()
        return len(self._waiting)

    def _upload(self, number: int) -> None:
        path = self._path(number)
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.parent / f"{path.name}{PARTIAL}"
        draft.write_bytes(self._local(number).read_bytes())
        draft.rename(path)

    def _is_usable(self, number: int) -> bool:
        """Return whether a file on this worker's disk counts; delete one that does not."""
        if number not in self._uploaded:
            try:
                decode(self._local(number).read_bytes(), number)
                return True
            except JournalError as error:  # the disk lost power, for example
                logging.warning("rollout %d is drawn again; %s: %s", number, self._local(number), error)
        self._local(number).unlink()
        return False

    def _local(self, number: int) -> Path:
        assert self._disk is not None, "opened to read"
        return self._disk / f"{number:08}.npz"

    def _path(self, number: int) -> epath.Path:
        return self._folder / f"{number:08}.npz"


def _numbers(folder: epath.Path) -> set[int]:
    """Return the rollouts that have a whole file in a folder."""
    if not folder.exists():
        return set()
    return {int(path.stem) for path in folder.iterdir() if path.suffix == ".npz" and path.stem.isdigit()}

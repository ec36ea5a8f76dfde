"""The journal of a run: the samples of every rollout that it has trained on, a file each, in DIR/journal.

With the run's config it determines the weights, however the samples were drawn. A resumed run reads what an earlier
attempt has written, and `loop.replay` trains on a whole journal again.
"""

from collections import deque
from typing import NamedTuple

import numpy as np
from etils import epath

from trainer.checkpoint.storage import RunStorage
from trainer.rl.remote import wire

FOLDER = "journal"


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


def decode(content: bytes) -> list[DrawnSample]:
    """Return the samples that `encode` was given."""
    _, found = wire.unpack(content)
    ends = np.cumsum(found["lengths"])[:-1]
    parts = [np.split(found[name], ends) for name in ("tokens", "logprobs", "versions")]
    rows = zip(*parts, found["scores"], found["finished"].tolist(), strict=True)
    return [DrawnSample(*row) for row in rows]


class Journal:
    """The journal in a run's folder. Only one process writes."""

    def __init__(self, folder: str, storage: RunStorage | None = None) -> None:
        """Open DIR/journal. storage: of the run's folder, to write; without it, the journal is only read."""
        self._folder, self._storage = epath.Path(folder) / FOLDER, storage
        self._unwritten: deque[tuple[epath.Path, bytes]] = deque()

    def read(self, number: int) -> bytes | None:
        """Return the content of a rollout's file, or None if there is none."""
        path = self._path(number)
        return path.read_bytes() if path.exists() else None

    def write(self, number: int, content: bytes) -> None:
        """Write a rollout's file whole. While the bucket does not answer, it waits in memory for the next call."""
        assert self._storage is not None, "opened to read"
        self._unwritten.append((self._path(number), content))
        if not self._storage.answers():
            return
        with self._storage.tolerated(FOLDER):
            while self._unwritten:
                path, whole = self._unwritten[0]
                path.parent.mkdir(parents=True, exist_ok=True)
                draft = path.parent / f"{path.name}.partial"
                draft.write_bytes(whole)
                draft.rename(path)
                self._unwritten.popleft()

    def _path(self, number: int) -> epath.Path:
        return self._folder / f"{number:08}.npz"

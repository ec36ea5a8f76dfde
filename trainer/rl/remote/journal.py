"""The journal of a run: the samples of every rollout that it has trained on, a file each, in DIR/journal.

With the run's config it determines the weights, however the samples were drawn. A resumed run reads what an earlier
attempt has written, and `loop.replay` trains on a whole journal again. A file in the run's folder never changes.
"""

import io
import json
import logging
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from trainer.checkpoint.local_saves import PARTIAL, replaced_by
from trainer.checkpoint.outage import ReplacedError
from trainer.checkpoint.storage import RunStorage, create_file
from trainer.rl.remote.wire import Arrays

FOLDER = "journal"


class JournalError(ValueError):
    """A file of a journal is damaged, or of another rollout."""


class _TakenError(Exception):
    """Another attempt has written another content of rollout `number`."""

    def __init__(self, number: int, content: bytes) -> None:
        super().__init__(f"another attempt has written rollout {number} of the journal")
        self.number, self.content = number, content


class DrawnSample(NamedTuple):
    """A response with its scores.

    tokens: int32 [n]; logprobs: float32 [n]; versions: int32 [n], updates that the weights had seen when they drew each
    token; scores: float64 [4], as of `rollouts.score_sample`; finished, routes: as of `Completion`.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    scores: np.ndarray
    finished: bool
    routes: np.ndarray | None = None


def encode(number: int, samples: list[DrawnSample]) -> bytes:
    """Return the content of a rollout's file."""
    lengths = np.array([len(sample.tokens) for sample in samples], np.int32)
    joined = {name: np.concatenate([getattr(s, name) for s in samples]) for name in ("tokens", "logprobs", "versions")}
    scores, finished = np.stack([s.scores for s in samples]), np.array([s.finished for s in samples])
    if known := [sample.routes for sample in samples if sample.routes is not None]:
        joined |= {"routes": np.concatenate(known), "routed": np.array([len(routes) for routes in known], np.int32)}
    return _pack({"rollout": number}, {**joined, "lengths": lengths, "scores": scores, "finished": finished})


def decode(content: bytes, number: int | None = None) -> list[DrawnSample]:
    """Return the samples that `encode` was given.

    Raises:
        JournalError: the content is damaged, or that of another rollout than `number`.
    """
    try:
        message, found = _unpack(content)
        ends = np.cumsum(found["lengths"])[:-1]
        parts = [np.split(found[name], ends) for name in ("tokens", "logprobs", "versions")]
        routes = [None] * len(found["lengths"])
        if "routes" in found:
            routes = np.split(found["routes"], np.cumsum(found["routed"])[:-1])
        rows = list(zip(*parts, found["scores"], found["finished"].tolist(), routes, strict=True))
        written = message["rollout"]
    except (ValueError, KeyError, TypeError, IndexError, EOFError, OSError, zipfile.BadZipFile) as error:
        raise JournalError(f"damaged: {type(error).__name__}: {error}") from error
    if number is not None and written != number:
        raise JournalError(f"it holds rollout {written}, not {number}")
    return [DrawnSample(*row) for row in rows]


class Journal:
    """The journal in a run's folder. One process of an attempt writes.

    A file is written to this worker's disk first, and then to the run's folder. During an outage of the bucket it stays
    on the disk, where the next attempt on the pod finds it. An attempt that a later one has replaced writes no more.
    No attempt writes over what is there: what came first counts.
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
            self._waiting = self._find_usable()

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

    def write(self, number: int, content: bytes) -> bytes:
        """Write the file of a rollout that nobody has trained on, and return the content that counts.

        That is another attempt's if it came first. Returns when it is on this worker's disk, at least. Raises like
        `upload`.
        """
        draft = self._local(number).with_suffix(PARTIAL)
        draft.write_bytes(content)
        draft.rename(self._local(number))
        self._waiting.append(number)
        try:
            self._upload_all()
        except _TakenError as taken:
            if taken.number != number:
                raise ReplacedError(str(taken)) from taken
            self._forget_local(number)
            return taken.content
        return content

    def upload(self) -> int:
        """Copy what is only on this worker's disk to the run's folder; return how many files still are.

        Raises:
            ReplacedError: a later attempt owns the run's folder.
        """
        try:
            self._upload_all()
        except _TakenError as taken:
            raise ReplacedError(str(taken)) from taken
        return len(self._waiting)

    def _upload_all(self) -> None:
        assert self._storage is not None, "opened to read"
        if not self._waiting or not self._storage.answers():
            return
        with self._storage.tolerated(FOLDER):
            if successor := replaced_by(self._storage.folder):
                raise ReplacedError(f"{successor} exists: a later attempt has replaced this one, and has the journal")
            while self._waiting:
                self._upload(self._waiting[0])
                self._forget_local(self._waiting[0])

    def _upload(self, number: int) -> None:
        """Raises _TakenError."""
        path, content = self._path(number), self._local(number).read_bytes()
        try:
            create_file(path, content)
        except FileExistsError:  # or an earlier request for the same, whose answer was lost
            if (found := path.read_bytes()) != content:
                raise _TakenError(number, found) from None

    def _forget_local(self, number: int) -> None:
        """Count on the file in the run's folder from now on."""
        self._uploaded.add(number)
        self._waiting.remove(number)
        self._local(number).unlink()

    def _find_usable(self) -> list[int]:
        """Return the rollouts that only this worker's disk has; delete what does not count.

        Once another pod has gone on with other samples, all that was drawn here after them is of other weights.
        """
        usable, outdated = list[int](), False
        for number in sorted(_numbers(epath.Path(self._disk or ""))):
            content = self._local(number).read_bytes()
            if number in self._uploaded:
                outdated |= content != self._path(number).read_bytes()
            elif not outdated and _is_whole(content, number):
                usable.append(number)
                continue
            self._local(number).unlink()
        return usable

    def _local(self, number: int) -> Path:
        assert self._disk is not None, "opened to read"
        return self._disk / f"{number:08}.npz"

    def _path(self, number: int) -> epath.Path:
        return self._folder / f"{number:08}.npz"


def _pack(message: dict[str, Any], arrays: Arrays) -> bytes:
    """Return a message and arrays as the bytes of an npz file without pickles."""
    content = io.BytesIO()
    text = np.frombuffer(json.dumps(message).encode(), np.uint8)
    np.savez(content, **arrays, message=text)  # pyright: ignore[reportArgumentType]
    return content.getvalue()


def _unpack(content: bytes) -> tuple[dict[str, Any], Arrays]:
    """Return what `_pack` was given."""
    with np.load(io.BytesIO(content)) as found:
        arrays = dict(found)
    return json.loads(arrays.pop("message").tobytes()), arrays


def _is_whole(content: bytes, number: int) -> bool:
    try:
        decode(content, number)
    except JournalError as error:  # the disk lost power, for example
        logging.warning(
            "rollout %d is drawn again, since its file on this worker's disk is unusable: %s", number, error
        )
        return False
    return True


def _numbers(folder: epath.Path) -> set[int]:
    """Return the rollouts that have a whole file in a folder."""
    if not folder.exists():
        return set()
    return {int(path.stem) for path in folder.iterdir() if path.suffix == ".npz" and path.stem.isdigit()}

"""Checksums of the batches, compared between processes: finds bits that changed in one worker's data.

A batch is gone after its update, so every batch counts towards a sum, and the sums are compared at intervals. Where
each process reads rows of its own, a second one reads them too, and throws them away after adding them up.
"""

from collections import Counter, defaultdict
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Mesh

from conf.formats import RunFileError
from conf.schema.training.settings import CheckpointSettings
from trainer.distributed.checksums import CorruptionError, bit_sum
from trainer.distributed.mesh import Batch
from trainer.distributed.runtime import gather_numbers


class BatchCheck:
    """The sums of one process. All processes call every method, at the same points of the program."""

    def __init__(self, settings: CheckpointSettings, mesh: Mesh, read_again: Callable[[], Batch] | None = None) -> None:
        """Create the sums of a window that begins now. They are not compared if `verify_data` is false.

        read_again: returns the rows of the process before this one for the next update, read independently; None where
        every process has the whole batch.
        """
        self._interval, self._on, self._mesh = settings.verify_interval, settings.verify_data, mesh
        self._read_again = read_again
        self._own = self._again = self._first = 0
        self._unreadable = False

    def count(self, batch: Batch) -> None:
        """Add the rows that this process has just placed on its devices."""
        if not self._on:
            return
        self._own = (self._own + _sum(batch)) % 2**32
        if self._read_again is None or self._unreadable:
            return
        try:
            self._again = (self._again + _sum(self._read_again())) % 2**32
        except RunFileError:  # then their own process cannot read them either, and says so; if it can, the sums differ
            self._unreadable = True

    def compare_if_due(self, step: int) -> None:
        """Compare after `step` updates if the interval says so. Raises CorruptionError on all processes."""
        if self._interval and step % self._interval == 0:
            self.compare(step)

    def compare(self, step: int) -> None:
        """Compare the sums since the last comparison. Raises CorruptionError on all processes, naming the worker."""
        first, self._first = self._first, step
        if not self._on or first == step:
            return
        own, again = gather_numbers(self._mesh, np.array([self._own, self._again], np.uint32)).T.tolist()
        self._own = self._again = 0
        suspects = _odd_ones(own) if self._read_again is None else _pairs(own, again)
        if suspects:
            lines = [f"worker {' or '.join(map(str, who))}: its data differ" for who in suspects]
            raise CorruptionError([f"{line} in updates {first + 1} to {step}" for line in lines])

    def restart(self, step: int) -> None:
        """Begin a new window after `step` updates, as a run that resumes there does."""
        self._own, self._again, self._first = 0, 0, step


def reader_of(process: int) -> int:
    """Return the process that reads the rows of `process` again."""
    return (process + 1) % jax.process_count()


def read_by(process: int) -> int:
    """Return the process whose rows `process` reads again."""
    return (process - 1) % jax.process_count()


def _sum(batch: Batch) -> int:
    return sum(bit_sum(values) for values in batch.values())


def _odd_ones(sums: list[int]) -> list[tuple[int, ...]]:
    """Return who differs from the majority, or all where there is none."""
    (usual, votes), *others = Counter(sums).most_common()
    if not others:
        return []
    if others[0][1] == votes:
        return [tuple(range(len(sums)))]
    return [(worker,) for worker, value in enumerate(sums) if value != usual]


def _pairs(own: list[int], again: list[int]) -> list[tuple[int, ...]]:
    """Return for each worker whose rows were read differently who may be wrong.

    It is the worker itself or the one that read its rows again. A worker that is wrong about its own rows and about
    another's is the one: its memory of the data is at fault.
    """
    blamed: dict[int, list[tuple[int, int]]] = defaultdict(list)
    pairs = [(worker, reader_of(worker)) for worker in range(len(own)) if own[worker] != again[reader_of(worker)]]
    for pair in pairs:
        for worker in set(pair):
            blamed[worker].append(pair)
    twice = {worker: found for worker, found in blamed.items() if len(found) > 1 and len(own) > 2}
    covered = {pair for found in twice.values() for pair in found}
    rest = [tuple(sorted(set(pair))) for pair in pairs if pair not in covered]
    return [(worker,) for worker in sorted(twice)] + rest

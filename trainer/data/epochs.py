"""The order of training questions: a new permutation in each epoch, as a function of (seed, number of the rollout).

Nothing of it is saved: a resumed run, on any number of workers, continues where the number of the rollout says. A
rollout that crosses the end of an epoch asks no question twice, if there are enough: those that the old epoch ends with
are moved behind it in the new one. TRL, Tunix and Simply walk permutations too; TRL leaves out the rest of an epoch.
"""

import numpy as np

FIRST_DRAW, REDRAW = 0, 1


class EpochOrder:
    """Blocks of `count` question numbers below `size`."""

    def __init__(self, size: int, count: int, seed: tuple[int, ...]) -> None:
        self._size, self._count, self._seed = size, count, seed
        self._latest: tuple[int, np.ndarray] | None = None  # an epoch and its order

    def block(self, number: int) -> np.ndarray:
        """Return the questions of block `number`, int [count]."""
        epoch, at = divmod(number * self._count, self._size)
        found = self._order(epoch)[at : at + self._count]
        while len(found) < self._count:
            epoch += 1
            found = np.concatenate([found, self._order(epoch)[: self._count - len(found)]])
        return found

    def redraw(self, number: int, attempt: int) -> np.ndarray:
        """Return other questions in place of block `number`, int [count].

        They are chosen among all questions, whether or not the epoch has asked them. attempt: from 1; each has
        questions of its own.
        """
        draw = np.random.default_rng((*self._seed, REDRAW, number))
        unasked = draw.permutation(np.setdiff1d(np.arange(self._size), self.block(number)))
        while len(unasked) < attempt * self._count:  # too few to ask each only once
            unasked = np.concatenate([unasked, draw.permutation(self._size)])
        return unasked[(attempt - 1) * self._count : attempt * self._count]

    def _order(self, epoch: int) -> np.ndarray:
        """Return the permutation of an epoch, which depends on the one before where a block crosses its beginning."""
        if self._size % self._count == 0 or self._size < self._count:
            return self._permutation(epoch)
        if self._latest is None or self._latest[0] > epoch:
            self._latest = 0, self._permutation(0)
        while self._latest[0] < epoch:
            before, order = self._latest
            asked = (before + 1) * self._size % self._count  # of the block that crosses, in the epoch before
            tail = order[self._size - asked :]
            self._latest = before + 1, _move_back(self._permutation(before + 1), tail, self._count - asked)
        return self._latest[1]

    def _permutation(self, epoch: int) -> np.ndarray:
        return np.random.default_rng((*self._seed, FIRST_DRAW, epoch)).permutation(self._size)


def _move_back(order: np.ndarray, asked: np.ndarray, first: int) -> np.ndarray:
    """Exchange questions among the `first` of an order that were just asked for others behind them."""
    was_asked = np.isin(order, asked)
    here = np.flatnonzero(was_asked[:first])
    there = first + np.flatnonzero(~was_asked[first:])[: len(here)]
    order[here], order[there] = order[there], order[here]
    return order

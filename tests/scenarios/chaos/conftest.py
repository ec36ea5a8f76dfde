"""The stands on which schedules are tried: an emulated cloud each, shared by all tests of a process that pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import pytest

from tests.scenarios.chaos.harness import Stand


class StandOf(Protocol):
    """Lends a stand for a command."""

    def __call__(self, *words: str, keep: tuple[str, ...]) -> AbstractContextManager[Stand]: ...


@pytest.fixture(scope="session")
def stand_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandOf]:
    """The same stand for the same words, until something has gone wrong on it: what is left there is no one's basis."""
    free: dict[tuple[str, ...], Stand] = {}

    @contextmanager
    def lend(*words: str, keep: tuple[str, ...]) -> Iterator[Stand]:
        stand = free.pop(words, None) or Stand(tmp_path_factory.mktemp("stand"), words, keep)
        try:
            yield stand
        except BaseException:
            stand.close()
            raise
        free[words] = stand

    yield lend
    for stand in free.values():
        stand.close()

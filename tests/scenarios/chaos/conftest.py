"""The stands on which schedules are tried: an emulated cloud each, shared by all tests of a process that pass."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import pytest

from tests.emulators import Emulators
from tests.scenarios.chaos.harness import ChaosHarness


class ChaosHarnessFactory(Protocol):
    """Lends a stand for a command."""

    def __call__(self, *words: str, keep: tuple[str, ...]) -> AbstractContextManager[ChaosHarness]: ...


@pytest.fixture(scope="session")
def make_harness(tmp_path_factory: pytest.TempPathFactory, emulators: Emulators) -> Iterator[ChaosHarnessFactory]:
    """The same stand for the same words, until something has gone wrong on it: what is left there is no one's basis.

    The emulated clouds are forked; what runs on their workers is started as on a user's machine.
    """
    free: dict[tuple[str, ...], ChaosHarness] = {}
    run_emulator_verb = emulators.with_real_agents().run_emulator_verb

    @contextmanager
    def lend(*words: str, keep: tuple[str, ...]) -> Iterator[ChaosHarness]:
        stand = free.pop(words, None) or ChaosHarness(tmp_path_factory.mktemp("stand"), words, keep, run_emulator_verb)
        try:
            yield stand
        except BaseException:
            stand.close()
            raise
        free[words] = stand

    yield lend
    for stand in free.values():
        stand.close()

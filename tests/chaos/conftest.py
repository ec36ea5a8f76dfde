"""The stands on which schedules are tried: an emulated cloud each, shared by all tests of a process."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from controller import emulator
from tests.chaos.harness import Stand


@pytest.fixture(scope="session")
def stand_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Stand]]:
    """Makes a stand for a command, once for the same words."""
    made: dict[tuple[str, ...], Stand] = {}
    with ExitStack() as stack:

        def make(*words: str, keep: tuple[str, ...]) -> Stand:
            if words not in made:
                folder = tmp_path_factory.mktemp("stand")
                (folder / "repository").mkdir()
                shutil.copy(Path(__file__).with_name("counter.py"), folder / "repository")
                cloud = emulator.state_folder(str(folder / "home"))
                stack.callback(emulator.command, ["wipe"], cloud)
                stack.enter_context(emulator.in_use(cloud))  # so that no `up` puts it to sleep
                made[words] = Stand(folder, words, keep)
            return made[words]

        yield make

"""Emulated clouds for tests: one per test file, and fresh ones for what restarts or breaks them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from controller.localcloud import lifecycle
from tests.controller.localcloud.harness import EmulatedCloud
from tests.controller.state import internal_errors
from tests.emulators import Emulators

FAST = "--operation-seconds=0.02"


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory, emulators: Emulators) -> Iterator[EmulatedCloud]:
    """A cloud that all tests of a file share; each uses names of its own in it."""
    made = EmulatedCloud(tmp_path_factory.mktemp("cloud") / "state")
    assert emulators.start(made.state, FAST) == (0, "")
    made.establish()
    yield made
    mistakes = internal_errors(made.state)
    lifecycle.wipe(made.state)
    assert mistakes == []


@pytest.fixture
def fresh_cloud(tmp_path: Path, emulators: Emulators) -> Iterator[EmulatedCloud]:
    """A cloud of its own."""
    made = EmulatedCloud(tmp_path / "state")
    assert emulators.start(made.state, FAST) == (0, "")
    made.establish()
    yield made
    mistakes = internal_errors(made.state)
    lifecycle.wipe(made.state)
    assert mistakes == []

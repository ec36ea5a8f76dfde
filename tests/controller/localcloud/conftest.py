"""Emulated clouds for tests: one per test file, and fresh ones for what restarts or breaks them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.controller.localcloud.harness import Cloud, localcloud
from tests.controller.state import mistakes_of

FAST = "--operation-seconds=0.02"


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    """A cloud that all tests of a file share; each uses names of its own in it."""
    made = Cloud(tmp_path_factory.mktemp("cloud") / "state")
    made.start(FAST)
    yield made
    mistakes = mistakes_of(made.state)
    localcloud("wipe", made.state)
    assert mistakes == []


@pytest.fixture
def fresh_cloud(tmp_path: Path) -> Iterator[Cloud]:
    """A cloud of its own."""
    made = Cloud(tmp_path / "state")
    made.start(FAST)
    yield made
    mistakes = mistakes_of(made.state)
    localcloud("wipe", made.state)
    assert mistakes == []

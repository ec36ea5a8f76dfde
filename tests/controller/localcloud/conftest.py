"""Emulated clouds for tests: one per test file, and fresh ones for what restarts or breaks them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from controller.localcloud import lifecycle
from tests.controller.conftest import internal_errors
from tests.controller.localcloud.harness import EmulatedCloud
from tests.emulators import Emulators

FAST = "--operation-seconds=0.02"


def running(state: Path, emulators: Emulators) -> Iterator[EmulatedCloud]:
    made = EmulatedCloud(state)
    assert emulators.start(made.state, FAST) == (0, "")
    made.establish()
    yield made
    mistakes = internal_errors(made.state)
    lifecycle.wipe(made.state)
    assert mistakes == []


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory, emulators: Emulators) -> Iterator[EmulatedCloud]:
    """A cloud that all tests of a file share; each uses names of its own in it."""
    yield from running(tmp_path_factory.mktemp("cloud") / "state", emulators)


@pytest.fixture(autouse=True)
def no_faults_remain(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "cloud" in request.fixturenames:
        assert request.getfixturevalue("cloud").call_ok("DELETE", "emulator/faults") == {}


@pytest.fixture(scope="module")
def net(cloud: EmulatedCloud) -> str:
    """A network of the shared cloud."""
    cloud.create_network("net")
    return "net"


@pytest.fixture
def fresh_cloud(tmp_path: Path, emulators: Emulators) -> Iterator[EmulatedCloud]:
    """A cloud of its own."""
    yield from running(tmp_path / "state", emulators)

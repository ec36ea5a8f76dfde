"""Several controllers of a new project at once, in an emulated cloud with its own delays: they meet half-made parts."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from google.oauth2.credentials import Credentials

from controller.config.run_yaml import bucket_name
from controller.context import Context
from controller.core.errors import CloudError
from controller.core.this_process import Clock
from controller.gcp.client import GoogleClient
from controller.localcloud import lifecycle
from controller.plan.project_steps import shared_resources
from controller.reconcile import Resource, destroy, reconcile
from controller.resources import vpc
from tests.composed import config_of
from tests.controller.conftest import comparable_state, internal_errors
from tests.controller.localcloud.harness import EmulatedCloud
from tests.emulators import Emulators
from tests.fakes.context import make_context
from tests.planes import Plane

Act = Callable[[list[Resource], Context], object]
SPREAD = 6.0
"""How long after the first controller the last one starts, in operations: a lone one takes about as long."""
DELAY = 0.5
"""Of one operation in seconds, if nobody sets it."""
PAIRS = [(1, 2), (2, 1), (3, 3), (5, 2)]
"""How many at once, and the seed of their moments."""
MORE_PAIRS = [(number, seed) for number in (1, 2, 3, 4, 5) for seed in (1, 2, 3) if (number, seed) not in PAIRS]


@pytest.fixture(scope="module")
def slow_cloud(tmp_path_factory: pytest.TempPathFactory, emulators: Emulators) -> Iterator[EmulatedCloud]:
    """A cloud with the delays and limits that it has by itself."""
    made = EmulatedCloud(tmp_path_factory.mktemp("cloud") / "state")
    assert emulators.start(made.state) == (0, "")
    made.establish()
    yield made
    mistakes = internal_errors(made.state)
    lifecycle.wipe(made.state)
    assert mistakes == []


class Project:
    """The shared resources of one config in a cloud; each controller has a context of its own."""

    def __init__(self, cloud: EmulatedCloud, folder: Path, plane: Plane) -> None:
        config = config_of("cloud=local", "program=command", *plane.one)
        self.cloud, self.folder = cloud, folder
        self.resources: list[Resource] = list(shared_resources(config, bucket_name(config, "slipway-local")))

    def state(self) -> dict[str, object]:
        return comparable_state(self.cloud.call_ok("GET", "emulator/state"))

    def act(self, act: Act, after: float, errors: list[Exception]) -> None:
        endpoint, clock = self.cloud.endpoint, Clock()
        google = GoogleClient(Credentials(token=endpoint["token"]), clock, endpoint["roots"])
        context = make_context(google, self.folder, project="slipway-local", clock=clock, poll_seconds=0.05)
        time.sleep(after)
        try:
            act(self.resources, context)
        except Exception as error:
            errors.append(error)
        finally:
            context.close()

    def at_once(self, acts: list[tuple[Act, float]]) -> list[Exception]:
        """Let controllers act, each after its seconds; return their errors."""
        errors: list[Exception] = []
        threads = [threading.Thread(target=self.act, args=(act, after, errors)) for act, after in acts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return errors


@pytest.mark.parametrize(
    ("number", "seed", "delay"),
    [
        (2, 1, 0.1),
        *(pytest.param(n, s, DELAY, marks=pytest.mark.deep) for n, s in PAIRS),
        *(pytest.param(n, s, DELAY, marks=[pytest.mark.deep, pytest.mark.wide]) for n, s in MORE_PAIRS),
    ],
)
def test_all_of_them_settle_what_a_project_shares(
    slow_cloud: EmulatedCloud, tmp_path: Path, plane: Plane, number: int, seed: int, delay: float
) -> None:
    """First `up`s or sweeps of a new project; then `down --all`s of the same number."""
    project, chance = Project(slow_cloud, tmp_path, plane), random.Random(seed)
    before = project.state()
    offsets = [0.0, *(chance.uniform(0, SPREAD * delay) for _ in range(number - 1))]
    with slow_cloud.settings(operation_seconds=delay):
        assert project.at_once([(reconcile, after) for after in offsets]) == []
        told = len(slow_cloud.request_log())
        assert project.at_once([(reconcile, 0.0)]) == []
        assert [r["path"] for r in slow_cloud.request_log()[told:] if r["mutating"]] == []
        assert project.at_once([(destroy, after) for after in offsets]) == []
    assert project.state() == before


@pytest.mark.deep
@pytest.mark.parametrize(("number", "seed"), [*PAIRS, *(pytest.param(*p, marks=pytest.mark.wide) for p in MORE_PAIRS)])
def test_beside_down_all_each_ends_with_all_that_it_needs(
    slow_cloud: EmulatedCloud, tmp_path: Path, plane: Plane, number: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What somebody deletes under them they make again. Who deletes may find that others use it anew, and says so."""
    monkeypatch.setattr(vpc, "IN_USE_SECONDS", 5.0)
    project, chance = Project(slow_cloud, tmp_path, plane), random.Random(seed)
    before = project.state()
    assert project.at_once([(reconcile, 0.0)]) == []
    makers: list[tuple[Act, float]] = [(reconcile, chance.uniform(0, SPREAD * DELAY)) for _ in range(number)]
    errors = project.at_once([(destroy, 0.0), *makers])
    assert all(isinstance(error, CloudError) and "is already being used by" in str(error) for error in errors), errors
    assert len(errors) <= 1
    assert project.at_once([(reconcile, 0.0)]) == []
    assert project.at_once([(destroy, 0.0)]) == []
    assert project.state() == before

"""Seeded schedules of misfortune: whatever happens, the run ends with the same numbers, and nothing is left behind.

With `--deep` on Compute Engine and on either plane, too, with seeds that differ from commit to commit.
`pytest tests/scenarios/chaos --chaos 60:560` tries as many as one likes.
"""

from collections.abc import Sequence

import pytest

from tests.conftest import seeds
from tests.planes import EITHER, PLANES, Plane
from tests.scenarios.chaos.conftest import ChaosHarnessFactory
from tests.scenarios.chaos.counter import STEPS
from tests.scenarios.chaos.fault_schedule import ChaosScenario, Spec, fault_schedule

pytestmark = pytest.mark.e2e
COUNTER = ("program=command", "program.command=[python,counter.py]", "env.packages=image")
PATIENT = ("recovery.max_program_failures=8", "recovery.max_without_progress=8", "recovery.heartbeat_timeout_seconds=6")
JUMPING = 5
"""The clock of the controller jumps in every schedule whose seed is a multiple of this."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        either = metafunc.function is test_a_schedule_on_either_plane_ends_with_the_same_numbers
        tried = 1 if either else 2
        metafunc.parametrize("seed", seeds(metafunc.config.getoption("--chaos"), deep=tried, nightly=tried + 2))


def of_counter(seed: int, plane: Plane) -> tuple[int, tuple[Spec, ...]]:
    """How many workers a seed has, and its schedule."""
    workers = 2 if seed % 3 == 0 else 1
    objects = [f"beats/{step:02d}-" for step in range(STEPS + 1)] + ["checkpoints/2/", "checkpoints/4/done", "final/"]
    return workers, fault_schedule(
        seed, ChaosScenario(workers, objects, seconds=1.5, max_blip_seconds=3.0, plane=plane.name)
    )


def survives(
    make_harness: ChaosHarnessFactory, plane: Plane, workers: int, faults: Sequence[Spec], jump: int = 0
) -> None:
    """A run on a pod of so many workers comes to the same."""
    pod = plane.two if workers == 2 else plane.one
    with make_harness(*COUNTER, *PATIENT, *pod, keep=("/final/",)) as stand:
        undisturbed, ended = stand.run_undisturbed, stand.run(faults, jump)
        assert stand.final_results(ended) == stand.final_results(undisturbed), ended.output
        assert ended.state == undisturbed.state, ended.output


@pytest.mark.one_plane
def test_a_schedule_ends_with_the_same_numbers_and_leaves_nothing(
    seed: int, plane: Plane, make_harness: ChaosHarnessFactory
) -> None:
    survives(make_harness, plane, *of_counter(seed, plane), jump=seed * (seed % JUMPING == 0))


@pytest.mark.deep
def test_a_schedule_on_either_plane_ends_with_the_same_numbers(seed: int, make_harness: ChaosHarnessFactory) -> None:
    """With `tpu.plane=auto`: requests to both planes may be under way, and both may be granted."""
    survives(make_harness, EITHER, *of_counter(seed, EITHER), jump=seed * (seed % JUMPING == 0))


SAME_KEYS: Spec = {"new_host_keys": False}
"""A controller that has not seen a short repair refuses new host keys."""
FOUND: dict[str, tuple[int, tuple[Spec, ...]]] = {
    "maintenance between set-up and launch": (
        2,
        (
            {"kind": "cut", "match": "GET ", "at": "answer", "times": 3, "after_object": "beats/00-"},
            {"kind": "maintenance", "seconds": 1.6, "after_object": "beats/00-", "delay_seconds": 0.115, **SAME_KEYS},
        ),
    ),
    "the network goes while a pod is asked for": (
        1,
        (
            {"kind": "partition", "seconds": 2.7, "after_requests": 63, "client": "laptop"},
            {"kind": "stockout", "times": 3, "at": "request"},
        ),
    ),
    "taken away before its host keys are known": (
        1,
        (
            {"kind": "ssh_refused", "seconds": 1.5, "after_seconds": 0.0},
            {"kind": "preempted", "after_seconds": 0.1},
        ),
    ),
    "under repair when its run has finished": (
        2,
        (
            {"kind": "maintenance", "seconds": 3.0, "after_object": "final/1", **SAME_KEYS},
            {"kind": "ssh_frozen", "seconds": 0.5, "after_object": "final/0"},
        ),
    ),
    "its deletion is asked for twice": (
        1,
        ({"kind": "cut", "match": "DELETE ", "at": "answer", "times": 1, "after_requests": 22},),
    ),
}
"""Schedules under which something went wrong once."""


@pytest.mark.deep
@pytest.mark.parametrize("plane", PLANES[:1], ids=str)
@pytest.mark.parametrize("what", FOUND)
def test_what_went_wrong_once(what: str, plane: Plane, make_harness: ChaosHarnessFactory) -> None:
    survives(make_harness, plane, *FOUND[what])


def test_a_seed_means_the_same_schedule_everywhere() -> None:
    for plane, count in zip((*PLANES, EITHER), (16, 17, 19), strict=True):
        assert of_counter(7, plane) == of_counter(7, plane)
        kinds = {fault["kind"] for seed in range(200) for fault in of_counter(seed, plane)[1]}
        assert len(kinds) == count

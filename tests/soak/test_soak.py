"""Thirty lives of the soak, in which every disturbance occurs on both planes; `python -m tests.soak` lives more.

28 of them run a program that counts: seconds each. Two train with the bundled trainer, real JAX on two workers, and are
compared with an undisturbed run.
"""

import warnings
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from tests.composed import config_of
from tests.conftest import wide
from tests.emulators import Emulators
from tests.planes import PLANES
from tests.scenarios.chaos.counter import SAVE_EVERY, STEPS
from tests.soak.__main__ import live
from tests.soak.laptops import Laptop
from tests.soak.lives import LANDMARKS, draw_life
from tests.soak.strikes import STRIKES
from tests.soak.world import TRAINING as TRAINING_WORDS
from tests.soak.world import Ending

FIRST = 424
LIVES = [draw_life(seed) for seed in range(FIRST, FIRST + 30)]
COUNTING = [life.seed for life in LIVES if not life.training]
"""Every tenth is lived in each run of `.ci/run`, the others each night."""
TRAINING = [life for life in LIVES if life.training]


def test_a_seed_means_the_same_life_everywhere_and_all_befalls_both_planes() -> None:
    assert [draw_life(life.seed) for life in LIVES] == LIVES
    assert [life.plane for life in TRAINING] == [*PLANES] or [life.plane for life in TRAINING] == [*reversed(PLANES)]
    for plane in PLANES:
        met = {one.what for life in LIVES if life.plane == plane for one in life.disturbances}
        assert met == set(STRIKES), plane


def test_disturbances_wait_for_what_a_run_writes_before_its_end() -> None:
    config = config_of(*TRAINING_WORDS, "cloud=local")
    assert config.loop is not None
    every = config.checkpoint.save_interval
    saved = [f"checkpoints/{i}/commit_success" for i in range(every, config.loop.steps, every)]
    assert {*LANDMARKS[True]} <= {"", "launches/0001", "metrics.jsonl", *saved}
    begun = [f"beats/{i:02d}-" for i in range(STEPS)]
    done = [f"checkpoints/{i}/done" for i in range(SAVE_EVERY, STEPS, SAVE_EVERY)]
    assert {*LANDMARKS[False]} <= {"", "launches/0001", *begun, *done}


def test_a_strike_that_finds_nothing_says_so(tmp_path: Path) -> None:
    laptops = [Laptop(tmp_path / name, tmp_path) for name in ("one", "two")]
    (laptops[0].home / "localcloud").mkdir(parents=True)
    (laptops[0].home / "localcloud" / "state.db").touch()
    cloud, started = SimpleNamespace(state=tmp_path), list[tuple[str, ...]]()
    nothing: Any = SimpleNamespace(
        cloud=cloud, laptops=laptops, objects=list, pods=dict, alive=list, start=lambda _, *verb: started.append(verb)
    )
    found = {what for what, strike in STRIKES.items() for i in range(20) if strike and strike(nothing, Random(i))}
    assert found == {"second laptop goes on", "second laptop ends it"}, "these bring what they strike with"
    assert {*started} == {("up",), ("up", "--take-over"), ("cancel",), ("down", "--yes")}


def tell_missed(seed: int, ending: Ending) -> None:
    """Say which disturbances found nothing: whether one does depends on the load, so it is no error."""
    if missed := [what for what, did in ending.struck.items() if not did]:
        warnings.warn(f"life {seed}: nothing to strike: {', '.join(missed)}", stacklevel=2)


@pytest.mark.e2e
@pytest.mark.deep
@pytest.mark.filterwarnings("default:life .* nothing to strike")
@pytest.mark.parametrize("seed", [*COUNTING[::10], *wide(*(seed for at, seed in enumerate(COUNTING) if at % 10))])
def test_a_disturbed_run_counts_to_the_same_number(seed: int, emulators: Emulators) -> None:
    tell_missed(seed, live(draw_life(seed), emulators))


@pytest.mark.e2e
@pytest.mark.deep
@pytest.mark.wide
@pytest.mark.filterwarnings("default:life .* nothing to strike")
def test_disturbed_runs_end_with_the_weights_and_metrics_of_an_undisturbed_one(emulators: Emulators) -> None:
    undisturbed = live(replace(TRAINING[0], disturbances=()), emulators)
    for life in TRAINING:
        tell_missed(life.seed, live(life, emulators, undisturbed))

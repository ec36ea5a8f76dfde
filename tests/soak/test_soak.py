"""Thirty lives of the soak, in which every disturbance occurs on both planes; `python -m tests.soak` lives more.

28 of them run a program that counts: seconds each. Two train with the bundled trainer, real JAX on two workers, and are
compared with an undisturbed run.
"""

from dataclasses import replace

import pytest

from tests.emulators import Emulators
from tests.planes import PLANES
from tests.soak.__main__ import live
from tests.soak.lives import draw_life
from tests.soak.strikes import STRIKES

FIRST = 424
LIVES = [draw_life(seed) for seed in range(FIRST, FIRST + 30)]
TRAINING = [life for life in LIVES if life.training]


def test_a_seed_means_the_same_life_everywhere_and_all_befalls_both_planes() -> None:
    assert [draw_life(life.seed) for life in LIVES] == LIVES
    assert [life.plane for life in TRAINING] == [*PLANES] or [life.plane for life in TRAINING] == [*reversed(PLANES)]
    for plane in PLANES:
        met = {one.what for life in LIVES if life.plane == plane for one in life.disturbances}
        assert met == set(STRIKES), plane


@pytest.mark.e2e
@pytest.mark.deep
@pytest.mark.parametrize("seed", [life.seed for life in LIVES if not life.training])
def test_a_disturbed_run_counts_to_the_same_number(seed: int, emulators: Emulators) -> None:
    live(draw_life(seed), emulators)


@pytest.mark.e2e
@pytest.mark.deep
def test_disturbed_runs_end_with_the_weights_and_metrics_of_an_undisturbed_one(emulators: Emulators) -> None:
    undisturbed = live(replace(TRAINING[0], disturbances=()), emulators)
    for life in TRAINING:
        live(life, emulators, undisturbed)

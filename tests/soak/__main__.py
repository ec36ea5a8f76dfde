"""`python -m tests.soak [LIVES] [--first SEED] [--plane NAME] [--seed SEED]`: lives of runs, disturbed at random.

A line per life and a table at the end; the exit code is 1 if an invariant broke, and `--seed` repeats that life alone.

A life is a run on an emulated cloud of its own, from nothing to `down --all`: controllers, agents, supervisors,
watchdogs and dead man's switches are the real ones, in processes that are killed and stopped. The controllers' pauses
are short and the limits of abandoned pods are moved, so that nobody waits an hour. In most lives the program counts, in
lock step and with checkpoints; one in fifteen trains a language model with the bundled trainer on two workers.
"""

import argparse
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tests.emulators import Emulators
from tests.planes import PLANES
from tests.soak.lives import Life, draw_life
from tests.soak.strikes import STRIKES
from tests.soak.world import BrokenInvariantError, Ending, World


def live(life: Life, emulators: Emulators, undisturbed: Ending | None = None) -> Ending:
    """Live it in a folder of its own. Raises BrokenInvariantError."""
    with tempfile.TemporaryDirectory(prefix="slipway-soak-", ignore_cleanup_errors=True) as folder:
        world = World(Path(folder), life, emulators.run_emulator_verb)
        try:
            return world.live(undisturbed)
        finally:
            world.close()


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description="Lives of runs, disturbed at random.")
    parser.add_argument("lives", type=int, nargs="?", default=300, help="how many lives (300)")
    parser.add_argument("--first", type=int, default=0, help="seed of the first one (0)")
    parser.add_argument("--seed", type=int, help="only the life of this seed, and what it said")
    parser.add_argument("--plane", choices=[plane.name for plane in PLANES], help="pods of this plane only")
    parser.add_argument("--program", choices=["counter", "trainer"], help="in all lives; by default as the seed says")
    given = parser.parse_args(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # nothing of a life outlives this
    planes = [plane for plane in PLANES if given.plane in (None, plane.name)]
    every = len(PLANES) // len(planes)
    seeds = [s for s in range(given.first, given.first + given.lives * every) if draw_life(s).plane in planes]
    seeds = seeds if given.seed is None else [given.seed]
    training = None if given.program is None else given.program == "trainer"
    broken: dict[int, str] = {}
    struck: Counter[tuple[str, str]] = Counter()
    with Emulators() as emulators:
        undisturbed: Ending | None = None
        for seed in seeds:
            life = draw_life(seed, training=training)
            if life.training and undisturbed is None:
                undisturbed = live(replace(life, disturbances=()), emulators)
            began = time.monotonic()
            try:
                ending = live(life, emulators, undisturbed)
            except BrokenInvariantError as error:
                broken[seed] = str(error)
                print(
                    f"{seed:5} {life.plane!s:14} BROKEN  {'; '.join(map(str, life.disturbances))}\n{error}", flush=True
                )
                continue
            struck.update((what, life.plane.name) for what, did in ending.struck.items() if did)
            program = "trainer" if life.training else "counter"
            did = "; ".join(f"{what}: {did or 'nothing to strike'}" for what, did in ending.struck.items())
            taken = time.monotonic() - began
            print(
                f"{seed:5} {life.plane!s:14} {program} {life.workers}  {taken:5.1f} s  ups {ending.ups}  {did}",
                flush=True,
            )
    print(f"\n{'disturbance':24}{''.join(f'{plane.name:>16}' for plane in planes)}")
    for what in STRIKES:
        print(f"{what:24}{''.join(f'{struck[what, plane.name]:>16}' for plane in planes)}")
    print(f"{len(seeds)} lives, {len(broken)} broken")
    same = f" --program {given.program}" if given.program else ""
    for seed in broken:
        print(f"python -m tests.soak --seed {seed}{same}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

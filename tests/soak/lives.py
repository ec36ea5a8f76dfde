"""Lives of a run, drawn from seeds: the same seed means the same plane, program and disturbances everywhere."""

import random
from dataclasses import dataclass

from tests.planes import PLANES, Plane
from tests.soak.strikes import STRIKES

TRAINING_EVERY = 15
"""One life in so many trains with the bundled trainer; in the others a program counts, with checkpoints."""
COUNTS = (1, 2, 2, 2, 3)
"""How many disturbances a life has."""
LANDMARKS = {
    False: ("", "launches/0001", "beats/01-", "beats/03-", "checkpoints/2/done", "checkpoints/4/done"),
    True: ("", "launches/0001", "checkpoints/2/commit_success", "checkpoints/4/commit_success", "metrics.jsonl"),
}
"""Parts of the names of objects after which something may strike, by whether the life trains; "": at any time."""


@dataclass(frozen=True)
class Disturbance:
    """What strikes, so many seconds after there is an object whose name contains `after`."""

    what: str
    after: str
    delay: float
    seed: int

    def __str__(self) -> str:
        return f"{self.what} {self.delay:.1f} s after {self.after or 'the begin'}"


@dataclass(frozen=True)
class Life:
    """A run on a pod of one plane, from nothing to its end, and what disturbs it."""

    seed: int
    plane: Plane
    workers: int
    training: bool
    disturbances: tuple[Disturbance, ...]

    @property
    def operation_seconds(self) -> float:
        """The emulated cloud's own delays and limits where two controllers compete for leases, otherwise none."""
        return 0.5 if any("laptop" in one.what for one in self.disturbances) else 0.0


def draw_life(seed: int, *, training: bool | None = None) -> Life:
    """Return the life of a seed. Even and odd seeds are of one plane each, and are dealt all disturbances in turn.

    `training`: whether it trains; None: as its seed says.
    """
    draw, plane = random.Random(f"slipway soak {seed}"), PLANES[seed % len(PLANES)]
    trains = seed % TRAINING_EVERY == TRAINING_EVERY // 2 if training is None else training
    deck, place = list(STRIKES), 2 * (seed // len(PLANES))
    whats = [deck[(place + i) % len(deck)] for i in range(2)] + [draw.choice(deck)]
    disturbances = [
        Disturbance(
            what,
            draw.choice(LANDMARKS[trains]),
            round(draw.uniform(0, 2.0 if trains else 0.8), 2),
            draw.randrange(1 << 30),
        )
        for what in whats[: draw.choice(COUNTS)]
    ]
    return Life(seed, plane, 2 if trains or seed % 3 == 0 else 1, trains, tuple(disturbances))

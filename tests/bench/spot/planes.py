"""Days on a simulated market of 3 zones, 4 tiers and both planes; for docs/capacity.md.

    python -m tests.bench.spot.planes [--seeds 100] [--hours 24]

Slipway's own `up` searches, recovers and accounts, with and without the second plane and the memory of capacity; beside
it, the most that the same days allow to somebody who knows them beforehand.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from unittest import mock

from conf.schema.infra.topology import find_topology
from controller.core.events import Event
from controller.resources.pod import capacity_log, planes, search
from tests.bench.spot.clairvoyant import best_day
from tests.bench.spot.day import SLIPWAY, Day, spend
from tests.bench.spot.market import Simulated
from tests.bench.spot.places import TIERS, Key, Places, PlacesMarket, SimulatedPlane, draw_places

TYPE = "v6e-16"
ZONES = ("us-central1-a", "us-east1-d", "us-east5-b")
PLANES = tuple(planes.PLANES)
WORDS = (
    "cloud=gcp", "cloud.project=a-project", "cloud.bucket_location=us", "tpu=v6e_8", f"tpu.accelerator_type={TYPE}",
    f"tpu.zone={ZONES[0]}", f"tpu.fallback_zones=[{','.join(ZONES[1:])}]", f"tpu.capacity=[{','.join(TIERS)}]",
    "tpu.reservation=ours", "budget.max_hours=160", "program=command", "program.command=[train]",
    "recovery.max_preemptions=1000", "recovery.max_create_attempts=100000",
)  # fmt: skip
RUN_SECONDS = 2 * 3600.0
"""Work of a run. The next one begins when it has finished, and with it its pod has been deleted."""
RESAMPLES = 2000


@dataclass(frozen=True)
class Way:
    """How Slipway looks for pods: on which plane, whether it remembers what was granted, and how long a place may wait.

    30 minutes is the default of tpu.create_timeout_minutes. `in_turns`: one plane at a time, as with a data disk.
    """

    plane: str
    remembers: bool
    minutes: int = 30
    in_turns: bool = False


WAYS = {
    "both planes, memory": Way("auto", True),
    "both planes, no memory": Way("auto", False),
    "both planes in turns, memory": Way("auto", True, in_turns=True),
    "both planes, memory, `tpu.create_timeout_minutes=3`": Way("auto", True, 3),
    "TPU API only, memory": Way("tpu_api", True),
    "TPU API only, no memory": Way("tpu_api", False),
    "Compute Engine only, memory": Way("compute_engine", True),
}


def on_slipway(market: PlacesMarket, way: Way, tell: Callable[[Event], None] = lambda _: None) -> Day:
    """The day as Slipway spends it."""
    google = Places(market, Simulated(market.seconds), SLIPWAY.create, SLIPWAY.delete)
    simulated = {name: SimulatedPlane(name, plane, google) for name, plane in planes.PLANES.items()}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(planes, "PLANES", simulated))
        if way.in_turns:
            stack.enter_context(mock.patch.object(search.CapacitySearch, "_takes_turns", True))
        if not way.remembers:
            stack.enter_context(mock.patch.object(capacity_log, "append_lines"))
        words = (*WORDS, f"tpu.plane={way.plane}", f"tpu.create_timeout_minutes={way.minutes}")
        day = spend(google, words, SLIPWAY, tell, RUN_SECONDS)
    return replace(day, pods=len([pod for pod in google.pods if pod.paid(market.seconds)]))


def clairvoyantly(market: PlacesMarket) -> Day:
    """The best day that there is."""
    useful, usd = best_day(market, SLIPWAY, usd_per_second)
    return Day(useful=useful, usd=usd, ended=market.seconds)


def usd_per_second(key: Key) -> float:
    return (find_topology(TYPE).usd_per_hour(key[1], spot=key[2] == "spot") or 0.0) / 3600


def interval(values: Sequence[float]) -> str:
    """Return the mean with its 95% interval, by the bootstrap."""
    draw = random.Random(0)
    means = sorted(statistics.fmean(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))
    low, high = means[round(0.025 * RESAMPLES)], means[round(0.975 * RESAMPLES) - 1]
    return f"{statistics.fmean(values):.1f} ({low:.1f}, {high:.1f})"


def row(name: str, days: Sequence[Day]) -> str:
    cells = [
        interval([100 * day.useful / day.ended for day in days]),
        interval([100 * day.goodput for day in days]) if all(day.paid for day in days) else "–",
        interval([day.usd or 0.0 for day in days]),
        f"{sum(day.usd or 0.0 for day in days) / sum(day.useful / 3600 for day in days):.2f}",
        f"{statistics.fmean(day.pods for day in days):.1f}" if any(day.pods for day in days) else "–",
    ]
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--hours", type=float, default=24)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    markets = [draw_places(seed, options.hours, PLANES, ZONES) for seed in range(options.seeds)]
    shared = [draw_places(seed, options.hours, PLANES, ZONES, shared=True) for seed in range(options.seeds)]
    alone = [PlacesMarket(m.seconds, {k: p for k, p in m.places.items() if k[0] == PLANES[0]}) for m in markets]
    both = WAYS["both planes, memory"]
    rows: dict[str, tuple[Callable[[PlacesMarket], Day], list[PlacesMarket]]] = {
        **{name: (partial(on_slipway, way=way), markets) for name, way in WAYS.items()},
        "both planes, memory; capacity at the same times on both": (partial(on_slipway, way=both), shared),
        "TPU API only, memory; on those days": (partial(on_slipway, way=WAYS["TPU API only, memory"]), shared),
        "clairvoyant, both planes": (clairvoyantly, markets),
        "clairvoyant, TPU API only": (clairvoyantly, alone),
    }
    print(f"mean (95% interval) of {options.seeds} days of {options.hours:g} h\n")
    print("| | useful share of the day, % | useful share of the paid time, % | USD | USD per useful hour | pods |")
    print("| --- | --- | --- | --- | --- | --- |")
    with ProcessPoolExecutor(options.processes) as pool:
        for name, (spend_day, days) in rows.items():
            print(row(name, list(pool.map(spend_day, days))), flush=True)


if __name__ == "__main__":
    main()

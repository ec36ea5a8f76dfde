"""A day on a simulated spot market: what share of the paid time goes into steps that count; for docs/performance.md.

python -m tests.bench.spot [--seeds 9] [--hours 24] [--minutes-between 40] [--longest-drought 3]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace

from tests.bench.spot.day import GUIDE, SLIPWAY, Day, in_a_loop, on_slipway
from tests.bench.spot.market import Market, draw_market


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=9)
    parser.add_argument("--hours", type=float, default=24)
    parser.add_argument("--minutes-between", type=float, default=40)
    parser.add_argument("--longest-drought", type=float, default=3)
    parser.add_argument("--drought-chance", type=float, default=0.1)
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    given = (options.hours, options.minutes_between, options.longest_drought, options.drought_chance)
    markets = [draw_market(seed, *given) for seed in range(options.seeds)]
    tell = (
        (lambda event: print(f"{event.kind:12} {event.subject} {event.message}")) if options.verbose else lambda _: None
    )
    ways: dict[str, Callable[[Market], Day]] = {
        "`slipway up`": lambda market: on_slipway(market, SLIPWAY, tell),
        "the guide's loop, as written (10 attempts)": lambda market: in_a_loop(market, GUIDE, 10),
        "the same without a limit": lambda market: in_a_loop(market, GUIDE, float("inf")),
        "the same, set up as fast as Slipway": lambda market: in_a_loop(
            market, replace(SLIPWAY, notices=GUIDE.notices), float("inf")
        ),
        "`slipway up`, set up as slowly as the guide": lambda market: on_slipway(market, GUIDE, tell),
    }
    print(f"median (lowest, highest) of {options.seeds} days of {options.hours:g} h\n")
    print("| | goodput: useful / paid | useful hours | paid hours | pods | USD | lasted |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, way in ways.items():
        print(row(name, [way(market) for market in markets]))


def row(name: str, days: list[Day]) -> str:
    goodput = [100 * day.goodput for day in days]
    usd = [day.usd for day in days if day.usd is not None]
    cells = [
        f"{statistics.median(goodput):.1f}% ({min(goodput):.1f}, {max(goodput):.1f})",
        *(f"{statistics.median(getattr(day, key) / 3600 for day in days):.1f}" for key in ("useful", "paid")),
        f"{statistics.median(day.pods for day in days):g}",
        f"{statistics.median(usd):.2f}" if usd else "–",
        f"{statistics.median(day.ended / 3600 for day in days):.1f} h",
    ]
    return f"| {name} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()

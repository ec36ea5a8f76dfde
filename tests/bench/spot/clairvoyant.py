"""The most that a day of a market allows to one pod at a time, for somebody who knows the whole day beforehand."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from tests.bench.spot.day import Costs
from tests.bench.spot.places import Key, PlacesMarket

JUST_BEFORE = 1e-3
"""By how much a pod is left before the capacity elsewhere ends, in seconds."""


def best_day(market: PlacesMarket, costs: Costs, usd_per_second: Callable[[Key], float]) -> tuple[float, float]:
    """Return the useful seconds of the best day, and its cost; of equally useful days that of the cheapest found.

    A pod takes as long to be created, set up and started as Slipway's; nothing of what it computed is lost. To leave a
    pod before it is lost is worth while only for a place whose capacity would end first, and then as late as possible.

    Args:
        market: the day.
        costs: what things take.
        usd_per_second: the price of a place.
    """
    staying = [place for place in market.places.values() if not place.is_spot]
    ends = sorted({end - JUST_BEFORE for place in staying for _, end in place.spans})
    price = {key: usd_per_second(key) for key in market.places}
    overhead = costs.create + costs.setup + costs.start

    @cache
    def from_(time: float) -> tuple[float, float]:
        """Return useful seconds, and minus the cost, of the best rest of the day without a pod."""
        best = (0.0, 0.0)
        for key, place in market.places.items():
            begin = place.room_from(time)
            if begin >= market.seconds:
                continue
            end = min(place.loss_after(begin), market.seconds)
            for leave in (end, *(one for one in ends if begin + overhead < one < end)):
                useful, cost = from_(leave) if leave > time else (0.0, 0.0)
                found = (
                    useful + max(0.0, leave - begin - overhead),
                    cost - max(0.0, leave - begin - costs.create) * price[key],
                )
                best = max(best, found)
        return best

    useful, cost = from_(0.0)
    return useful, -cost

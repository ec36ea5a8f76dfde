"""A day on a simulated spot market, driven by the real `up`: most of what is paid for goes into steps that count."""

from __future__ import annotations

import statistics

import pytest

from controller.core.events import Event
from tests.bench.spot.day import GUIDE, SLIPWAY, in_a_loop, on_slipway
from tests.bench.spot.market import draw_market
from tests.bench.spot.places import NEVER, PlaceMarket, PlacesMarket, draw_places
from tests.bench.spot.planes import PLANES, ZONES, Way, clairvoyantly, interval
from tests.bench.spot.planes import on_slipway as on_planes

MARKETS = [draw_market(seed, 24, 40, 3, 0.1) for seed in range(3)]


def test_nine_tenths_of_the_paid_time_are_steps_that_count() -> None:
    days = [on_slipway(market, SLIPWAY) for market in MARKETS]
    assert days[0] == on_slipway(draw_market(0, 24, 40, 3, 0.1), SLIPWAY), "a day is the same for the same seed"
    assert [day.ended for day in days] == [24 * 3600] * 3
    assert statistics.median(day.goodput for day in days) >= 0.9
    loop = [in_a_loop(market, GUIDE, 10) for market in MARKETS]
    assert all(ours.useful > theirs.useful for ours, theirs in zip(days, loop, strict=True))


def test_every_loss_of_a_pod_is_a_preemption_and_a_drought_is_waited_out() -> None:
    said: list[Event] = []
    day = on_slipway(MARKETS[1], SLIPWAY, said.append)
    replaced = [
        e for e in said if e.kind == "note" and e.message.startswith("preempted: the node is preempted; replac")
    ]
    assert len(replaced) == day.pods - 1
    assert MARKETS[1].droughts
    assert any("waiting for resources" in e.message for e in said)


def test_nobody_does_better_on_many_places_than_who_knows_the_day() -> None:
    market = draw_places(1, 24, PLANES, ZONES)
    assert market == draw_places(1, 24, PLANES, ZONES)
    best = clairvoyantly(market)
    for plane in PLANES:
        day = on_planes(market, Way(plane, remembers=True))
        assert 0 < day.useful <= day.paid
        assert day.useful < best.useful <= 24 * 3600
        assert day.usd


def test_requests_side_by_side_find_more_capacity_than_requests_in_turns() -> None:
    market = draw_places(2, 8, PLANES, ZONES)
    together, turns = (on_planes(market, Way("auto", True, in_turns=turns)) for turns in (False, True))
    assert together.useful > turns.useful
    assert together.useful < together.paid  # which counts what was given back


def test_who_knows_the_day_leaves_a_pod_for_one_that_stays() -> None:
    hour = 3600.0
    overhead = SLIPWAY.create + SLIPWAY.setup + SLIPWAY.start
    spot = PlaceMarket(True, ((0.0, 10 * hour),), ())
    stays = PlaceMarket(False, ((2 * hour, 3 * hour),), (20 * hour,))
    assert (stays.room_from(0), stays.room_from(3 * hour), stays.loss_after(2 * hour)) == (2 * hour, NEVER, 20 * hour)
    assert spot.loss_after(hour) == 10 * hour
    places = {(PLANES[0], ZONES[0], "spot"): spot, (PLANES[1], ZONES[1], "on_demand"): stays}
    day = clairvoyantly(PlacesMarket(24 * hour, places))
    assert day.useful == pytest.approx(20 * hour - 2 * overhead, abs=0.1)
    assert interval([2.0, 2.0]) == "2.0 (2.0, 2.0)"

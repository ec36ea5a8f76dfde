"""A day on a simulated spot market, driven by the real `up`: most of what is paid for goes into steps that count."""

from __future__ import annotations

import statistics

from controller.core.events import Event
from tests.bench.market import draw_market
from tests.bench.spot import GUIDE, SLIPWAY, in_a_loop, on_slipway

MARKETS = [draw_market(seed, 24, 40, 3, 0.1) for seed in range(3)]


def test_nine_tenths_of_the_paid_time_are_steps_that_count() -> None:
    days = [on_slipway(market, SLIPWAY) for market in MARKETS]
    assert [day.ended for day in days] == [24 * 3600] * 3
    assert statistics.median(day.goodput for day in days) >= 0.9
    loop = [in_a_loop(market, GUIDE, 10) for market in MARKETS]
    assert all(ours.useful > theirs.useful for ours, theirs in zip(days, loop, strict=True))


def test_a_day_is_the_same_for_the_same_seed() -> None:
    assert on_slipway(MARKETS[0], SLIPWAY) == on_slipway(MARKETS[0], SLIPWAY)


def test_every_loss_of_a_pod_is_a_preemption_and_a_drought_is_waited_out() -> None:
    said: list[Event] = []
    day = on_slipway(MARKETS[1], SLIPWAY, said.append)
    replaced = [
        e for e in said if e.kind == "note" and e.message.startswith("preempted: the node is preempted; replac")
    ]
    assert len(replaced) == day.pods - 1
    assert MARKETS[1].droughts
    assert any("waiting for resources" in e.message for e in said)

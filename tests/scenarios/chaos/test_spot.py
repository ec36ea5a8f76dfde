"""A day on a simulated spot market, driven by the real `up`: most of what is paid for goes into steps that count."""

from __future__ import annotations

import statistics

from controller.core.events import Event
from tests.bench.spot.day import SLIPWAY, on_slipway
from tests.bench.spot.market import draw_market

MARKETS = [draw_market(seed, 24, 40, 3, 0.1) for seed in range(3)]


def test_nine_tenths_of_the_paid_time_are_steps_that_count() -> None:
    days = [on_slipway(market, SLIPWAY) for market in MARKETS]
    assert days[0] == on_slipway(draw_market(0, 24, 40, 3, 0.1), SLIPWAY), "a day is the same for the same seed"
    assert [day.ended for day in days] == [24 * 3600] * 3
    assert statistics.median(day.goodput for day in days) >= 0.9


def test_every_loss_of_a_pod_is_a_preemption_and_a_drought_is_waited_out() -> None:
    said: list[Event] = []
    day = on_slipway(MARKETS[1], SLIPWAY, said.append)
    replaced = [
        e for e in said if e.kind == "note" and e.message.startswith("preempted: the node is preempted; replac")
    ]
    assert len(replaced) == day.pods - 1
    assert MARKETS[1].droughts
    assert any("waiting for resources" in e.message for e in said)

"""The minutes and dollars of docs/grpo-on-a-pod.md are what `slipway plan` says."""

import re

from controller.gcp.prices import hourly_price
from controller.run.estimate import TIMED_PARTS, RunEstimate, estimate_run
from tests.composed import config_of
from tests.paths import ROOT

PAGE = (ROOT / "docs" / "grpo-on-a-pod.md").read_text()
ROWS = re.findall(r"^\| (v\w+-\d+) \| ([\w-]+) \| (.+) \| (.+) \| (\d+) \|$", PAGE, re.MULTILINE)
NOW = 1.79e9
"""A day of 2026."""


def estimate(*words: str) -> RunEstimate:
    config = config_of("cloud.project=lab-tpu-7", *words)
    found = estimate_run(config, hourly_price(config, NOW))
    assert found is not None
    return found


def interval(value: float, part: float, spread: tuple[float, float]) -> str:
    """Return a value and its ends, of which a part grows with the time."""
    low, high = (value + (times - 1) * part for times in spread)
    return f"{value:.0f} ({low:.0f} to {high:.0f})"


def test_minutes_and_dollars_are_those_of_plan() -> None:
    assert [row[0] for row in ROWS] == ["v4-32", "v5litepod-16", "v6e-16"]
    for accelerator, zone, minutes, spot, trc in ROWS:
        where = (f"tpu.accelerator_type={accelerator}", f"tpu.zone={zone}")
        found = estimate("+experiment=gemma2b_gsm8k", *where)
        assert found.usd is not None
        assert found.spread is not None
        timed = sum(usd for what, usd in found.parts if what in TIMED_PARTS)
        assert minutes == interval(60 * found.hours, 60 * found.hours, found.spread)
        assert spot == interval(found.usd, timed, found.spread)
        free = estimate("+experiment=gemma2b_gsm8k", *where, f"cloud.trc={{zones: [{zone}], free_until: 2030-12-31}}")
        assert free.usd is not None
        assert trc == f"{free.usd:.0f}"


def test_the_fast_run_takes_as_long_as_the_page_says() -> None:
    fast = ["+experiment=gemma2b_gsm8k_fast", "loop.steps=400"]
    hours = [estimate(*fast, f"tpu.accelerator_type={row[0]}", f"tpu.zone={row[1]}").hours for row in ROWS]
    assert f"in {60 * min(hours):.0f} to {60 * max(hours):.0f} minutes" in " ".join(PAGE.split())

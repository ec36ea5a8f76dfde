"""Hours and dollars of a run on a slice, before anything is rented.

`step_time` says what each program takes at the chip's rates. A factor per generation makes it what chips take: the
geometric mean of published over computed time, over MaxText's step times marked `calibrate` in
`tests/bench/forecast/rows.yaml`. The interval is the range of published over forecast time on the rows marked `judge`.
"""

from dataclasses import dataclass
from typing import Any

from conf.schema.infra.topology import Topology
from conf.schema.training.loop import GrpoLoop, LmLoop
from conf.schema.training.run_yaml import RunFile

FACTORS = {"v5e": 1.086, "v6e": 1.507, "v5p": 1.012, "v4": 1.281}
INTERVAL = (0.75, 1.06)
"""Actual over forecast time, of the judged rows."""
MIN_UPDATE_SECONDS = 0.02
"""Shorter updates have no forecast: starting instructions and feeding data take milliseconds and are not computed."""


@dataclass(frozen=True)
class Forecast:
    """What the run takes on a slice, without setup and preemptions; the price is a list price, None if unknown."""

    slice_: Topology
    update_seconds: float
    eval_seconds: float
    tokens_per_second: float
    hours: float
    zone: str | None
    usd_per_hour: float | None

    @property
    def usd(self) -> float | None:
        return None if self.usd_per_hour is None else self.hours * self.usd_per_hour

    def to_json(self) -> dict[str, Any]:
        """Return `forecast` of `slipway fit --json`."""
        seconds = {"update_seconds": self.update_seconds, "eval_seconds": self.eval_seconds}
        price = {"zone": self.zone, "usd_per_hour": self.usd_per_hour, "usd": self.usd}
        interval = {"low": INTERVAL[0], "high": INTERVAL[1]}
        return seconds | {"tokens_per_second": self.tokens_per_second, "hours": self.hours} | interval | price


def predict(experiment: RunFile, slice_: Topology, seconds: dict[str, float], zone: str | None, spot: bool) -> Forecast:
    """Predict a run of the lm loop from the computed seconds of its programs; `zone` is preferred to cheaper ones."""
    loop = experiment.loop
    assert isinstance(loop, LmLoop)
    factor = FACTORS[slice_.generation]
    update, evaluation = factor * seconds["update"], factor * seconds.get("eval", 0.0)
    total = loop.steps * update + -(-loop.steps // loop.eval_interval) * loop.eval_batches * evaluation
    where, price = find_price(slice_, zone, spot=spot)
    return Forecast(slice_, update, evaluation, loop.total_batch_tokens / update, total / 3600, where, price)


def why_none(experiment: RunFile, slice_: Topology) -> str:
    """Return why a run has no forecast; empty if it has one."""
    if isinstance(experiment.loop, GrpoLoop):
        return "no forecast: how long answers of loop=grpo get is not known before the run"
    if not isinstance(experiment.loop, LmLoop):
        return f"no forecast: only loop=lm has published step times to calibrate on, not {experiment.loop.kind}"
    if slice_.generation not in FACTORS:
        known = ", ".join(FACTORS)
        return f"no forecast: no published step time of {slice_.generation} to calibrate on; calibrated: {known}"
    return ""


def find_price(slice_: Topology, zone: str | None, *, spot: bool) -> tuple[str | None, float | None]:
    """Return a zone and the slice's list price per hour there: the given zone's, or the lowest; None if unknown."""
    prices = {z: slice_.usd_per_hour(z, spot=spot) for z in slice_.usd_per_chip_hour}
    known = {z: price for z, price in prices.items() if price is not None}
    if not known:
        return None, None
    where = zone if zone in known else min(known, key=lambda z: known[z])
    return where, known[where]

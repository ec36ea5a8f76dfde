"""The same run on several slices: what fits, how long it takes, what it costs."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from conf.formats import RunFileError
from conf.schema.topology import Topology, find_topology
from conf.schema.training.loop import GrpoLoop, LmLoop
from conf.schema.training.run_yaml import RunFile
from trainer.fit.memory import CompilerError, MemoryReport

FACTORS = {"v5e": 1.056, "v6e": 1.466, "v5p": 0.983, "v4": 1.27}
"""What makes `step_time`, at the chip's rates, what chips take: the geometric mean of published over computed time, of
MaxText's step times marked `calibrate` in `tests/bench/forecast/rows.yaml`."""
INTERVAL = (0.76, 1.09)
"""Range of actual over forecast time, of the rows marked `judge`."""
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
    if getattr(experiment.model, "experts", None) is not None:
        return "no forecast: no published step time of a model with experts to calibrate on"
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


MeasureFn = Callable[[RunFile], tuple[RunFile, list[MemoryReport]]]
"""Compiles all programs of a run; returns it with the remat policy that was chosen, and the verdicts."""
SORT_KEYS = ("usd", "hours")


@dataclass(frozen=True)
class SliceReport:
    """One slice's row; `why` says why there is no forecast."""

    slice_: Topology
    verdicts: list[MemoryReport]
    forecast: Forecast | None
    why: str = ""

    @property
    def fits(self) -> bool:
        return bool(self.verdicts) and all(v.fits for v in self.verdicts)

    def to_json(self) -> dict[str, Any]:
        """Return an entry of `slices` in `slipway fit --json`."""
        programs = [v.to_json() for v in self.verdicts]
        known = {"accelerator_type": self.slice_.accelerator_type, "fits": self.fits, "why": self.why}
        return known | {"programs": programs, "forecast": self.forecast and self.forecast.to_json()}


def compare(
    experiment: RunFile, names: Iterable[str], measure: MeasureFn, zone: str | None, *, spot: bool
) -> list[SliceReport]:
    """Report the run on each slice. Raises UnknownTypeError before anything is compiled."""
    slices = [find_topology(name) for name in names]
    return [_report(experiment, slice_, measure, zone, spot=spot) for slice_ in slices]


def sort_key(by: str) -> Callable[[SliceReport], tuple[bool, bool, float]]:
    """Return the order of rows: what fits first, then known prices or times, then the lowest."""

    def key(row: SliceReport) -> tuple[bool, bool, float]:
        value = row.forecast and (row.forecast.usd if by == "usd" else row.forecast.hours)
        return not row.fits, value is None, value or 0.0

    return key


def on_slice(experiment: RunFile, slice_: Topology) -> RunFile:
    """Return the run on another slice; an axis of the mesh that is -1 takes the devices that the others leave."""
    pod = {
        "accelerator_type": slice_.accelerator_type,
        "workers": slice_.workers,
        "devices": slice_.devices,
        "hbm_bytes_per_chip": slice_.hbm_bytes_per_chip,
        "bf16_flops_per_chip": slice_.bf16_flops_per_chip,
    }
    return experiment.model_copy(update={"pod": experiment.pod.model_copy(update=pod)})


def report(
    experiment: RunFile, slice_: Topology, verdicts: list[MemoryReport], zone: str | None, *, spot: bool
) -> SliceReport:
    """Return the row of a slice whose programs were compiled."""
    seconds = {v.name: v.seconds for v in verdicts}
    why = why_none(experiment, slice_)
    if short := [v for v in verdicts if not v.fits]:
        worst = max(short, key=lambda v: v.peak_gib)
        why = f"does not fit: {worst.name} needs {worst.peak_gib:.2f} of {worst.hbm_gib:.2f} GiB per device"
    elif not why and not seconds.get("update"):
        why = "no forecast: the update was not compiled, or this version of JAX cannot read its schedule"
    elif not why and seconds["update"] < MIN_UPDATE_SECONDS:
        computed = f"{1000 * seconds['update']:.2g} ms"
        why = f"no forecast: the chip computes an update in {computed}; what is around it takes longer"
    if why:
        return SliceReport(slice_, verdicts, None, why)
    return SliceReport(slice_, verdicts, predict(experiment, slice_, seconds, zone, spot=spot))


def _report(experiment: RunFile, slice_: Topology, measure: MeasureFn, zone: str | None, *, spot: bool) -> SliceReport:
    try:
        chosen, verdicts = measure(on_slice(experiment, slice_))
    except (RunFileError, CompilerError) as error:
        return SliceReport(slice_, [], None, str(error))
    return report(chosen, slice_, verdicts, zone, spot=spot)


def table(rows: list[SliceReport]) -> list[str]:
    """Return the table, with the interval below it."""
    head = f"{'slice':<16}{'fits':<6}{'s/step':>9}{'tokens/s':>13}{'hours':>10}{'USD':>12}  {'USD per hour':<14}"
    lines = [head.rstrip(), *(_line(row) for row in rows)]
    if any(row.forecast for row in rows):
        low, high = INTERVAL
        lines.append(
            f"a forecast: published runs took {low:.2f} to {high:.2f} times as long; setup, checkpoints and "
            "preemptions are not counted; list prices"
        )
    return lines


def _line(row: SliceReport) -> str:
    name, found = f"{row.slice_.accelerator_type:<16}", row.forecast
    if found is None:
        return f"{name}{'yes' if row.fits else 'NO' if row.verdicts else '-':<6}{row.why}"
    usd = "unknown" if found.usd is None else f"{found.usd:,.2f}"
    price = "no list price" if found.usd_per_hour is None else f"{found.usd_per_hour:.2f} in {found.zone}"
    return (
        f"{name}{'yes':<6}{found.update_seconds:>9.3g}{found.tokens_per_second:>13,.0f}{found.hours:>10,.1f}{usd:>12}"
        f"  {price}"
    )

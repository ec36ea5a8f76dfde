"""The same run on several slices: what fits, how long it takes, what it costs."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from conf.schema.infra.topology import Topology, find_topology
from conf.schema.training.run_yaml import RunFile, RunFileError
from trainer.fit import forecast
from trainer.fit.memory import MemoryReport
from trainer.fit.topologies import CompilerError

MeasureFn = Callable[[RunFile], tuple[RunFile, list[MemoryReport]]]
"""Compiles all programs of a run; returns it with the remat policy that was chosen, and the verdicts."""
SORT_KEYS = ("usd", "hours")


@dataclass(frozen=True)
class SliceReport:
    """One slice's row; `why` says why there is no forecast."""

    slice_: Topology
    verdicts: list[MemoryReport]
    forecast: forecast.Forecast | None
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
    why = forecast.why_none(experiment, slice_)
    if short := [v for v in verdicts if not v.fits]:
        worst = max(short, key=lambda v: v.peak_gib)
        why = f"does not fit: {worst.name} needs {worst.peak_gib:.2f} of {worst.hbm_gib:.2f} GiB per device"
    elif not why and not seconds.get("update"):
        why = "no forecast: the update was not compiled, or this version of JAX cannot read its schedule"
    elif not why and seconds["update"] < forecast.MIN_UPDATE_SECONDS:
        computed = f"{1000 * seconds['update']:.2g} ms"
        why = f"no forecast: the chip computes an update in {computed}; what is around it takes longer"
    if why:
        return SliceReport(slice_, verdicts, None, why)
    return SliceReport(slice_, verdicts, forecast.predict(experiment, slice_, seconds, zone, spot=spot))


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
        low, high = forecast.INTERVAL
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

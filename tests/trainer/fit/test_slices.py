"""Several slices in one table: order, what does not fit, what has no price, what cannot be told."""

from __future__ import annotations

import pytest

from conf.schema.training.run_yaml import RunFile, RunFileError
from trainer.fit import forecast, slices
from trainer.fit.memory import MemoryReport
from trainer.fit.topologies import CompilerError

SECONDS = {"v5litepod-8": 4.0, "v5litepod-16": 2.5, "v6e-8": 1.0, "v5p-8": 1.0}
MISTAKE = "loop.total_batch_tokens: 8 rows of 16 tokens cannot be split evenly over 24 devices"


def verdict(name: str, seconds: float, peak: float = 1.0) -> MemoryReport:
    return MemoryReport(name, peak < 15, peak, max(0.0, peak - 15), 0, 0, 0, 16, 1e12, 0, 1.0, seconds)


def measure(candidate: RunFile) -> tuple[RunFile, list[MemoryReport]]:
    pod = candidate.pod
    if pod.accelerator_type == "v5litepod-16":
        assert (pod.workers, pod.devices, pod.hbm_bytes_per_chip) == (4, 16, 17_200_000_000)
    if pod.accelerator_type == "v4-16":
        raise RunFileError(MISTAKE)
    if pod.accelerator_type == "v3-8":
        raise CompilerError("the TPU compiler does not support v3-8: no such thing")
    peak = 20.0 if pod.accelerator_type == "v5litepod-1" else 2.0
    return candidate, [verdict("update", SECONDS.get(pod.accelerator_type, 1.0), peak), verdict("eval", 0.0)]


@pytest.fixture
def experiment(lm_run) -> RunFile:
    lm_run["loop"] |= {"steps": 3600, "eval_interval": 3600}
    return RunFile.model_validate(lm_run)


def compared(experiment: RunFile, *names: str, by: str = "usd") -> list[slices.SliceReport]:
    return sorted(slices.compare(experiment, names, measure, None, spot=False), key=slices.sort_key(by))


def test_slices_are_sorted_by_dollars_or_by_hours(experiment):
    names = ("v5litepod-8", "v5litepod-16", "v6e-8")
    dollars, hours = compared(experiment, *names), compared(experiment, *names, by="hours")
    assert [row.slice_.accelerator_type for row in dollars] == ["v6e-8", "v5litepod-8", "v5litepod-16"]
    assert [row.slice_.accelerator_type for row in hours] == ["v6e-8", "v5litepod-16", "v5litepod-8"]
    found = {row.slice_.accelerator_type: row.forecast.hours for row in dollars if row.forecast}
    for name in names:
        assert found[name] == pytest.approx(SECONDS[name] * forecast.FACTORS[name[:3].replace("v5l", "v5e")])


def test_what_has_no_forecast_is_one_line_after_the_others(experiment):
    rows = compared(experiment, "v5litepod-1", "v4-16", "tpu7x-8", "v3-8", "v6e-8")
    lines = slices.table(rows)
    assert lines[1].startswith("v6e-8           yes")
    said = {line.split()[0]: line for line in lines[2:6]}
    assert said["v5litepod-1"].endswith("NO    does not fit: update needs 20.00 of 16.00 GiB per device")
    assert said["v4-16"].endswith(f"-     {MISTAKE}")
    assert said["v3-8"].endswith("-     the TPU compiler does not support v3-8: no such thing")
    assert "no forecast: no published step time of tpu7x" in said["tpu7x-8"]
    low, high = forecast.INTERVAL
    assert lines[6].startswith(f"a forecast: published runs took {low:.2f} to {high:.2f} times as long")


def test_a_slice_without_a_list_price_has_hours(experiment, monkeypatch):
    monkeypatch.setitem(forecast.FACTORS, "tpu7x", 2.0)
    (row,) = compared(experiment, "tpu7x-8")
    assert row.forecast is not None
    assert row.forecast.usd is None
    assert slices.table([row])[1].split()[-4:] == ["unknown", "no", "list", "price"]
    assert row.to_json()["forecast"]["usd"] is None


def test_an_update_of_a_toy_model_has_no_forecast(experiment):
    row = slices.report(experiment, slices.find_topology("v6e-8"), [verdict("update", 4e-5)], None, spot=False)
    assert row.forecast is None
    assert row.fits
    assert row.why == "no forecast: the chip computes an update in 0.04 ms; what is around it takes longer"

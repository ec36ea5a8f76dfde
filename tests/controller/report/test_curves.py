"""Which metrics a report has, in which order, and the curve of each."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from controller.cli import main
from controller.core.errors import ConfigError
from controller.report.comparison import group_settings
from controller.report.contents import build_report
from controller.report.curves import points_per_curve, select_metrics
from controller.report.gather import RecordedRun
from controller.report.page import render
from tests.controller.report.recorded import (
    CASES,
    START_TIME,
    write_run,
)
from tests.controller.report.test_report import curve_of, report_of, runs_of


def test_runs_that_told_other_steps_are_joined_where_all_of_them_went() -> None:
    """A warm start of another length shifts all steps of a run."""
    first, second = {10.0: 0.0, 50.0: 0.4, 90.0: 0.8}, {20.0: 0.5, 60.0: 0.5, 100.0: None, 140.0: 1.0}
    runs = [RecordedRun({"run": str(i), "seed": i}, None, {("x", "a"): told}) for i, told in enumerate((first, second))]
    line = curve_of(group_settings(runs)[0])
    assert line.steps == (20.0, 50.0, 60.0, 90.0)
    assert line.mean == pytest.approx((0.3, 0.45, 0.5, (0.8 + 0.5 + 0.5 * 30 / 80) / 2))
    assert line.low[:2] == pytest.approx((0.1, 0.4))


def test_a_finished_run_counts_with_its_last_value_so_that_curve_and_table_end_alike() -> None:
    first, second = {10.0: 0.0, 50.0: 0.4}, {10.0: 0.2, 50.0: 0.5, 58.0: 0.8}
    runs = [
        RecordedRun({"run": str(i), "seed": i, "state": "finished"}, None, {("x", "a"): told})
        for i, told in enumerate((first, second))
    ]
    line = curve_of(group_settings(runs)[0])
    assert (line.steps, line.mean[-1]) == ((10.0, 50.0, 58.0), pytest.approx(0.6))


def test_the_bounds_that_one_run_tells_are_the_band_of_its_metric(tmp_path: Path) -> None:
    told = [
        {"step": i, "phase": "eval", "a": 0.5, "a_low": 0.4 - i / 10, "a_high": 0.6, "b_low": 1.0 + i} for i in (1, 2)
    ]
    write_run(tmp_path, (), 0, START_TIME, told)
    found = report_of(tmp_path)
    assert {name for _, name in found.metrics if name[0] in "ab"} == {"a", "b_low"}, "b_low is no bound: there is no b"
    line = curve_of(found.settings[0], ("eval", "a"))
    assert (line.mean, line.high) == ((0.5, 0.5), (0.6, 0.6))
    assert line.low == pytest.approx((0.3, 0.2))


def test_a_smoothed_curve_is_a_moving_average_over_the_faint_one(tmp_path: Path) -> None:
    """TensorBoard's formula: at a weight of 0.5, each value counts half as much as the one after it."""
    write_run(tmp_path, (), 0, START_TIME, [{"step": i, "phase": "x", "a": a} for i, a in enumerate((8.0, 2.0, 4.0))])
    told, smoothed = (build_report("one", runs_of(tmp_path), smoothing=weight) for weight in (0.0, 0.5))
    [(_, line)] = smoothed.curves(("x", "a")).values()
    assert line.mean == pytest.approx((8.0, (2 * 2.0 + 8.0) / 3, (4 * 4.0 + 2 * 2.0 + 8.0) / 7))
    assert (line.told, line.low) == ((8.0, 2.0, 4.0), (8.0, 2.0, 4.0))
    assert smoothed.to_json() == told.to_json(), "no number of the tables is smoothed"
    drawn = [render(each, 0.0).count('class="line told c0 dash0"') for each in (told, smoothed)]
    assert (drawn[0], drawn[1] > 0) == (0, True)


@pytest.mark.parametrize("weight", ["1", "-0.1", "nan"])
def test_a_weight_that_smooths_nothing_or_all_is_refused(weight: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["report", f"--smooth={weight}"]) == 2
    assert "--smooth: must be a number of at least 0 and at most 0.999" in capsys.readouterr().err


def test_a_single_runs_hundred_metrics_are_grouped_in_natural_order_and_filtered(tmp_path: Path) -> None:
    names = [f"norm/layer_{i}" for i in range(12)]
    told = [{"step": step, "phase": "", **dict.fromkeys(names, 2.0 * step), "loss": 1.0 / step} for step in (1, 2, 3)]
    told += [{"step": step, "phase": "eval", "b": step / 3, "a10": step / 3, "a2": 0.5 * step} for step in (1, 2, 3)]
    write_run(tmp_path, (), 0, START_TIME, told)
    runs = runs_of(tmp_path)
    page = render(build_report("one", runs), 0.0)
    folds = ElementTree.fromstring(page[page.index("<main>") : page.index("</body>")]).findall(
        "section[@id='metrics']/details"
    )
    assert [fold.findtext("summary") for fold in folds] == ["1 metric", "norm: 12 metrics", "eval: 3 metrics"]
    assert [cell.text for cell in folds[1].findall(".//figcaption")] == [f"norm/layer_{i}" for i in range(12)]
    assert [[cell.text for cell in row] for row in folds[2].findall(".//tbody/tr")] == [
        ["a2", "1.5"], ["a10", "1"], ["b", "1"]
    ]  # fmt: skip
    named = build_report("one", runs, patterns=("eval: a*", "loss")).metrics
    assert named == (("", "loss"), ("eval", "a2"), ("eval", "a10"))
    with pytest.raises(ConfigError, match=r"--metric b\*b: no metric matches; closest: b"):
        build_report("one", runs, patterns=("loss", "b*b"))
    with pytest.raises(ConfigError, match=r"--metric b: no metric matches; the runs have none$"):
        select_metrics([], patterns=("b",))


def test_long_curves_are_thinned_and_keep_their_end(home: Path) -> None:
    write_run(home, CASES[0], 0, 1000.0, [{"step": i, "phase": "x", "a": i / 7} for i in range(10_001)])
    [setting] = group_settings(runs_of(home))
    line = curve_of(setting, ("x", "a"), 200)
    assert len(line.steps) <= 200
    assert (line.steps[-1], line.mean[-1]) == (10_000, 10_000 / 7)
    many = [setting] * 500
    metrics, _ = select_metrics(many)
    assert points_per_curve(metrics, many) * len(metrics) * len(many) * 3 <= 250_000


def test_the_metric_that_was_sought_comes_first_and_of_too_many_those_stay_that_most_runs_have(home: Path) -> None:
    for seed in (0, 1):
        odd = {f"a{seed}{i}": 1.0 for i in range(300)} | {"zeal": 1.0, "loss": 2.0, "accuracy": 0.5}
        write_run(home, CASES[0], seed, 1000.0 + seed, [{"step": 1, "phase": "x", **odd}])
    found = report_of(home)
    assert (len(found.metrics), found.omitted_metrics, found.metrics[0]) == (100, 503, ("x", "accuracy"))
    assert {("x", "zeal"), ("x", "loss")} < set(found.metrics)
    search = "sweep.search={method: random, trials: 2, metric: zeal, mode: max, prune: false, seed: 0}"
    write_run(home, (*CASES[0], search), 1, 2000.0, [{"step": 1, "phase": "x", "zeal": 1.0, "accuracy": 0.5}])
    assert report_of(home).metrics[0] == ("x", "zeal")

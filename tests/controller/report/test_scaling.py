"""`slipway report --x NAME --fit power --level VALUE` against a few lines of its own."""

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import scipy

from controller.cli import main
from controller.records import index
from controller.report.gather import gather_runs, local_reader
from controller.report.model import ReportModel, build_report
from controller.report.scaling import Scaling, is_on_front, measure_scaling
from tests.controller.report.recorded import START_TIME, SWEEP, edited_record, metric_lines, write_run

DIMS = (32, 64, 128, 256, 512)


def accuracy(dim: int, seed: int) -> float:
    """0.9 - 4 / dim, with a deviation per seed."""
    return 0.9 - 4.0 / dim + 0.01 * (seed - 1) * (1 + dim / 512)


def lines(dim: int, seed: int) -> list[dict[str, Any]]:
    """Accuracy that rises linearly over five evaluations, one second per update."""
    found: list[dict[str, Any]] = []
    for step in range(1, 11):
        found.append({"step": step, "phase": "grpo", "loss": 1.0 / step, "step_time": 1.0})
        if step % 2 == 0:
            found.append({"step": step, "phase": "eval", "eval_accuracy": accuracy(dim, seed) * step / 10})
    return found


@pytest.fixture
def state(home: Path) -> Path:
    for i, dim in enumerate(DIMS):
        for seed in (0, 1, 2):
            write_run(home, [f"model.dim={dim}"], seed, START_TIME + 100 * (seed + 3 * i), lines(dim, seed))
    return home


def report_of(state: Path) -> ReportModel:
    return build_report("quickstart", gather_runs(index.load_rows(state), local_reader(state)), "model.dim=64")


def measured(state: Path, x: str, **more: Any) -> Scaling:
    return measure_scaling(report_of(state), x, **more)


def test_the_table_is_made_of_the_runs(state: Path) -> None:
    found = measured(state, "dim", fit="power")
    assert found.metric == ("eval", "eval_accuracy")
    assert [row.x for row in found.rows] == list(DIMS)
    for row, dim in zip(found.rows, DIMS, strict=True):
        assert row.compared.mean == pytest.approx(statistics.mean(accuracy(dim, seed) for seed in range(3)))
        assert row.on_front, "more is better, and costs more"
    assert sorted(found.points) == [(dim, pytest.approx(accuracy(dim, seed))) for dim in DIMS for seed in range(3)]
    assert found.fit is not None
    assert found.fit.c_interval[0] < 1.0 < found.fit.c_interval[1]
    assert found.fit.a == pytest.approx(0.9, abs=0.02)


def test_intervals_of_differences_hold_together(state: Path) -> None:
    """Four comparisons with the baseline: each at 1 - 0.05 / 4, paired by seed."""
    row = measured(state, "model.dim").rows[4]
    differences = [accuracy(512, seed) - accuracy(64, seed) for seed in range(3)]
    half = scipy.stats.t.ppf(1 - 0.05 / 4 / 2, 2) * statistics.stdev(differences) / 3**0.5
    mean = statistics.mean(differences)
    assert (row.compared.how, row.compared.pairs) == ("paired", 3)
    assert (row.compared.low, row.compared.high) == pytest.approx((mean - half, mean + half))


def test_when_a_level_was_reached(state: Path) -> None:
    found = measured(state, "dim", level=0.7)
    told = {row.x: [one.steps for one in row.reached] for row in found.rows}
    expected = {}
    for dim in DIMS:
        reached = [[step for step in range(2, 11, 2) if accuracy(dim, seed) * step / 10 >= 0.7] for seed in range(3)]
        expected[dim] = [min(steps) for steps in reached if steps]
    assert told == expected
    assert [len(steps) for steps in expected.values()] == [3, 3, 3, 3, 3]
    for run, one in zip(found.rows[4].setting.counted_runs, found.rows[4].reached, strict=True):
        written = [json.loads(line) for line in (state / "runs" / run.id / "metrics.jsonl").read_text().splitlines()]
        wall = next(line["time"] for line in written if line["step"] >= one.steps) - written[0]["time"]
        away = 24.0 if run.seed == 1 else 0.0  # preempted for 9 + 15 s, and 6 s to start again
        assert wall - away - 8.0 < one.seconds <= wall - away + 1.1


def test_numbers_of_a_run(state: Path) -> None:
    report = report_of(state)
    for x in ("params", "flops", "seconds", "steps", "examples", "pod_hours", "usd", "accuracy_after"):
        rows = measure_scaling(report, x).rows
        assert len(rows) == 5
        assert all(row.x > 0 for row in rows)
        if x in ("params", "flops"):
            assert [row.x for row in rows] == sorted({row.x for row in rows}), "they grow with the width"
            assert [row.setting.label for row in rows] == [f"dim={dim}" for dim in DIMS]
        if x == "examples":
            assert {row.x for row in rows} == {10 * 128.0}


def test_a_metric_of_which_less_is_better(state: Path) -> None:
    found = measured(state, "dim", y="loss", level=0.25)
    assert {one.steps for row in found.rows for one in row.reached} == {4}
    assert [row.on_front for row in found.rows] == [True, False, False, False, False]
    points = [(1.0, 0.5), (2.0, 0.7), (3.0, 0.6), (2.0, 0.6), (4.0, 0.7)]
    assert [is_on_front(point, points, False) for point in points] == [True, True, False, False, False]
    assert [is_on_front(point, points, True) for point in points] == [True, False, False, False, False]


def test_the_verb_prints_the_fit_and_writes_the_section(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--x", "dim", "--fit", "power"]
    assert main.run(["report", "--sweep", SWEEP, *words, "--level", "0.89", "-o", "r.html"]) == 0
    out = capsys.readouterr().out
    assert "eval_accuracy against dim: 15 runs; Pareto front 32: 0.7750" in out
    assert "  y = 0.9 - " in out
    assert "32: never" in out
    page = Path("r.html").read_text()
    assert "eval_accuracy against dim" in page
    assert page.count("<circle") == 15
    assert main.run(["report", "--json", *words]) == 0
    told = json.loads(capsys.readouterr().out)["scaling"]
    assert [row["x"] for row in told["settings"]] == list(DIMS)
    assert told["fit"]["points"] == 15


@pytest.mark.usefixtures("state")
def test_bad_words(capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        ("--x nonsense", "--x nonsense: no run has this number and eval_accuracy; there are params, flops, seconds"),
        ("--x kind", "--x kind: which one: "),
        ("--x dim --y nonsense", "--y nonsense: no run has this metric; there are eval_accuracy"),
        ("--x run.seed --fit power", "--fit power: needs 4 different values of run.seed; the runs have 0, 1, 2"),
        ("--fit power", "--fit: needs --x, e.g. --x params"),
        ("--level 0.5", "--level: needs --x"),
    ):
        assert main.run(["report", *words.split()]) == 2
        assert message in capsys.readouterr().err


def test_values_of_the_sweep_are_no_keys_and_runs_without_the_number_are_counted(state: Path) -> None:
    """The record of a run of `sweep=…` has sweep.params.model.dim beside model.dim."""
    for record in (state / "runs").glob("*/record.json"):
        with edited_record(state, record.parent.name) as document:
            document["config"]["sweep"]["params"] = {"model.dim": "32,64,128,256,512"}
    write_run(state, ["model.dim=1024"], 0, START_TIME + 5000, metric_lines(["loop.kl_coef=0"], 0, 2, 1))
    found = measured(state, "dim")
    assert ([row.x for row in found.rows], found.left_out) == (list(DIMS), 1)

"""A tiny sweep of the TRM study on two pods that are taken back: each run ends once, and the report adds up."""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from controller.cli import main
from controller.cloud import emulator
from controller.records import index
from tests.scenarios.experiments.test_quickstart import client, homes

__all__ = ["homes"]
pytestmark = [pytest.mark.e2e, pytest.mark.deep, pytest.mark.timeout(1800)]  # 15 runs
WORDS = (
    "+experiment=trm_sudoku", "scale=tiny", "cloud=local", "env.packages=image", "tpu=v5litepod_1",
    "tpu.zone=us-central1-a", "sweep.pods=2", "cloud.operation_seconds=0", "run.seed=0,1,2", "checkpoint.max_to_keep=2",
)  # fmt: skip
SWEEP, KEY, VALUES = "trm_ema", "optimizer.ema_decay", ["null", "0.99", "0.995", "0.999", "0.9995"]
Lines = list[dict[str, Any]]


def said(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main.run([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def cloud(home: Path, *words: str) -> emulator.Emulator:
    config = main.parse(["plan", *WORDS[:5], *words]).options.config()[0]
    return emulator.ensure_running(config.cloud, str(home))  # pyright: ignore[reportArgumentType]


def lines_in_the_bucket(home: Path, runs: list[str]) -> dict[str, Lines]:
    """metrics.jsonl of each run, as its worker uploaded it."""
    google = client(cloud(home))
    [bucket] = {row["bucket"] for row in index.load_rows(home)}
    found = {run: google.download(bucket, f"runs/{run}/metrics.jsonl").decode() for run in runs}
    google.close()
    return {run: [json.loads(line) for line in text.splitlines()] for run, text in found.items()}


def last_values(lines: dict[str, Lines]) -> dict[tuple[str, str], dict[str, float]]:
    """The last finite number of each run by phase and name."""
    found: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for run, each in lines.items():
        for line in each:
            for name, value in line.items():
                if name not in ("step", "phase", "time") and isinstance(value, int | float):
                    found[line["phase"], name][run] = value
    return found


def half_width(differences: list[float], comparisons: int) -> float:
    """Half of Student's interval of three differences; two degrees of freedom have a quantile in closed form."""
    p = 1 - 0.05 / comparisons / 2
    return (2 * p - 1) / math.sqrt(2 * p * (1 - p)) * statistics.stdev(differences) / math.sqrt(3)


def assert_says(rows: list[dict[str, Any]], by_setting: list[list[float]], comparisons: int) -> None:
    """Compare rows of a report with each setting's values, in the order of the seeds, the baseline first."""
    for row, values in zip(rows, by_setting, strict=True):
        assert (row["n"], row["mean"]) == (3, pytest.approx(statistics.fmean(values), rel=1e-9, abs=1e-12))
        if values is by_setting[0]:
            continue
        differences = [a - b for a, b in zip(values, by_setting[0], strict=True)]
        middle = statistics.fmean(differences)
        assert row["difference"] == pytest.approx(middle, rel=1e-9, abs=1e-12)
        if len(set(differences)) > 1:
            half = half_width(differences, comparisons)
            assert (row["low"], row["high"]) == pytest.approx((middle - half, middle + half), rel=1e-6, abs=1e-9)
        else:
            assert (row["low"], row["high"]) == (None, None)


def test_a_preempted_sweep_ends_every_run_once_and_its_report_adds_up(
    homes: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    home, values = homes("home"), VALUES
    words = (*WORDS, f"sweep={SWEEP}")
    planned = said(capsys, "plan", "-m", *words)["runs"]
    by_words = {frozenset(run["words"]): run["run"] for run in planned}
    by_value = {v: [by_words[frozenset({f"{KEY}={v}", f"run.seed={seed}"})] for seed in range(3)] for v in values}
    runs = [run["run"] for run in planned]
    assert len(set(runs)) == len(runs) == 15
    struck = [f"runs/{runs[i]}/checkpoints/2/commit_success" for i in (1, 9)]
    faults = [{"kind": "preempted", "after_object": name} for name in struck]
    cloud(home).post("faults", {"key": "in between", "faults": faults})
    code = main.run(["-m", *words])
    out, err = capsys.readouterr()
    assert code == 0, out + err
    rows = {row["run"]: row for row in index.load_rows(home)}
    assert sorted(rows) == sorted(runs)
    assert {row["state"] for row in rows.values()} == {"finished"}
    assert sum(row["attempts"] for row in rows.values()) >= 15 + 2, "both preemptions hit a run"
    lines = lines_in_the_bucket(home, runs)
    for run, each in lines.items():
        steps = [(line["step"], line["phase"]) for line in each]
        assert len(set(steps)) == len(steps), f"{run} has a line twice"
        assert [step for step, phase in steps if phase == "eval"] == [2, 4]
    last = last_values(lines)
    document = said(capsys, "report", "--baseline", f"{KEY}={values[1]}", "--x", KEY, "--y", "eval_lm_loss")
    order = [values[1], values[0], *values[2:]]
    told = {(metric["phase"], metric["name"]): metric["settings"] for metric in document["metrics"]}
    assert told.keys() >= {("eval", "eval_lm_loss"), ("eval", "eval_cell_accuracy"), ("eval", "eval_exact_accuracy")}
    compared = 0
    for metric, settings in told.items():
        if metric in last and all(len(set(by_value[v]) & set(last[metric])) == 3 for v in order):
            assert_says(settings, [[last[metric][run] for run in by_value[v]] for v in order], comparisons=1)
            compared += 1
    assert compared >= 12
    loss = last["eval", "eval_lm_loss"]
    known = [v for v in order if v != "null"]
    assert document["scaling"]["left_out"] == 3 * (len(order) - len(known))
    against = document["scaling"]["settings"]
    for row, v in zip(against, sorted(known, key=float), strict=True):
        assert row["x"] == pytest.approx(float(v)), "a mean over seeds"
    against = [against[sorted(known, key=float).index(v)] for v in known]
    assert_says(against, [[loss[run] for run in by_value[v]] for v in known], comparisons=len(known) - 1)
    assert cloud(home).get("state")["node"] == {}, "no pod is left"

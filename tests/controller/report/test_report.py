"""The numbers of a report, against a few lines of their own; which runs it is about; what the verb says."""

import json
import shutil
import statistics
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from controller.cli import main
from controller.records import index
from controller.report.comparison import Setting, group_settings
from controller.report.contents import ReportModel, build_report
from controller.report.curves import Curve, build_curve
from controller.report.drawing import difference_cells, format_number, line_chart, ticks, x_ticks
from controller.report.gather import RecordedRun, gather_runs, local_reader
from controller.report.page import hypothesis_rows, overview_metrics, render
from tests.controller.report.recorded import (
    CASES,
    START_TIME,
    SWEEP,
    edited_record,
    metric_lines,
    write_run,
    write_sweep,
)

ACCURACY = ("eval", "eval_accuracy")
STUDENT_2 = 4.302652729911275
"""Student's t of 0.975 with 2 degrees of freedom."""


def report(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main.run(["report", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def runs_of(home: Path) -> list[RecordedRun]:
    return gather_runs(index.load_rows(home), local_reader(home))


def curve_of(setting: Setting, metric: tuple[str, str] = ("x", "a"), *points: int) -> Curve:
    curve = build_curve(setting, metric, *points)
    assert curve is not None
    return curve


def report_of(home: Path) -> ReportModel:
    return build_report("quickstart", runs_of(home))


def test_the_table_equals_a_few_lines_from_metrics_jsonl(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = write_sweep(home)
    document = report(capsys)
    [told] = [metric for metric in document["metrics"] if (metric["phase"], metric["name"]) == ACCURACY]
    last = {}
    for run in ids:
        lines = [json.loads(line) for line in (home / "runs" / run / "metrics.jsonl").read_text().splitlines()]
        last[run] = [line["eval_accuracy"] for line in lines if line["phase"] == "eval"][-1]
    baseline = [last[run] for run in ids[:3]]
    means = [statistics.mean(last[run] for run in ids[i : i + 3]) for i in (0, 3, 6, 9)]
    assert [row["mean"] for row in told["settings"]] == pytest.approx(means)
    for i, row in enumerate(told["settings"][1:], 1):
        differences = [last[run] - base for run, base in zip(ids[3 * i : 3 * i + 3], baseline, strict=True)]
        half = STUDENT_2 * statistics.stdev(differences) / 3**0.5
        mean = statistics.mean(differences)
        assert (row["difference"], row["low"], row["high"]) == pytest.approx((mean, mean - half, mean + half))
        assert (row["n"], row["pairs"], row["how"]) == (3, 3, "paired")
    assert (home.parent / document["file"]).stat().st_size < 3_000_000


def test_runs_that_differ_only_in_the_seed_are_one_setting(home: Path) -> None:
    write_sweep(home)
    found = group_settings(runs_of(home))
    assert [s.label for s in found] == [f"lr={lr} kl_coef={kl}" for lr in ("0.0001", "0.0007") for kl in ("0", "0.001")]
    assert [[run.seed for run in s.runs] for s in found] == [[0, 1, 2]] * 4
    assert group_settings(runs_of(home), "optimizer.lr=0.0007 loop.kl_coef=0")[0].label == "lr=0.0007 kl_coef=0"
    assert group_settings(runs_of(home), "lr=0.0007 kl_coef=0.001")[0].label == "lr=0.0007 kl_coef=0.001"


def test_a_setting_of_a_named_case_has_its_name(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The case with the most overrides that the run has; `base` has none, so every run has them."""
    cases = {"base": [], "no_kl": ["loop.kl_coef=0"], "slow": ["optimizer.lr=0.0001", "loop.kl_coef=0"]}
    for words in (("loop.kl_coef=0.001",), ("loop.kl_coef=0",), CASES[0], ("loop.kl_coef=0", "optimizer.lr=0.5")):
        run = write_run(home, words, 0, START_TIME, metric_lines(CASES[0], 0, 20, 5))
        with edited_record(home, run) as document:
            document["config"]["sweep"]["cases"] = cases
    told = report(capsys, "--baseline", "slow")
    assert told["baseline"] == "slow"
    labels = [run["label"] for run in told["runs"]]
    assert sorted(labels) == ["base kl_coef=0.001 seed 0", "no_kl lr=0.5 seed 0", "no_kl seed 0", "slow seed 0"]


def test_a_hypothesis_is_shown_beside_what_was_found(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its baseline comes first; a run that another sweep has made keeps that sweep's hypothesis to itself."""
    said = {"experiment": "quickstart", "question": "Is 7e-4 better?", "expected": "It is.", "decision": "Above 0."}
    said |= {"metric": "eval_accuracy", "baseline": "loop.kl_coef=0.001 optimizer.lr=0.0001"}
    ids = write_sweep(home)
    for run, own in zip(ids, [said | {"question": "Another?"}, *[said] * 11], strict=True):
        with edited_record(home, run) as document:
            document["config"]["sweep"]["hypothesis"] = own
    index.append_rows(home, [{"run": ids[0], "sweep": "earlier"}])
    found = build_report(SWEEP, runs_of(home))
    assert found.settings[0].label == "lr=0.0001 kl_coef=0.001"
    shown = list(hypothesis_rows(found))
    assert shown[:3] == [("question", "Is 7e-4 better?"), ("expected", "It is."), ("decision", "Above 0.")]
    [one, *others] = found.comparisons(ACCURACY)
    said_of = f"eval_accuracy of lr=0.0001 kl_coef=0.001: {format_number(one.mean, by=one.deviation)}, 3 seeds"
    assert shown[3] == ("found", said_of)
    told = [text.partition("difference ")[2].split(",")[0] for _, text in shown[4:]]
    assert told == [difference_cells(other)[0] for other in others]
    assert "It is." in render(found, 0.0)
    # of another experiment, without the baseline: both are said
    words = ["+experiment=arithmetic", "optimizer.lr=0.0007"]
    index.append_rows(home, [{"run": run, "overrides": words} for run in ids[6:9]])
    assert main.run(["report", *ids[6:12], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["hypothesis"]["misfits"] == [
        "3 of 6 runs are of +experiment=arithmetic, not of +experiment=quickstart",
        "no run of its baseline is here: loop.kl_coef=0.001 optimizer.lr=0.0001",
    ]
    assert main.run(["report", *ids[6:12]]) == 0
    assert "expected  It is.\nbut" not in (told := capsys.readouterr().out)
    assert "expected  It is." in told
    assert "\nbut       3 of 6 runs are of +experiment=arithmetic" in told
    assert main.run(["report", *ids[:3]]) == 0  # of two sweeps
    assert "expected  " not in capsys.readouterr().out


def test_a_repeated_seed_counts_once_and_other_code_is_another_setting_but_no_other_pod(home: Path) -> None:
    lines = metric_lines(CASES[0], 0, 20, 5)
    pods = ((), ("tpu.zone=us-west4-a", "sweep.pods=7"), ("tpu.name=other",))
    for number, (pod, state) in enumerate(zip(pods, ("finished", "finished", "failed"), strict=True), 1):
        write_run(home, (*CASES[1], *pod), 0, 1000.0 * number, lines, state=state)
    [setting] = group_settings(runs_of(home))
    assert ([run.row["created"] for run in setting.runs], len(setting.superseded_runs)) == ([2012.0], 2)
    shutil.rmtree(home)
    first, second = (write_run(home, CASES[0], seed, 1000.0 + seed, []) for seed in (0, 1))
    with edited_record(home, second) as document:
        document["code_sha256"] = "beef" * 16
    index.append_rows(home, [{"run": second, "code": "beef" * 16}])
    labels = [s.label for s in group_settings(runs_of(home))]
    assert labels == ["quickstart (code c0dec0dec0de)", "quickstart (code beefbeefbeef)"]
    (home / "runs" / first / "record.json").unlink()
    (home / "runs" / second / "record.json").write_text("no JSON")
    assert [s.label for s in group_settings(runs_of(home))] == ["quickstart"]  # by words: nothing else is known


def test_a_value_that_is_not_finite_is_missing_and_so_is_an_unfinished_run(home: Path) -> None:
    for seed, value in enumerate((0.5, float("nan"), 0.7)):
        lines = [{"step": step, "phase": "x", "a": a} for step, a in ((1, 0.1), (2, value))]
        write_run(home, CASES[0], seed, 1000.0 + seed, lines)
    write_run(home, CASES[0], 3, 2000.0, [{"step": 2, "phase": "x", "a": 9.0}], state="failed")
    found = report_of(home)
    [row] = found.comparisons(("x", "a"))
    assert (row.n, row.mean) == (2, 0.6)
    [missing] = found.runs_without_end(("x", "a"))
    assert f"In no mean of a, since their last value is not finite: {found.run_label(missing)}." in render(found, 0.0)
    told = {metric["name"]: metric.get("last_value_not_finite") for metric in found.to_json()["metrics"]}
    assert (missing.seed, told["a"]) == (1, [missing.id])
    assert [name for name, runs in told.items() if runs] == ["a"]
    line = curve_of(found.settings[0])
    assert (line.steps, line.low, line.high) == ((1.0, 2.0), (0.1, 0.5), (0.1, 0.7))
    assert line.mean == pytest.approx((0.1, 0.6))


def test_results_are_a_line_a_run_sorted_by_seed_with_a_column_for_each(tmp_path: Path) -> None:
    for seed in (2, 0, 1):
        many = {f"m{i}": float(seed) for i in range(8)}
        write_run(tmp_path, CASES[0], seed, START_TIME + seed, [], metrics=many)
    page = render(report_of(tmp_path), START_TIME)
    body = ElementTree.fromstring(page[page.index("<body>") : page.index("</html>")])
    [table] = body.findall("main/section[@id='summary']//table")
    assert [cell.text for cell in table.iter("th")][:8] == ["setting", "seed", "state", "m0", "m1", "m2", "m3", "m4"]
    assert [[cell.text for cell in row][1:4] for row in table.findall("tbody/tr")] == [
        [str(seed), "finished", str(seed)] for seed in (0, 1, 2)
    ]
    assert "Also in summary.json: m5, m6, m7." in page


@pytest.mark.parametrize("value", [1e-5, 0.0001, 123456.7, -2.5e-7])
def test_labels_of_small_charts_are_whole(value: float) -> None:
    page = ElementTree.Element("div")
    line_chart(page, "loss", {0: ("a", Curve((1.0, 9.0), (value, 2 * value), (value, value), (value, value)))})
    [chart] = page
    for label in (each for each in chart if each.tag == "text" and each.get("text-anchor") == "end"):
        assert float(label.get("x", "")) >= 13 * len(label.text or ""), "24 SVG units high, as page.css has them"


def test_the_page_draws_the_curves_and_holds_the_table(home: Path) -> None:
    """Each metric has its fold; the chart ends where the mean of the last values lies, the table shows that mean."""
    write_sweep(home, seeds=(0, 1))
    found = report_of(home)
    page = render(found, 1e9)
    body = ElementTree.fromstring(page[page.index("<body>") : page.index("</html>")])
    folds = body.findall("main/section[@id='metrics']/details")
    names = [fold.findtext("summary") for fold in folds]
    assert found.constants
    assert (names[0], len(names)) == ("eval: eval_accuracy", len(found.metrics) - len(found.constants))
    assert all(f"{phase} {name} " in page for phase, name in found.constants)
    assert [fold.get("open") for fold in folds] == ["", *[None] * (len(folds) - 1)]
    text = "".join(body.find("main/section[@id='metrics']/p").itertext())  # pyright: ignore[reportOptionalMemberAccess]
    assert text.startswith("Each line is the mean")
    assert text.endswith("all differences are equal.")
    lines = [path for path in folds[0].iter("path") if path.find("title") is not None]
    assert [path.findtext("title") for path in lines] == [setting.label for setting in found.settings]
    means = [row.mean for row in found.comparisons(ACCURACY)]
    heights = [float(path.get("d", "").rpartition(" ")[2]) for path in lines]
    assert sorted(range(4), key=lambda i: heights[i]) == sorted(range(4), key=lambda i: -(means[i] or 0.0))
    cells = [[cell.text for cell in row] for row in folds[0].findall(".//tbody/tr")]
    told = [format_number(row.mean, by=row.deviation) for row in found.comparisons(ACCURACY)]
    assert [row[1] for row in cells] == told


def test_lines_that_no_program_should_write_are_passed_over(home: Path) -> None:
    run = write_run(home, CASES[0], 0, 1000.0, [{"step": 1, "phase": "x", "a": 1.0}])
    folder = home / "runs" / run
    odd = ['{"step": 2, "phase": ["x"], "a": 1e999}', "[1]", "null", "{", '{"a": 1}', '{"step": "2", "a": 3}',
           f'{{"step": 3, "a": {10**400}}}', '{"step": true, "a": 4}', "[" * 30,
           '{"step": 5, "phase": "x", "time": "now", "b": true}']  # fmt: skip
    for name in ("metrics.jsonl", "events.jsonl", "transcripts.jsonl"):
        with (folder / name).open("a") as out:
            out.write("\n".join(odd) + "\n")
    broken = {"pods": "none", "ended": "never", "metrics": [1], "created": "?", "overrides": None}
    index.append_rows(home, [{"run": run, **broken}])
    (folder / "metrics.jsonl").rename(folder / "told.jsonl")  # as of a run that goes on
    [found] = runs_of(home)
    assert {metric: dict(values) for metric, values in found.curves.items()} == {("x", "a"): {1.0: 1.0}}
    assert main.run(["report"]) == 0


def test_which_runs(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = write_sweep(home, seeds=(0, 1))
    alone = write_run(home, ("loop.kl_coef=0.5",), 0, 1.0, [], sweep="")
    assert len(report(capsys)["runs"]) == 8
    assert [run["run"] for run in report(capsys, ids[0], alone, "-o", "two.html")["runs"]] == [alone, ids[0]]
    assert len(report(capsys, "--sweep", "quickstart", "--where", "seed=1")["runs"]) == 4
    index.append_rows(home, [{"run": alone, "created": 1e10}])
    document = report(capsys)
    assert [run["run"] for run in document["runs"]] == [alone]
    pages = home / "reports"
    assert Path(document["file"]) == pages / f"{alone}.html"
    assert {path.name for path in pages.iterdir()} == {f"{SWEEP}.html", f"{alone}.html"}
    assert [path.name for path in home.parent.iterdir() if path.is_file()] == ["two.html"]  # no new file of the code


def test_mistakes(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["report"]) == 2
    assert "no runs are recorded on this machine; `--refresh cloud=…`" in capsys.readouterr().err
    write_sweep(home, seeds=(0,), steps=10)
    for words, said in (
        ("quickstart-0", "quickstart-0: no such run; did you mean quickstart-"),
        ("--sweep other", f"--sweep other: no such sweep; the latest: {SWEEP}"),
        ("--where seed=9", "no run matches"),
        ("--metric los", "--metric los: no metric matches; closest: loss"),
        ("--baseline lr=3", "--baseline lr=3: no setting has these overrides; settings: lr=0.0001 kl_coef=0; "),
        ("--baseline optimizer.lr=0.0001", "2 settings have these overrides"),
        ("-o no/such/folder.html", "no/such/folder.html: cannot be written"),
    ):
        assert main.run(["report", *words.split()]) == 2
        assert said in capsys.readouterr().err


def test_the_summary_has_the_charts_that_matter_and_each_runs_results(home: Path) -> None:
    write_sweep(home)
    found = report_of(home)
    assert [name for _, name in overview_metrics(found)] == ["eval_accuracy", "loss", "reward_mean"]
    page = render(found, START_TIME)
    summary = page[page.index('id="summary"') : page.index('id="metrics"')]
    assert summary.count("<figure>") == 3
    strokes = summary.count('class="interrupted"')
    assert strokes == 3 * len([run for run in found.runs if run.seed == 1])
    assert strokes > 0


def test_the_page_says_how_much_there_is_and_where_the_rest_is(tmp_path: Path) -> None:
    metrics = {"accuracy_before": 0.4883, "accuracy_after": 0.8984}
    metrics |= {"accuracy_low_after": 0.85, "accuracy_high_after": 0.93}
    run = write_run(tmp_path, (), 0, START_TIME, metric_lines(CASES[0], 0, 30, 5), usd=None, metrics=metrics)
    page = render(report_of(tmp_path), START_TIME)
    folded = f"{runs_of(tmp_path)[0].num_transcripts} transcripts"
    assert "<title>quickstart: report</title>" in page
    assert ">not billed or unknown<" in page
    assert ">accuracy</th>" in page
    assert ">0.4883 → 0.8984 (95 %: 0.85 to 0.93)</td>" in page
    assert not [word for word in ("baseline", "Student") if word in page], "one setting is not compared"
    assert f"8 of {folded}</summary>" in page
    for command in (f"slipway logs --run {run}", f"slipway get {run}", "slipway tensorboard"):
        assert f"<code>{command}</code>" in page
    body = ElementTree.fromstring(page[page.index("<body>") : page.index("</html>")])
    tables = [(parent.get("class"), child) for parent in body.iter() for child in parent if child.tag == "table"]
    assert {parent for parent, _ in tables} == {"scroll"}, "a wide table scrolls by itself on a narrow screen"


def test_the_board_of_a_puzzle_is_text_and_whole(tmp_path: Path) -> None:
    run, maze = write_run(tmp_path, CASES[0], 0, START_TIME, []), "\n".join(["#" * 30] * 30)
    row = {"step": 8, "phase": "eval", "prompt": maze, "response": f"after step 1: 3 wrong\n\n{maze}", "reward": 0.0}
    row |= {"answer": maze, "extracted": None, "board": {"kind": "<b>"}}
    (tmp_path / "runs" / run / "transcripts.jsonl").write_text(json.dumps(row) + "\n")
    page = render(report_of(tmp_path), START_TIME)
    assert page.count(f'<span class="text transcript">{maze}</span>') == 2
    assert f">after step 1: 3 wrong\n\n{maze}</span>" in page
    assert "<b>" not in page


def test_the_curve_of_an_evaluation_begins_before_grpo(tmp_path: Path) -> None:
    warm = [{"step": step, "phase": "warm_start", "eval_accuracy": value} for step, value in ((0, 0.0), (40, 0.49))]
    later = [{"step": step, "phase": "eval", "eval_accuracy": value} for step, value in ((70, 0.6), (100, 0.9))]
    write_run(tmp_path, (), 0, START_TIME, [*warm, *later])
    [setting] = report_of(tmp_path).settings
    curve = curve_of(setting, ACCURACY)
    assert (curve.steps, curve.mean) == ((40, 70, 100), (0.49, 0.6, 0.9))


def test_flat_lines_have_one_height_and_hide_no_other() -> None:
    flat, page = Curve((1.0, 9.0), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0)), ElementTree.Element("div")
    line_chart(page, "loss", {0: ("a", flat), 1: ("b", flat), 2: ("c", flat)})
    [chart] = page
    heights = [each.text for each in chart if each.tag == "text" and each.get("text-anchor") == "end"]
    assert heights == ["0", "step", "9"]  # and the last step
    assert [each.get("stroke-dasharray") for each in chart if each.tag == "path"] == [None, "9 9", "9 18"]


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-3.2e-7, 8.1e-7), (12.0, 12.0), (-1e99, 1e99), (1.0, 1e4)])
def test_ticks_are_round_and_few_and_those_of_steps_name_both_ends(low: float, high: float) -> None:
    found = ticks(low, high)
    assert 1 <= len(found) <= 7
    assert all(low - 1e-9 * abs(low) <= tick <= high * (1 + 1e-9) for tick in found)
    for expected in ([5, 50, 100, 130], [1], [7, 8, 9], [450, 500, 550, 600, 638]):
        assert x_ticks(expected[0], expected[-1]) == expected
    assert x_ticks(900_000.0, 2e8, logarithmic=True) == [900_000, 1e7, 2e8]

"""Tables, sentences and metrics in 80 columns: what is left out, what never is; what workers print steers nothing."""

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from controller.cli import main
from controller.cli.verbs import on_workers
from controller.cli.view import View
from controller.core.events import Event
from controller.core.text import (
    SanitizedStream,
    cell_width,
    evaluation_line,
    fit_table,
    join_fitting,
    printable,
    result_lines,
    sanitized_output,
    short_ids,
    short_overrides,
    shorten,
    training_line,
    width_of,
    wrap,
)
from controller.core.this_process import Clock
from controller.plan.build import build_plan
from controller.records.ledger import Result
from tests.controller.run.test_text_screen import GRPO
from tests.terminal import Tty


def test_the_width_is_that_of_the_terminal_or_what_columns_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert (width_of(Tty()), width_of(io.StringIO())) == (80, None)
    monkeypatch.setenv("COLUMNS", "100")
    assert (width_of(Tty()), width_of(io.StringIO())) == (100, 100)


def test_a_sentence_is_wrapped_between_words_a_path_stays_whole_and_a_title_is_cut_inside() -> None:
    path = f"gs://{'b' * 60}/runs/quickstart-1cb75d98/more"
    lines = wrap(f"results  {path} {'word ' * 30}", 80, 9).splitlines()
    assert lines[1] == f"{' ' * 9}{path}"
    assert all(len(line) <= 80 for line in lines if path not in line)
    assert all(line.startswith(" " * 9) for line in lines[1:])
    assert wrap("x " * 200, None) == "x " * 200
    assert shorten("code on 4 workers", 20) == "code on 4 workers"
    short = shorten("TPU v5litepod-16 (4 workers) a-very-long-name-of-a-pod-0ef9e1", 40)
    assert (cell_width(short), short.startswith("TPU v5litepod-16"), short.endswith("-0ef9e1")) == (40, True, True)
    assert cell_width(shorten("字" * 40, 21)) <= 21


def test_parts_of_the_highest_rank_go_first() -> None:
    parts = [(2, "loss 1.234"), (1, "accuracy 0.5"), (0, "ETA 1:02")]
    assert join_fitting("step 1/2", parts, None) == "step 1/2  loss 1.234  accuracy 0.5  ETA 1:02"
    assert join_fitting("step 1/2", parts, 40) == "step 1/2  accuracy 0.5  ETA 1:02"
    assert join_fitting("step 1/2", parts, 10) == "step 1/2  ETA 1:02"


def test_a_table_concedes_in_order_and_folds_last() -> None:
    columns = {"run": ["q-1", "q-2"], "words": ["aaaa bbbb cccc dddd", "x"], "cost": ["$1", "$2"]}
    titles, _, left_out = fit_table(columns, 29, [("cost", None), ("run", ["1", "2"])], "words")
    assert ([title.strip() for title in titles], left_out) == (["run", "words"], ["cost"])
    _, rows, _ = fit_table(columns, 17, [("cost", None), ("run", ["1", "2"])], "words")
    assert [[cell.strip() for cell in row] for row in rows] == [["1", "aaaa bbbb"], ["", "cccc dddd"], ["2", "x"]]
    assert fit_table(columns, None, [("cost", None)])[2] == []


def test_ids_and_overrides_keep_what_differs() -> None:
    assert short_ids(["q-0b1c2d3e", "q-1b1c2d3e"]) == ["0b1c2d3e", "1b1c2d3e"]
    [long, _] = short_ids(["a-name-of-forty-characters-and-some-0b1c2d3e", "b-12345678"])
    assert (len(long), long.endswith("0b1c2d3e")) == (26, True)
    assert short_overrides(["optimizer.lr=1 run.seed=0", "optimizer.lr=2 run.seed=0"]) == ["lr=1 seed=0", "lr=2 seed=0"]
    assert short_overrides(["a.lr=1 b.lr=2"]) == ["a.lr=1 b.lr=2"]
    assert short_overrides(["'program.command=[a, b]' run.name=x"]) == ["'command=[a, b]' name=x"]


SUMMARY = {
    "accuracy_before": 0.48828125, "accuracy_after": 0.8984375, "accuracy_low_after": 0.8553,
    "accuracy_high_after": 0.9297, "eval_prompts": 256, "warm_start_steps": 38, "steps": 150, "questions_left_out": 7,
    "test_accuracy_before": 0.1914, "test_accuracy_low_before": 0.1309, "test_accuracy_high_before": 0.2519,
    "test_pass_at_4_before": 0.4688, "test_accuracy_after": 0.6133, "test_accuracy_low_after": 0.5331,
    "test_accuracy_high_after": 0.6934, "test_pass_at_4_after": 0.8906,
}  # fmt: skip


def test_the_training_line() -> None:
    metrics = {"phase": "grpo", "step": 120, "steps_total": 700.0, "step_time": 0.5}
    metrics |= {"loss": 0.12345, "accuracy": 0.5, "tokens_per_second": 12345.6}
    line = training_line(metrics)
    assert line == "grpo step 120/700  loss 0.1235  accuracy 0.5  12,346 tok/s  ETA 4:50"
    assert training_line(metrics, usd_per_hour=19.2) == f"{line}, $1.55"  # 290 seconds of it
    assert [training_line(line) for line in ({"loss": 1.0}, {"step": 3, "loss": None})] == [None, "step 3"]


LONG = "x" * 5000


@pytest.mark.parametrize(
    "metrics",
    [
        {"step": 1, "phase": LONG},
        {"step": 1, "loss": LONG},
        {"step": 1, "accuracy": 10**4000},
        {"step": 1, "eval_loss": [LONG]},
        {"step": 1, "loss": 1.7e308, "eval_loss": -1.7e308},
        {"step": 1, f"eval_{LONG}": 0.5},
        {"step": 1} | {f"eval_{i}": 0.5 for i in range(5000)},
        {f"{LONG}_before": LONG, f"{LONG}_after": {"a": LONG}},
        {LONG: None},
    ],
    ids=range(9),
)
def test_what_a_program_writes_as_its_metrics_does_not_fill_the_screen(metrics: dict[str, Any]) -> None:
    for line in (training_line(metrics) or "", evaluation_line(metrics), *result_lines(metrics)[:1]):
        assert len(line) < 2100
        assert "x" * 100 not in line


def test_step_and_remaining_time_stay_where_there_is_no_room() -> None:
    line = str(training_line(GRPO, 19.2, 78))
    assert re.fullmatch(r"grpo step 165/188  .*accuracy 0\.7797.*ETA 0:46, \$0\.25", line)
    assert cell_width(line) <= 78
    metrics = {"step": 5, "steps_total": 10, "step_time": 1.0, "loss": 2.5, "tokens_per_second": 1e5}
    assert training_line(metrics, None, 30) == "step 5/10  loss 2.5  ETA 0:05"


def test_an_evaluation_shows_its_interval() -> None:
    values = {"step": 188, "eval_accuracy": 0.8984, "eval_accuracy_low": 0.8553, "eval_accuracy_high": 0.9297}
    assert evaluation_line(values | {"eval_time": 3.0}) == "step 188  accuracy 0.8984 (95 %: 0.8553 to 0.9297)"
    assert evaluation_line({"step": 20, "eval_loss": 2.0}) == "step 20  loss 2"
    core = {"eval_core_metric": 0.25, "eval_core_metric_low": 0.2, "eval_core_metric_high": 0.3}
    core |= {"eval_core_metric_stderr": 0.025, "eval_core/hellaswag": 0.4}
    assert evaluation_line({"step": 20} | core) == "step 20  core_metric 0.25 (95 %: 0.2 to 0.3)"


def test_the_results_are_before_and_after_with_an_interval() -> None:
    assert result_lines(SUMMARY, 78) == [
        "accuracy           0.4883 → 0.8984 (95 %: 0.8553 to 0.9297)",
        "test_accuracy      0.1914 → 0.6133 (95 %: 0.5331 to 0.6934)",
        "test_pass_at_4     0.4688 → 0.8906",
        "questions_left_out 7",
    ]


def test_results_of_a_program_of_ones_own_and_without_a_before_are_shown_as_it_wrote_them() -> None:
    summary = {"eval_exact_accuracy": 0.998, "eval_exact_accuracy_low": 0.989, "eval_exact_accuracy_high": 0.9997}
    assert result_lines({**summary, "price_low": 3.0, "steps": 360, "note": "fine"}, 78) == [
        "eval_exact_accuracy 0.998 (95 %: 0.989 to 0.9997)",
        "price_low          3",
        "steps              360",
        "note               fine",
    ]


HOSTILE = "\x1b]0;title\x07\x1b[2J\x9b31m\x1b[6n\u202eevil\u2066[/][bold]\x08\x7f"


def harmless(text: str) -> bool:
    return not [sign for sign in (*"\x07\x08\x7f\x9b\u202e\u2066", "\x1b]", "\x1b[2J") if sign in text]


def test_control_characters_are_shown_and_colours_left_out() -> None:
    assert printable("a\tb\r\nc é 🙂 שלום") == "a\tb\r\nc é 🙂 שלום"
    assert printable("\x1b[1;32mgreen\x1b[0m") == "green"
    assert printable("\x1b]0;t\x07") == r"\x1b]0;t\x07"
    assert printable("\u202e\x9b\u2028\ud800") == r"\u202e\x9b\u2028\ud800"
    assert harmless(printable(HOSTILE))


def test_a_terminal_shows_and_a_file_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    tty, file = Tty(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", tty)
    monkeypatch.setattr(sys, "stderr", file)
    with sanitized_output():
        print(HOSTILE, end="")
        print(HOSTILE, end="", file=sys.stderr)
    assert harmless(tty.getvalue())
    assert (file.getvalue(), sys.stdout) == (HOSTILE, tty)
    command = Tty()
    write = on_workers._writer_for(SanitizedStream(command))  # pyright: ignore[reportArgumentType]
    for byte in "é\x1b[2J".encode():
        write(bytes([byte]))
    assert command.getvalue() == r"é\x1b[2J"


def test_words_of_an_error_are_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stderr", tty := Tty())
    url = HOSTILE.replace("[", "").replace("]", "")
    assert main.run(["plan", "program=command", f"code.repository.url={url}"]) == 2
    assert "error" in tty.getvalue()
    assert harmless(tty.getvalue())


@pytest.mark.parametrize("on_terminal", [True, False])
def test_the_live_view(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, on_terminal: bool) -> None:
    """Log, notes, titles, metrics and summary come from workers; none of them is markup, and none ends `up`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLIPWAY_HOME", str(tmp_path / "home"))
    (tmp_path / "code.py").write_text("")
    monkeypatch.setattr(sys, "stdout", screen := Tty() if on_terminal else io.StringIO())
    words = ["plan", "cloud=local", "program=command", "program.command=[a]", "env.packages=none"]
    plan = build_plan(main.parse(words).options.config()[0], "slipway-local", tmp_path)
    titled = {"title": HOSTILE}
    said: list[tuple[str, dict[str, Any]]]
    said = [("log", {"worker": 0}), ("note", {}), ("step_started", titled), ("progress", {}), ("step_failed", titled)]
    said += [("metrics", {"metrics": m}) for m in anything()]
    with sanitized_output(), View(plan, json_lines=False) as view:
        for kind, data in said:
            view(Event(Clock().now(), kind, HOSTILE, HOSTILE, data))  # pyright: ignore[reportArgumentType]
        if view._live is not None:
            view._live.refresh()
        view.show_result(Result("r", "finished", 1, 0.0, 0.0, {HOSTILE: HOSTILE, "x": [HOSTILE], "y": float("nan")}))
    shown = screen.getvalue()
    assert "[/][bold]" in shown
    assert harmless(shown.replace("\x1b[2J", "") if on_terminal else shown)
    assert "\x1b[6n" not in shown


def anything() -> list[dict[str, Any]]:
    """Lines that a program may write as its metrics."""
    odd = [HOSTILE, [1], {"a": 1}, None, True, -1, 10**400, float("nan"), float("inf"), 1e300]
    lines = [{"step": value, "steps_total": value, "step_time": value, "loss": value, "phase": value} for value in odd]
    lines += [{**line, "step": 3, "tokens_per_second": line["loss"]} for line in lines]
    lines += [{**line, "phase": "eval", "eval_x": line["loss"]} for line in lines]
    return json.loads(json.dumps(lines))

"""Lines about metrics: the training line, an evaluation, and the results at the end of a run."""

from __future__ import annotations

from controller.core.layout import cell_width
from controller.core.metric_lines import evaluation_line, result_lines, training_line
from tests.controller.run.test_text_screen import GRPO

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


def test_step_and_remaining_time_stay_where_there_is_no_room() -> None:
    line = training_line(GRPO, 19.2, 78)
    assert line is not None
    assert cell_width(line) <= 78
    assert line.startswith("grpo step 165/188  ")
    assert "accuracy 0.7797" in line
    assert line.endswith("ETA 0:46, $0.25")
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

"""Metrics: lines, event files that TensorBoard reads, upload, and continuation after a cut."""

import itertools
import json
import math
import time
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

import conf.schema.training.loop
from tests.groups import load_group
from tests.trainer.lives import lines_of
from trainer.evaluation.puzzles import CLUE, MAZE, WHITE, WRONG, draw_puzzle
from trainer.rl.telemetry import AlertMonitor, MetricAverages
from trainer.telemetry.metrics import MAX_CELL_CHARS, MetricsLogger, Transcript, curve_tag, markdown_table, run_folder


def events_of(folder):
    events = EventAccumulator(str(folder / "tb"))
    events.Reload()
    return events


def curve(folder, tag):
    return {point.step: point.value for point in events_of(folder).Scalars(tag)}


@pytest.fixture
def folders(tmp_path, monkeypatch):
    # TensorBoard reads the files of a folder by name, which begins with the second in which each was made.
    seconds = itertools.count(int(time.time()))
    monkeypatch.setattr(event_file_writer, "time", SimpleNamespace(time=lambda: next(seconds)))
    return tmp_path / "local", tmp_path / "bucket"


def write(folders, first, last, factor=1.0, writes=True):
    log = MetricsLogger(folders[0], str(folders[1]), writes=writes)
    log.resume(first)
    for step in range(first + 1, last + 1):
        log.log(step, "train", loss=factor * step, accuracy=np.float32(0.5))
    return log


def test_lines_and_event_files_are_uploaded_whole(folders):
    log = write(folders, 0, 3)
    log.log_text(3, "sample", "two *words*")
    log.summarize(accuracy_after=0.5, name="x")
    log.close()
    for folder in folders:
        found = [(line["step"], line["phase"], line["loss"]) for line in lines_of(folder)]
        assert found == [(step, "train", float(step)) for step in (1, 2, 3)]
        assert curve(folder, "train/loss") == {1: 1.0, 2: 2.0, 3: 3.0}
        assert json.loads((folder / "summary.json").read_text()) == {"accuracy_after": 0.5, "name": "x"}
    events = events_of(folders[1])
    assert events.Tags()["tensors"] == ["sample"]
    assert events.Tensors("sample")[0].tensor_proto.string_val == [b"two *words*"]


def test_the_evaluation_of_the_checkpoint_is_made_again_and_ones_own_are_kept_and_known(folders):
    log = write(folders, 0, 4)
    for step in (3, 4):
        log.log(step, "eval", eval_loss=7.0)
        log.log_evaluation(step, "eval", "core", {"eval_core_metric": 0.25 + step})
    assert log.recorded(3, "core") is None  # only what an interrupted attempt has logged
    log.close()
    log = write(folders, 3, 3)
    assert log.recorded(3, "core") == {"eval_core_metric": 3.25}
    assert log.recorded(4, "core") is log.recorded(3, "other") is None
    log.close()
    found = [(line["step"], line.get("evaluation", line["phase"])) for line in lines_of(folders[1])]
    assert found == [(1, "train"), (2, "train"), (3, "train"), (3, "core")]
    assert curve(folders[1], "eval/core_metric") == {3: 3.25}
    log = write(folders, 0, 1)  # begins anew
    log.close()
    assert [(line["step"], line["loss"]) for line in lines_of(folders[1])] == [(1, 1)]


@pytest.mark.parametrize("same_machine", [True, False])
def test_resumed_at_a_step_the_lines_after_it_are_dropped(folders, tmp_path, same_machine):
    write(folders, 0, 5).close()
    with (folders[0] / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "pha')  # cut short by a kill
    second = folders if same_machine else (tmp_path / "new", folders[1])
    write(second, 3, 4, factor=10.0).close()
    for folder in second:
        assert [(line["step"], line["loss"]) for line in lines_of(folder)] == [(1, 1), (2, 2), (3, 3), (4, 40)]
    assert curve(folders[1], "train/loss") == {1: 1, 2: 2, 3: 3, 4: 40}


def test_other_processes_write_nothing(folders):
    log = write(folders, 0, 2, writes=False)
    log.log_text(1, "a", "b")
    log.summarize(a=1)
    log.close()
    assert not any(folder.exists() for folder in folders)


def test_run_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("SLIPWAY_RUN_DIR", raising=False)
    assert run_folder(tmp_path / "run.yaml", "r-1") == tmp_path / "r-1"
    monkeypatch.setenv("SLIPWAY_RUN_DIR", "/elsewhere")
    assert str(run_folder(tmp_path / "run.yaml", "r-1")) == "/elsewhere"


def test_transcripts_are_lines_and_a_table_and_go_on_after_a_cut(folders):
    def say(log, step, phase):
        log.log_transcripts(step, phase, [Transcript("2+2?", "4", "\u2028four\n#### 4", "4", 1.0)])

    log = write(folders, 0, 4)
    for step in (0, 2, 4):
        say(log, step, "eval")
    log.log_transcripts(4, "eval", [])
    log.close()
    log = write((folders[0].with_name("other"), folders[1]), 4, 4)
    say(log, 4, "test")
    log.close()
    rows = lines_of(folders[1], "transcripts.jsonl")
    assert [(row["step"], row["phase"]) for row in rows] == [(0, "eval"), (2, "eval"), (4, "test")]
    assert rows[2]["response"] == "\u2028four\n#### 4"
    events = events_of(folders[1])
    assert events.Tags()["tensors"] == ["transcripts/eval", "transcripts/test"]
    assert b"<br>#### 4 | 4 | 4 | 1 |" in events.Tensors("transcripts/test")[0].tensor_proto.string_val[0]


def test_alerts_are_lines_and_what_is_not_finite_is_null(folders) -> None:
    log = MetricsLogger(folders[0], str(folders[1]), writes=True)
    log.log_alert(7, "entropy", "it hardly explores")
    log.log(8, "train", loss=math.nan, kl=math.inf, reward=1)
    log.log_alert(9, "entropy", "")
    log.close()
    assert [{key: value for key, value in row.items() if key != "time"} for row in lines_of(folders[1])] == [
        {"step": 7, "phase": "alert", "alert": "entropy", "message": "it hardly explores"},
        {"step": 8, "phase": "train", "loss": None, "kl": None, "reward": 1.0},
        {"step": 9, "phase": "alert", "alert": "entropy", "over": True},
    ]
    assert not (folders[1] / "transcripts.jsonl").exists()


TAGS = {
    "eval_accuracy": "eval/accuracy",
    "test_pass_at_4": "test/pass_at_4",
    "eval_time": "time/eval_time",
    "rollout_tokens_per_second": "time/rollout_tokens_per_second",
    "reward_mean": "rollout/reward_mean",
    "response_length_max": "rollout/response_length_max",
    "loss": "train/loss",
    "reward/brief": "reward/brief",
}


def test_curves_share_a_section_with_their_like() -> None:
    assert {name: curve_tag(name) for name in TAGS} == TAGS


def test_a_row_per_transcript_whatever_it_holds() -> None:
    odd = Transcript("2+2?\nAnswer:", "4", "a|b <script>\r\n\n#### 4 & more", "4", 1.0)
    lines = markdown_table([odd, Transcript("q", "4", "x" * 9999, None, 0.0)]).split("\n")
    assert len(lines) == 4
    assert lines[2] == "| 2+2?<br>Answer: | a&#124;b &lt;script&gt;<br><br>#### 4 &amp; more | 4 | 4 | 1 |"
    assert lines[3].count("x") == MAX_CELL_CHARS
    assert lines[3].endswith(" … | (none) | 4 | 0 |")


SUDOKU = {"kind": "sudoku", "width": 4, "puzzle": "1...............", "solution": "1234341221434321",
          "steps": {"1": "1334341221434321", "4": "1234341221434321"}}  # fmt: skip
MAZE_BOARD = {"kind": "maze", "width": 3, "puzzle": "S.G##.###", "solution": "SoG##.###",
              "steps": {"1": "S.G##o###"}}  # fmt: skip


def colors(picture: np.ndarray) -> set[tuple[int, ...]]:
    return {tuple(pixel) for pixel in picture.reshape(-1, 3).tolist()}


def test_wrong_cells_are_red_and_clues_gray() -> None:
    picture = np.asarray(draw_puzzle(SUDOKU))
    puzzle, first, last = (picture[:, x : x + 145] for x in (8, 161, 314))
    assert WRONG in colors(first)
    assert WRONG not in colors(puzzle) | colors(last)
    for panel in (puzzle, first, last):
        assert tuple(panel[10, 3].tolist()) == CLUE, "the first cell, beside its digit"
    assert tuple(first[10, 39].tolist()) == WRONG, "the second cell"
    assert tuple(first[10, 75].tolist()) == WHITE, "the third"
    steps = {str(n): SUDOKU["solution"] for n in range(1, 8)}  # continue in a further row
    assert draw_puzzle(SUDOKU | {"steps": steps}).size == (4 * 153 + 8, 2 * 153 + 8)


def test_a_maze_shows_the_way_and_what_is_wrong_with_it() -> None:
    """The model leaves out a cell of the way and adds one: both have a red frame, around what the model says."""
    first = np.asarray(draw_puzzle(MAZE_BOARD))[8:, 161:]
    missing, added = first[:48, 48:96], first[48:96, 96:144]
    assert [tuple(cell[24, 24].tolist()) for cell in (missing, added)] == [WHITE, MAZE["o"]]
    assert [tuple(cell[24, 1].tolist()) for cell in (missing, added)] == [WRONG, WRONG]
    assert tuple(first[24, 24].tolist()) == MAZE["S"]


GOOD = {"loss": 1.0, "grad_norm": 1.0}


def test_means_extremes_and_the_newest() -> None:
    window = MetricAverages()
    for reward, ratio, rate in ((0.0, 0.9, 3.0), (1.0, 0.8, 2.0), (0.5, 1.1, 1.0)):
        window.add(GOOD | {"reward_mean": reward, "ratio_min": ratio, "ratio_max": ratio, "learning_rate": rate})
    expected = GOOD | {"reward_mean": 0.5, "ratio_min": 0.8, "ratio_max": 1.1, "learning_rate": 1.0}
    assert window.pop() == pytest.approx(expected)
    window.add(GOOD | {"reward_mean": 7.0})
    assert window.pop() == GOOD | {"reward_mean": 7.0}


@pytest.mark.parametrize(
    ("updates", "expected"),
    [
        ([{"kl": 2.0, "skipped": 0.0}, {"kl": math.nan, "skipped": 1.0, "loss": math.nan}], {"kl": 2.0} | GOOD),
        ([{"kl": 2.0, "skipped": 0.0}, {"kl": math.nan, "skipped": 1.0, "grad_norm": math.inf}], {"kl": 2.0} | GOOD),
        ([{"loss": math.nan, "skipped": 1.0}], {}),
    ],
)
def test_an_update_that_was_left_out_counts_as_skipped_only(updates, expected) -> None:
    window = MetricAverages()
    for values in updates:
        window.add(GOOD | values)
    assert window.pop() == expected | {"skipped": 1.0}


@pytest.mark.parametrize("values", [(0.5, math.nan, 2.0), (math.nan, 0.5, 2.0), (0.5, 2.0, math.nan)])
def test_an_extreme_that_is_not_a_number_shows_wherever_it_stands(values: tuple[float, ...]) -> None:
    window = MetricAverages()
    for value in values:
        window.add(GOOD | {"ratio_min": value, "ratio_max": value, "kl": value})
    found = window.pop()
    assert [name for name, value in found.items() if math.isnan(value)] == ["ratio_min", "ratio_max", "kl"]


def test_a_checkpoint_amid_a_window_changes_nothing() -> None:
    whole = cut = MetricAverages()
    for i in range(7):
        if i == 3:
            cut = MetricAverages.from_json(json.loads(json.dumps(whole.to_json())))
        for window in {whole, cut} if i >= 3 else {whole}:
            window.add(GOOD | {"kl": 0.1 * i, "kl_max": 0.1 * i})
    assert cut.pop() == whole.pop()


WELL = {"accuracy": 0.5, "zero_variance_groups": 0.2, "learning_rate": 1e-3, "entropy": 1.0}


def alerts(last: int = 10, **changes) -> AlertMonitor:
    wanted = {"zero_accuracy_updates": 3, "zero_variance_updates": 2}
    return AlertMonitor(conf.schema.training.loop.Alerts(**load_group("loop/grpo")["alerts"] | wanted | changes), last)


def said(watch: AlertMonitor, *updates: dict[str, float]) -> list[tuple[int, str]]:
    """(update, words) of every alert that is raised."""
    return [(step, message) for step, _, message in changes(watch, *updates) if message]


def changes(watch: AlertMonitor, *updates: dict[str, float]) -> list[tuple[int, str, str]]:
    checked = [(step, watch.check(step, WELL | values)) for step, values in enumerate(updates, 1)]
    return [(step, name, message) for step, found in checked for name, message in found.items()]


UNWATCHED = {"zero_learning_rate": False, "entropy_below": None, "zero_accuracy_updates": None}
UNWATCHED |= {"zero_variance_updates": None}
NO_RATE, NO_ANSWER, NO_VARIANCE = {"learning_rate": 0.0}, {"accuracy": 0.0}, {"zero_variance_groups": 1.0}


@pytest.mark.parametrize(
    ("settings", "updates", "at", "words"),
    [
        ({}, [{}] * 10, None, ""),
        # a warm-up may begin at 0; and once is enough
        ({}, [NO_RATE, {}, NO_RATE, NO_RATE], 3, "the learning rate is 0 with 7 updates to go"),
        ({"last": 2}, [{}, NO_RATE], None, ""),
        (
            {"entropy_below": 0.1},
            [{"entropy": 0.2}, {"entropy": 0.09}, {"entropy": 0.08}],
            2,
            "at loop.temperature is 0.09 nats",
        ),
        ({}, [NO_ANSWER] * 2 + [{}] + [NO_ANSWER] * 4, 6, "no answer was right in 3 updates"),
        ({}, [NO_VARIANCE, {}] + [NO_VARIANCE] * 3, 4, ""),
        (UNWATCHED, [{}] + [NO_RATE | NO_ANSWER | NO_VARIANCE | {"entropy": 0.0}] * 5, None, ""),
    ],
)
def test_each_is_said_once_at_its_update(settings, updates, at, words) -> None:
    found = said(alerts(**settings), *updates)
    assert [step for step, _ in found] == ([] if at is None else [at])
    assert all(words in message for _, message in found)


def test_samples_of_old_policies() -> None:
    """Each bound by itself; at the bound nothing is said, and neither where a loss has no such metric."""
    bounds = {"staleness_above": 4.0, "clip_fraction_above": 0.5, "effective_sample_size_below": 0.25}
    at = {"staleness_mean": 4.0, "clip_fraction": 0.5, "rollout_is_eff_sample_size": 0.25}
    beyond = {"staleness_mean": 4.5, "clip_fraction": 0.51, "rollout_is_eff_sample_size": 0.24}
    assert not said(alerts(**bounds), {}, at)
    assert not said(alerts(), beyond)
    for name, words in zip(beyond, ("4.5 updates old", "51% of the ratios", "24% of the tokens"), strict=True):
        [(step, message)] = said(alerts(**bounds), at, at | {name: beyond[name]})
        assert step == 2
        assert words in message


def test_an_alert_is_over_when_its_cause_is_and_is_not_raised_again() -> None:
    low, high = {"entropy": 0.01}, {"entropy": 1.0}
    found = changes(alerts(entropy_below=0.1), high, low, low, high, low, high)
    found += changes(alerts(), *[NO_ANSWER] * 5, {"accuracy": 0.5})
    expected = [(2, "entropy", True), (4, "entropy", False), (3, "accuracy", True), (6, "accuracy", False)]
    assert [(step, name, bool(message)) for step, name, message in found] == expected


def test_a_resumed_run_says_the_same() -> None:
    updates = [{"accuracy": 0.0}] * 5
    for cut in range(6):
        first, second = alerts(), alerts()
        before = said(first, *updates[:cut])
        second.state = json.loads(json.dumps(first.state))
        after = [(cut + step, words[:20]) for step, words in said(second, *updates[cut:])]
        assert len(before) + len(after) == 1
        assert [step for step, _ in before + after] == [3]


@pytest.mark.parametrize("times", [1, 10])
def test_resume_holds_no_more_of_a_long_run_than_of_a_short_one(folders, times) -> None:
    """Bytes allocated at 1,000 lines and at 10 x as many, which took 25 MB when all were held."""
    log = MetricsLogger(folders[0], str(folders[1]), writes=True)
    line = {"phase": "train", "time": 1.0, **{f"metric_{number}": number / 7 for number in range(15)}}
    text = "".join(json.dumps({"step": step} | line) + "\n" for step in range(1, 1000 * times + 1))
    (folders[0] / "metrics.jsonl").write_text(text)
    tracemalloc.start()
    try:
        log.resume(1000 * times - 1)
        assert tracemalloc.get_traced_memory()[1] < 1e6
    finally:
        tracemalloc.stop()
    assert (folders[0] / "metrics.jsonl").read_text() == "".join(text.splitlines(keepends=True)[:-1])
    log.close()

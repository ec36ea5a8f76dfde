"""Metrics: lines, event files that TensorBoard reads, upload, and continuation after a cut."""

import itertools
import json
import math
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from trainer.telemetry.metrics import MetricsLogger, run_folder
from trainer.telemetry.transcripts import Transcript


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def curve(folder, tag):
    events = EventAccumulator(str(folder / "tb"))
    events.Reload()
    return {point.step: point.value for point in events.Scalars(tag)}


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
        assert [(line["step"], line["phase"], line["loss"]) for line in lines(folder)] == [
            (1, "train", 1.0),
            (2, "train", 2.0),
            (3, "train", 3.0),
        ]
        assert curve(folder, "train/loss") == {1: 1.0, 2: 2.0, 3: 3.0}
        assert json.loads((folder / "summary.json").read_text()) == {"accuracy_after": 0.5, "name": "x"}
    events = EventAccumulator(str(folders[1] / "tb"))
    events.Reload()
    assert events.Tags()["tensors"] == ["sample"]
    assert events.Tensors("sample")[0].tensor_proto.string_val == [b"two *words*"]


def test_a_run_that_begins_anew_has_no_lines(folders):
    log = write(folders, 0, 2)
    log.log(0, "train", loss=5.0)
    log.close()
    write(folders, 0, 1).close()
    assert [(line["step"], line["loss"]) for line in lines(folders[1])] == [(1, 1)]


def test_the_evaluation_of_the_checkpoint_is_made_again(folders):
    log = write(folders, 0, 3)
    for step in (2, 3):
        log.log(step, "eval", eval_loss=7.0)
    log.close()
    write(folders, 3, 3).close()
    assert [(line["step"], line["phase"]) for line in lines(folders[1])] == [
        *((1, "train"), (2, "train"), (3, "train"), (2, "eval"))
    ]


def test_evaluations_of_ones_own_are_kept_and_known(folders):
    log = write(folders, 0, 4)
    for step in (3, 4):
        log.log_evaluation(step, "eval", "core", {"eval_core_metric": 0.25 + step})
    assert log.recorded(3, "core") is None  # only what an interrupted attempt has logged
    log.close()
    log = write(folders, 3, 3)
    assert log.recorded(3, "core") == {"eval_core_metric": 3.25}
    assert log.recorded(4, "core") is None
    assert log.recorded(3, "other") is None
    log.close()
    assert [(line["step"], line.get("evaluation")) for line in lines(folders[1]) if line["phase"] == "eval"] == [
        (3, "core")
    ]
    assert curve(folders[1], "eval/core_metric") == {3: 3.25}


@pytest.mark.parametrize("same_machine", [True, False])
def test_resumed_at_a_step_the_lines_after_it_are_dropped(folders, tmp_path, same_machine):
    write(folders, 0, 5).close()
    with (folders[0] / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "pha')  # cut short by a kill
    second = folders if same_machine else (tmp_path / "new", folders[1])
    write(second, 3, 4, factor=10.0).close()
    for folder in second:
        assert [(line["step"], line["loss"]) for line in lines(folder)] == [(1, 1), (2, 2), (3, 3), (4, 40)]
    assert curve(folders[1], "train/loss") == {1: 1, 2: 2, 3: 3, 4: 40}


def test_what_is_not_finite_is_null(folders):
    log = MetricsLogger(folders[0], str(folders[1]), writes=True)
    log.log(1, "train", loss=math.nan, kl=math.inf, reward=1)
    log.close()
    (line,) = lines(folders[1])
    assert (line["loss"], line["kl"], line["reward"]) == (None, None, 1.0)


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
    rows = [json.loads(line) for line in (folders[1] / "transcripts.jsonl").read_text().splitlines()]
    assert [(row["step"], row["phase"]) for row in rows] == [(0, "eval"), (2, "eval"), (4, "test")]
    assert rows[2]["response"] == "\u2028four\n#### 4"
    events = EventAccumulator(str(folders[1] / "tb"))
    events.Reload()
    assert events.Tags()["tensors"] == ["transcripts/eval", "transcripts/test"]
    assert b"<br>#### 4 | 4 | 4 | 1 |" in events.Tensors("transcripts/test")[0].tensor_proto.string_val[0]


def test_a_loop_without_transcripts_leaves_no_file(folders):
    write(folders, 0, 2).close()
    assert not (folders[1] / "transcripts.jsonl").exists()


def test_an_alert_is_a_line_that_the_controller_reads(tmp_path: Path) -> None:
    log = MetricsLogger(tmp_path / "local", str(tmp_path / "run"), writes=True)
    log.log_alert(7, "entropy", "it hardly explores")
    log.log_alert(9, "entropy", "")
    log.close()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [{key: value for key, value in row.items() if key != "time"} for row in rows] == [
        {"step": 7, "phase": "alert", "alert": "entropy", "message": "it hardly explores"},
        {"step": 9, "phase": "alert", "alert": "entropy", "over": True},
    ]

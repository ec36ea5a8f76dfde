"""Where the time of a run went."""

from pathlib import Path
from typing import Any

import pytest

from controller.records import index
from controller.report.gather import MetricsLine, RecordedRun, gather_runs, local_reader
from controller.report.model import build_report, build_timeline
from controller.report.page import render
from tests.controller.report.recorded import CASES, PREEMPTION_NOTE, metric_lines, write_run


def note(time: float, **data: object) -> dict[str, object]:
    return {"time": time, "kind": "note", "subject": "r", "message": "words", **data}


def test_a_preempted_run_as_recorded(tmp_path: Path) -> None:
    write_run(tmp_path, CASES[0], 1, 1000.0, metric_lines(CASES[0], 1, 60, 5))
    [run] = gather_runs(index.load_rows(tmp_path), local_reader(tmp_path))
    found = build_timeline(run)
    kinds = [span.kind for span in found.spans]
    first, second = ["provisioning", "starting", "training", "lost"], ["recovery", "starting", "training", "closing"]
    assert kinds == first + second
    assert found.spans[0].start == 1000.0
    assert all(a.end == b.start for a, b in zip(found.spans, found.spans[1:], strict=False))
    seconds = [found.seconds_of(kind) for kind in ("provisioning", "lost", "recovery", "closing")]
    assert seconds == [*map(pytest.approx, (12.0, 9.0, 15.0)), pytest.approx(2.0, abs=0.01)]
    assert [mark.message for mark in found.interruptions] == [PREEMPTION_NOTE]
    assert found.goodput == pytest.approx(found.seconds_of("training") / found.seconds, rel=0.01)
    assert (found.attempts, found.usd) == (2, pytest.approx(19.2 * found.seconds / 3600, rel=0.01))


def spans(events: list[Any], *lines: tuple[float, int, float | None], **row: Any) -> list[tuple[str, float]]:
    """Kind and seconds of each span of a run."""
    run = RecordedRun(
        {"run": "r", "state": "finished", **row}, None, {}, [MetricsLine(*line) for line in lines], events
    )
    return [(span.kind, span.seconds) for span in build_timeline(run).spans]


def test_the_first_line_tells_of_updates_before_it() -> None:
    found = spans([note(10.0, attempt=1)], (50.0, 10, 2.0), (70.0, 20, 2.0), ended=100.0)
    assert found == [("starting", 20.0), ("training", 40.0), ("closing", 30.0)]


def test_a_program_that_tells_no_steps_just_runs() -> None:
    row = {"run": "r", "state": "finished", "ended": 60.0, "pods": [{"began": 0.0}]}
    assert spans([note(20.0, attempt=1)], **row) == [("provisioning", 20.0), ("running", 40.0)]
    assert build_timeline(RecordedRun(row, None, events=[note(20.0, attempt=1)])).goodput is None


def test_an_attempt_that_never_came_to_an_update_is_lost() -> None:
    events = [note(10.0, attempt=1), note(30.0, attempt=1, verdict="preempted"), note(40.0, attempt=2)]
    found = spans(events, (50.0, 1, None), (60.0, 2, None), state="running")
    assert found == [("lost", 20.0), ("recovery", 10.0), ("starting", 10.0), ("training", 10.0)]


def test_without_events_the_record_says_when_it_was_launched() -> None:
    row = {"created": 10.0, "ended": 40.0, "attempts": 3, "pods": [{"began": 0.0}]}
    found = spans([], (20.0, 1, None), (30.0, 2, None), **row)
    assert [kind for kind, _ in found] == ["provisioning", "starting", "training", "closing"]
    assert build_timeline(RecordedRun({"run": "r"}, None)).spans == ()


def test_alerts_last_until_they_are_over() -> None:
    def alert(time: float, name: str, over: bool = False, message: str = "") -> dict[str, object]:
        return {"time": time, "kind": "alert", "alert": name, "over": over, "attempt": 1, "message": message}

    events = [
        note(10.0, attempt=1),
        alert(20.0, "slow", message="slow: 40 % of the usual"),
        alert(25.0, "no output", message="no output: silent"),
        alert(30.0, "slow", over=True, message="slow is over"),
        alert(40.0, "slow", message="slow: 30 % of the usual"),
    ]
    run = RecordedRun({"run": "r", "state": "running"}, None, {}, [], events)
    found = build_timeline(run)
    assert [(one.time, one.name, one.message, one.ended) for one in found.alerts] == [
        (20.0, "slow", "40 % of the usual", 30.0),
        (25.0, "no output", "silent", None),
        (40.0, "slow", "30 % of the usual", None),
    ]
    assert found.attempts == 1
    page = render(build_report("r", [run]), 100.0)
    assert page.count("<li><b>r</b>") == 3
    assert "UTC, over after 10 s: <b>slow</b>: 40 % of the usual</li>" in page
    assert "<dt>alerts</dt><dd>3</dd>" in page

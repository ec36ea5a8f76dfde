"""What `python -m tests.witness` prints and how it exits; the replay itself is in test_replay.py."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import pytest

from controller.witness.recording import REQUESTS
from tests.witness import __main__ as witness
from tests.witness.compare import Difference
from tests.witness.replay import Report
from tests.witness.test_replay import line

FOUND = Difference("status", "tpu.x.get", "GET v2/n", "403", "200")


def replayed(monkeypatch: pytest.MonkeyPatch, folder: Path, report: Report, *flags: str) -> int:
    """Run the command with a replay that ends in this report."""
    recorded = line("x.get", "v1/n", {})
    (folder / REQUESTS).write_text(json.dumps({"format": 1, **asdict(recorded)}) + "\n")
    monkeypatch.setattr(witness, "running_cloud", lambda start: nullcontext())
    monkeypatch.setattr(witness, "replay", lambda lines, cloud: report if lines == [recorded] else None)
    return witness.main([str(folder), *flags])


def test_differences_are_printed_and_end_with_1(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Report({FOUND.key: FOUND}, ["a.get not judged"], sent=1)
    assert replayed(monkeypatch, tmp_path, report) == 1
    out = capsys.readouterr().out
    assert out == f"{FOUND}\n1 recorded requests, 1 sent, 1 differences\n"
    assert replayed(monkeypatch, tmp_path, report, "--notes") == 1
    assert "note: a.get not judged\n" in capsys.readouterr().out


def test_without_a_difference_it_ends_with_0(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replayed(monkeypatch, tmp_path, Report(sent=1), "--notes") == 0
    assert capsys.readouterr().out == "1 recorded requests, 1 sent, 0 differences\n"


@pytest.mark.parametrize("text", [None, "no json\n", '{"format": 99}\n', "[1]\n"])
def test_a_folder_without_a_recording_ends_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None
) -> None:
    if text is not None:
        (tmp_path / REQUESTS).write_text(text)
    assert witness.main([str(tmp_path)]) == 2
    assert f"error: {tmp_path} holds no recording: " in capsys.readouterr().err

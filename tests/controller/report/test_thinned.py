"""A report's memory does not grow with its runs, and what it says of them stays right."""

import io
import json
import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from controller.core.this_process import Clock
from controller.gcp.folder_store import FolderClient
from controller.report.contents import build_report, build_timeline
from controller.report.gather import RecordedRun, bucket_reader, gather_runs, local_reader
from controller.report.scaling import _reached
from controller.report.thinned import FEWEST, MAX_TRANSCRIPTS, MOST, Thinned, sample_transcripts
from tests.fakes.google import MemoryStorage

ROW = {"run": "r", "state": "finished", "created": 0.0}


def lines(count: int) -> Iterator[str]:
    for step in range(1, count + 1):
        values = {f"metric_{number}": step * number / 7 for number in range(3)}
        yield json.dumps({"step": step, "phase": "train", "time": 10.0 + step / 8, "step_time": 0.125, **values}) + "\n"


@pytest.mark.parametrize("times", [1, 10])
def test_what_is_kept_of_a_run_is_bounded_and_its_ends_and_times_are_exact(tmp_path: Path, times: int) -> None:
    """Bytes that are allocated at 3,000 lines and at 10 x as many, where whole curves take 15 MB."""
    folder, count = tmp_path / "runs/r", 3_000 * times
    folder.mkdir(parents=True)
    with (folder / "metrics.jsonl").open("w") as file:
        file.writelines(lines(count))
    notes = [{"time": "1970-01-01T00:00:05+00:00", "attempt": 1}, {"time": "1970-01-01T00:01:30.1+00:00", "attempt": 2}]
    (folder / "events.jsonl").write_text("".join(json.dumps({"format": 1, "kind": "note", **n}) + "\n" for n in notes))
    tracemalloc.start()
    try:
        [run] = gather_runs([ROW], local_reader(tmp_path))
        assert tracemalloc.get_traced_memory()[1] < 6e6
    finally:
        tracemalloc.stop()
    curve = run.curves["train", "metric_1"]
    assert min(count, FEWEST // 2) <= len(curve) <= MOST
    assert all(value == step / 7 for step, value in curve.items())
    assert (min(curve), max(curve)) == (1.0, count)
    gaps = [after - before for before, after in zip(curve, [*curve][1:], strict=False)]
    assert max(gaps) <= 4 * count / FEWEST
    spans = build_timeline(run).spans
    assert [(s.kind, s.start, s.end) for s in spans if s.kind == "training"] == [
        ("training", 10.0, 90.0), ("training", 90.1, 10 + count / 8)
    ]  # fmt: skip


@pytest.mark.parametrize("usual", [0.0, 1.0, 5.0])
@pytest.mark.parametrize("rare", [(3333, 6667), (7, 9999), (0, 4)])
def test_a_rare_value_is_no_constant_and_is_reached_when_it_was(usual: float, rare: tuple[int, int]) -> None:
    """Two of 10,000 steps, of which as few are kept as of any."""
    curve: Thinned[float | None] = Thinned()
    for step in range(10_000):
        curve.add(step, 3.0 if step in rare else usual)
    assert set(curve.values()) == {3.0, usual}
    assert len(curve) <= MOST
    run = RecordedRun(ROW, None, {("train", "reward"): curve})
    report = build_report("r", [run])
    metric = ("train", "reward")
    assert report.constants == {}
    assert report.curves(metric)
    [reached] = _reached(report, report.settings[0], metric, 3.0, usual > 3.0)
    assert reached.steps == rare[0]


def test_of_noise_the_extremes_are_kept_and_no_more_than_most() -> None:
    curve, chance = Thinned[float | None](), random.Random(1)
    told = [chance.gauss(0.0, 1.0) for _ in range(30_000)]
    for step, value in enumerate(told):
        curve.add(step, value)
        assert len(curve) <= MOST
    assert (min(curve.values()), max(curve.values())) == (min(told), max(told))  # type: ignore[type-var]
    assert {step: told[int(step)] for step in curve} == curve


def test_the_attempt_that_was_told_last_counts_and_a_number_before_none() -> None:
    curve: Thinned[float | None] = Thinned()
    for step in range(MOST):
        curve.add(step, 1.0)
    for step in range(MOST // 2, MOST + 1):
        curve.add(step, 2.0 if step % 7 else None)
    assert len(curve) <= FEWEST + 2
    later = {step: value for step, value in curve.items() if step >= MOST // 2}
    assert set(later.values()) == {2.0}
    assert {value for step, value in curve.items() if step < MOST // 2} == {1.0}
    curve.add(1e308, None)
    assert curve[1e308] is None
    for step in range(2 * MOST):
        curve.add(-1e308 + step * 1e304, 3.0)
    assert len(curve) <= MOST
    assert (min(curve), max(curve), curve[1e308]) == (-1e308, 1e308, None)


def test_a_bucket_is_read_piece_by_piece_while_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controller.report.gather.DOWNLOADED_BYTES", 1000)
    name, told = "runs/r/metrics.jsonl", [line.encode() for line in lines(40)]
    made = MemoryStorage(b={name: b"".join(told[:30])})
    real, sizes = made.download_range, list[int]()

    def download_range(bucket: str, name: str, generation: str, begin: int, end: int) -> bytes:
        if len(sizes) == 2:  # its next upload
            made.upload("b", name, b"".join(told))
        sizes.append(end - begin)
        return real(bucket, name, generation, begin, end)

    made.download_range = download_range  # type: ignore[method-assign]
    [run] = gather_runs([ROW], bucket_reader(made, "b", lambda run, name: ()))
    assert sorted(run.curves["train", "metric_0"]) == [*range(1, 41)]
    assert max(sizes) == 1000
    assert sum(sizes) == sum(map(len, told)) + 1000


@pytest.mark.parametrize(("now", "found"), [("shorter", [1, 2, 3]), ("empty", [1, 2]), ("gone", [1, 2])])
def test_an_object_that_was_replaced_or_deleted_since_it_was_listed_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, now: str, found: list[int]
) -> None:
    """A folder's, which has one generation only."""
    monkeypatch.setattr("controller.report.gather.DOWNLOADED_BYTES", 200)
    bucket, store = str(tmp_path), FolderClient(Clock())
    made, told = tmp_path / "runs/r/metrics.jsonl", [*lines(9)]
    made.parent.mkdir(parents=True)
    made.write_text("".join(told))
    real, reads = store.download_range, list[int]()

    def download_range(bucket: str, name: str, generation: str, begin: int, end: int) -> bytes:
        reads.append(begin)
        assert len(reads) < 20, "it ends"
        if len(reads) == 3:
            made.unlink() if now == "gone" else made.write_text("".join(told[:3]) if now == "shorter" else "")
        return real(bucket, name, generation, begin, end)

    monkeypatch.setattr(store, "download_range", download_range)
    [run] = gather_runs([ROW], bucket_reader(store, bucket, lambda run, name: ()))
    assert [*run.curves["train", "metric_0"]] == found


def test_of_transcripts_a_few_are_kept_and_all_are_counted() -> None:
    def row(step: int, prompt: int) -> dict[str, Any]:
        return {"step": step, "phase": "eval", "prompt": f"{prompt}", "response": f"of {step}"}

    read = list[int]()

    def rows() -> Iterator[dict[str, Any]]:
        for step in range(1, 101):
            for prompt in range(9):
                read.append(step)
                yield row(step, prompt)

    found, count = sample_transcripts(rows)
    assert (count, found) == (900, [row(step, prompt) for prompt in range(MAX_TRANSCRIPTS) for step in (1, 100)])
    assert len(read) == 900 + MAX_TRANSCRIPTS
    assert sample_transcripts(lambda: iter([row(1, 0)])) == ([row(1, 0)], 1)
    assert sample_transcripts(lambda: io.StringIO()) == ([], 0)  # type: ignore[arg-type, return-value]

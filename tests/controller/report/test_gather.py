"""What a report is made of is somebody else's: TensorBoard's files, where the time went, words that are only text."""

import io
import json
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import IO, Any

import pytest
from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer
from tensorboard.summary import Writer

from controller.cli import main
from controller.cli.verbs import reports
from controller.records import index
from controller.report.contents import build_report, build_timeline
from controller.report.gather import (
    OVERLAP_BYTES,
    MetricsLine,
    RecordedRun,
    TensorBoardMirror,
    folder_name,
    gather_runs,
    local_reader,
)
from controller.report.page import render
from tests.controller.core.test_text import Tty, harmless
from tests.controller.report.recorded import CASES, PREEMPTION_NOTE, metric_lines, write_run, write_sweep
from tests.fakes.google import MemoryStorage
from tests.golden import golden
from tests.hostile import HOSTILE_STRINGS


def test_each_run_is_one_of_tensorboards(tmp_path: Path) -> None:
    google = MemoryStorage(b={})
    for run, value in (("q-1", 1.0), ("q-2", 2.0)):
        writer = Writer(str(tmp_path / "there" / run))
        writer.add_scalar("loss", value, 3)
        writer.close()
        [file] = (tmp_path / "there" / run).iterdir()
        google.buckets["b"][f"runs/{run}/tb/{file.name}"] = file.read_bytes()
    mirror = TensorBoardMirror(google, "b", {run: tmp_path / "here" / f"lr=1_{run}" for run in ("q-1", "q-2")})
    assert mirror.update({"q-1", "q-2"}) == 2
    assert mirror.update({"q-1", "q-2"}) == 0
    found = EventMultiplexer().AddRunsFromDirectory(str(tmp_path / "here"))
    found.Reload()
    assert sorted(found.Runs()) == ["lr=1_q-1", "lr=1_q-2"]


def test_a_file_that_grows_is_gone_on_with_in_place(tmp_path: Path) -> None:
    google = MemoryStorage(b={})
    mirror, file = TensorBoardMirror(google, "b", {"q-1": tmp_path / "q"}), tmp_path / "q" / "events.1"
    google.buckets["b"]["runs/q-1/tb/events.1"] = b"one"
    mirror.update({"q-1"})
    with file.open("rb") as reader:
        assert reader.read() == b"one"
        google.buckets["b"]["runs/q-1/tb/events.1"] = b"one two"
        assert mirror.update({"q-1"}) == 1
        assert reader.read() == b" two"
    google.buckets["b"]["runs/q-1/tb/events.1"] = b"other"
    mirror.update({"q-1"})
    assert file.read_bytes() == b"other"


def test_of_a_file_that_grows_only_what_is_new_is_downloaded(tmp_path: Path) -> None:
    """Also by the next call of the verb, whose mirror knows nothing yet."""
    google, whole = MemoryStorage(b={}), b""
    for number in range(100):
        whole += bytes([number]) * 5000
        google.buckets["b"]["runs/q-1/tb/events.1"] = whole
        if number % 50 == 0:
            mirror = TensorBoardMirror(google, "b", {"q-1": tmp_path})
        assert mirror.update({"q-1"}) == 1
    assert (tmp_path / "events.1").read_bytes() == whole
    assert google.sent <= len(whole) + 100 * OVERLAP_BYTES


def test_workers_name_no_other_file(tmp_path: Path) -> None:
    google = MemoryStorage(b={})
    for name in ("../../planted", "a/../../planted", "/planted", "", ".ssh", "a//b", "a\nb", "a" * 300):
        google.buckets["b"][f"runs/q-1/tb/{name}"] = b"x"
    assert TensorBoardMirror(google, "b", {"q-1": tmp_path / "a" / "b"}).update({"q-1"}) == 0
    assert list(tmp_path.iterdir()) == []
    assert folder_name("lr=0.1 kl=0 seed 3", "quickstart-0123abcd") == "lr=0.1_kl=0_seed_3_0123abcd"
    assert folder_name("../../é\x00/$(x)", "quickstart-0123abcd") == "x_0123abcd"
    assert folder_name("..", "quickstart-0123abcd") == "quickstart-0123abcd"


def test_which_bucket(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = write_sweep(home, seeds=(0,), steps=30)
    rows: list[Any] = [{"run": run, "cloud": "gcp", "project": "a-project", "bucket": "b"} for run in ids]
    index.append_rows(home, rows)
    command = main.parse(["tensorboard", "--sweep", "quickstart"])
    assert reports.compose_config(rows, command).cloud.project == "a-project"
    shown = reports.display_names(index.load_rows(home), home)
    assert shown[ids[3]] == f"lr=0.0007_kl_coef=0.001_seed_0_{ids[3][-8:]}"
    index.append_rows(home, [{"run": ids[0], "bucket": "another"}])
    assert main.run(["tensorboard", "--sweep", "quickstart"]) == 2
    assert "these runs are in several buckets" in capsys.readouterr().err


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


MARKUP = (
    "</script><script>document.title='taken'</script>", "<img src=x onerror=alert(1)>", "</td></tr></table><h1>taken",
    '" onfocus="alert(1)" autofocus="', "' style='position:fixed", "<!-- ", "]]>", "</title><svg onload=alert(1)>",
    "&lt;b&gt;", "javascript:alert(1)", "</style><style>*{display:none}", "<a href=//evil.example>x</a>",
    "\u2028</script >",
)  # fmt: skip
WORDS = tuple(word[:300] for word in (*MARKUP, *HOSTILE_STRINGS))


class Seen(HTMLParser):
    """Tags with their attributes, and texts, as a browser takes them."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def page_of(home: Path) -> str:
    return render(build_report("sweep-1", gather_runs(index.load_rows(home), local_reader(home))), 1e9)


def with_words(home: Path, words: tuple[str, ...]) -> Path:
    """Six runs in which every text is one of them."""
    some = list(words)
    for i in range(6):
        word = some[i % len(some)]
        names = {name: 1.0 + i for name in some if name not in ("step", "phase", "time")}
        lines = [{"step": 1, "phase": word, **names}, {"step": 2, "phase": "x", "a": 1.0}]
        run = write_run(home, (f"loop.kl_coef={i / 10}",), i, 1000.0 + i, lines)
        row = dict.fromkeys(("seed", "name", "code", "commit", "state"), word) | {"metrics": dict.fromkeys(some, 1.0)}
        index.append_rows(home, [{"run": run, "overrides": ["+experiment=q", f"a={word}", f"b={i}"], **row}])
        folder = home / "runs" / run
        told = ("prompt", "response", "answer", "extracted", "reward")
        asked = [{"step": word, "phase": word, **dict.fromkeys(told, each)} for each in some]
        (folder / "transcripts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in asked))
        note = {"format": 1, "time": "2026-01-01T00:00:00Z", "kind": "note", "subject": run, "message": word}
        notes = [note | {"attempt": 1}, note | {"attempt": 1, "verdict": word}]
        (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in notes))
    return home


@pytest.fixture(scope="module")
def hostile_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    return page_of(with_words(tmp_path_factory.mktemp("hostile"), WORDS))


def test_what_a_later_slipway_or_nobody_wrote_hides_no_other_run(capsys: pytest.CaptureFixture[str]) -> None:
    later = json.dumps(golden("record") | {"format": 2}).encode()
    files = {"q-1": later, "q-2": b"\xff{[", "q-3": json.dumps(golden("record")).encode()}

    def read(run: str, name: str) -> list[IO[bytes]]:
        return [io.BytesIO(b'no line\n{"step": 1, "loss": 0.5}\n' if name == "metrics.jsonl" else files[run])]

    found = gather_runs([{"run": run, "created": 1.0} for run in files], read)
    assert [run.row["run"] for run in found] == ["q-1", "q-2", "q-3"]
    assert [run.curves["", "loss"] for run in found] == [{1: 0.5}] * 3
    assert [run.record is not None for run in found] == [False, False, True]
    assert "warning: left out: q-1: record.json has format 2" in capsys.readouterr().err


def test_no_text_becomes_markup(tmp_path: Path, hostile_page: str) -> None:
    """As many tags, with the same attributes, as a page of plain words has, and none that could ask for something."""
    plain = Seen(page_of(with_words(tmp_path / "plain", tuple(f"word{i}" for i in range(len(WORDS))))))
    hostile = Seen(hostile_page)

    def shape(seen: Seen) -> set[tuple[str, tuple[str, ...]]]:
        return {(tag, tuple(sorted(attributes))) for tag, attributes in seen.tags}

    assert shape(hostile) <= shape(plain)
    count = {tag for tag, _ in hostile.tags}
    for tag in ("style", "link", "h1", "meta", "main", "section"):
        assert sum(t == tag for t, _ in hostile.tags) == sum(t == tag for t, _ in plain.tags), tag
    assert not count & {"img", "iframe", "object", "embed", "form", "base", "use", "image", "foreignobject"}
    for tag, attributes in hostile.tags:
        assert not [name for name in attributes if name.startswith("on") or name in ("style", "src", "srcset")], tag
        link = attributes.get("href") or ""
        assert link.startswith("#") or link in ("", "data:,")
    assert "".join(hostile.texts).count("document.title='taken'") > 10


def test_the_page_has_no_script_and_may_request_nothing(hostile_page: str) -> None:
    """All that reacts is native: links within the page, and folds, which a keyboard opens."""
    page, seen = hostile_page, Seen(hostile_page)
    names = [tag for tag, _ in seen.tags]
    assert "script" not in names
    [policy] = [a["content"] for tag, a in seen.tags if tag == "meta" and a.get("http-equiv")]
    assert policy is not None
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "url(" not in page
    assert "@import" not in page
    assert names.count("details") == names.count("summary") > 6
    assert {a["tabindex"] for _, a in seen.tags if "tabindex" in a} == {"0"}
    assert not {"input", "select", "button", "textarea"} & set(names)
    ids = {a["id"] for _, a in seen.tags if "id" in a}
    assert {a["href"] for tag, a in seen.tags if tag == "a"} <= {f"#{name}" for name in ids}


def test_no_text_forges_a_row_of_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`runs` on a terminal, and into a file whose encoding cannot hold all of it."""
    words = ("a\rFORGED\x1b[2J", "b\nFORGED\x1b]0;x\x07", "c\u202e\u2028FORGED", "d\x85FORGED", "e\ud800", "x")
    page = page_of(with_words(tmp_path / "page", ("a\x1b[2Jb\u202ec\x00d\ud800e", "x")))
    assert not {"\x1b", "\u202e", "\x00"} & set(page)
    assert r"\x1b[2Jb\u202ec\x00d\ud800e" in page
    page.encode()
    home = with_words(tmp_path / "home", words)
    monkeypatch.setenv("SLIPWAY_HOME", str(home))
    monkeypatch.chdir(tmp_path)
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    for screen in (Tty(), file):
        monkeypatch.setattr(sys, "stdout", screen)
        assert main.run(["runs"]) == 0
        screen.seek(0)
        shown = screen.read()
        assert shown.isascii() or isinstance(screen, Tty)
        assert harmless(shown)
        assert not {"\r", "\x85", "\u2028", "\ud800"} & set(shown)
        assert not [line for line in shown.splitlines() if line.startswith("FORGED")]
        runs = [row["run"] for row in index.load_rows(home)]
        assert all(run[-8:] in line for run, line in zip(runs, shown.splitlines()[1:7], strict=True))

"""A line per run: on a terminal, in a file, and from another process."""

import io
import json
import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from controller.cli import main
from controller.cli.verbs import sweeps
from controller.core.events import Event
from controller.core.this_process import Clock
from controller.lease_store import process_id
from controller.records import index
from controller.records.ledger import Result
from controller.sweep.board import (
    Board,
    BoardRow,
    BoardScreen,
    format_cost,
    format_table,
    live_board,
    load_board,
    render_board,
    run_ids_by_sweep,
    sparkline,
)
from tests.fakes.clock import ManualClock
from tests.terminal import Tty


def board(file: Path, *lines: BoardRow, clock: Clock | None = None, json_lines: bool = False) -> Board:
    file.parent.mkdir(parents=True, exist_ok=True)
    return Board(lines, file, clock or ManualClock(1000.0), json_lines=json_lines)


def text(lines: list[BoardRow], height: int = 20, width: int = 140) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(render_board(lines, 1060.0, height, width))
    return console.export_text()


STEPS: dict[str, Any] = {"step": 5, "steps_total": 10, "step_time": 2.0, "metric": "loss", "values": [2.0, 1.0]}


def test_what_a_line_shows() -> None:
    line = BoardRow("q-1", "seed=1", "running", 2, 1000.0, usd_per_hour=60.0, **STEPS)
    row = text([line, BoardRow("q-2", "seed=2")]).splitlines()[1].split()
    assert row == ["q-1", "seed=1", "2", "running", "60", "s", "5/10", "loss", "1", "█▁", "0:10", "1.0", "pod",
                   "minutes,", "about", "$1.00"]  # fmt: skip
    assert "1 running, 1 waiting" in text([line, BoardRow("q-2", "seed=2")])
    many = [*(BoardRow(f"w-{i}", "") for i in range(50)), *(BoardRow(f"r-{i}", "", "running") for i in range(3))]
    shown = text(many, height=5)  # where there is no room for all those that run come first
    assert (sum(f"r-{i}" in shown for i in range(3)), shown.count("w-")) == (3, 2)
    assert "50 waiting, 3 running; not shown: 48 waiting" in shown


def test_the_cost_counts_every_try(tmp_path: Path) -> None:
    clock = ManualClock(1000.0)
    made = board(tmp_path / "s.json", BoardRow("q-1", ""), clock=clock)
    made.set_state("q-1", "running", began=clock.now())
    BoardScreen(made, "q-1", clock).set_price(36.0)
    clock.elapsed += 100
    made.set_state("q-1", "failed")
    clock.elapsed += 5000  # nobody pays for that
    [line] = made.rows()
    assert format_cost(line, clock.now()) == "1.7 pod minutes, about $1.00"
    made.set_state("q-1", "running", began=clock.now())
    clock.elapsed += 100
    assert format_cost(line, clock.now()) == "3.3 pod minutes, about $2.00"


def test_on_a_terminal_what_is_said_stands_above_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    glass = Tty()
    monkeypatch.setattr(sys, "stdout", glass)
    monkeypatch.setenv("TERM", "xterm")
    made = board(tmp_path / "s.json", *(BoardRow(f"q-{i}", f"seed={i}") for i in range(4)))
    with live_board(made, ManualClock(1000.0)):
        threads = [threading.Thread(target=made.set_state, args=(f"q-{i}", "running", "\x1b[2J")) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(240)
        assert not any(thread.is_alive() for thread in threads)  # who draws and who speaks do not wait for each other
        step = Event(0.0, "metrics", "q-1", data={"metrics": {"step": 7, "loss": 0.5}})
        BoardScreen(made, "q-1", ManualClock(1000.0))(step)
    said = glass.getvalue()
    assert said.count("running: \\x1b[2J") == 4
    assert "\x1b[2J" not in said
    assert "4 running" in said
    made.announce(BoardRow("q-9", ""), "afterwards")
    assert glass.getvalue().endswith("q-9    afterwards\n")


SWEEP = [
    BoardRow(f"quickstart-{11 * i:08x}", f"optimizer.lr={lr} run.seed={seed}", "running", 1 + i % 2, 940.0, None, 120,
             188, 1.9, "accuracy", [0.1, 0.5, 0.7797], usd_per_hour=19.2)
    for i, (lr, seed) in enumerate((lr, seed) for lr in ("0.0001", "0.0007") for seed in (0, 1))
]  # fmt: skip


def test_in_80_columns_seed_rate_hash_step_and_eta_stay() -> None:
    lines = [*SWEEP, BoardRow("quickstart-0badcafe", "optimizer.lr=0.001 run.seed=0", "waiting")]
    for shown in (text(lines, width=80).splitlines(), format_table(lines, 1060.0, 80)):
        assert max(map(len, shown)) <= 80
        for row, line in zip(lines, shown[1:], strict=False):
            assert line.startswith(row.run.rpartition("-")[2])
            assert f"lr={row.title.split()[0].partition('=')[2]} seed={row.title[-1]}" in line
            assert row.state in line
            assert row.step is None or ("120/188" in line and "2:09" in line)
    wide = text(lines, width=160)
    assert "quickstart-0badcafe" in wide
    assert "optimizer.lr=0.001" in wide
    words = [f"loop.a_rather_long_key_{i}={i}" for i in range(6)]
    folded = format_table([BoardRow("q-0badcafe", " ".join(words), "running", 1, 940.0)], 1060.0, 80)
    assert max(map(len, folded)) <= 80
    assert all(word.partition(".")[2] in " ".join(folded) for word in words), "many overrides are folded, and not cut"


def test_the_metric_of_grpo_is_its_accuracy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = board(tmp_path / "s.json", BoardRow("q-1", ""))
    for metrics in ({"step": 1, "loss": 2.0}, {"step": 2, "loss": 1e-9, "accuracy": 0.25}, {"step": 3, "loss": 1e-9}):
        made.on_event("q-1", Event(0.0, "metrics", "q-1", data={"metrics": metrics}))
    [row] = made.rows()
    assert (row.metric, row.values) == ("accuracy", [0.25])
    result = {"accuracy_before": 0.25, "accuracy_after": 0.75, "accuracy_low_after": 0.7, "accuracy_high_after": 0.8}
    BoardScreen(made, "q-1", ManualClock(1000.0)).show_result(Result("q-1", "finished", 1, 0.0, 9.0, result))
    assert capsys.readouterr().out.endswith("finished: accuracy 0.25 → 0.75 (95 %: 0.7 to 0.8)\n")
    assert text(made.rows()).splitlines()[1].split() == ["q-1", "finished", "3", "accuracy", "0.75", "▁█"]


@pytest.mark.parametrize(
    ("summary", "shown"),
    [
        ({"accuracy_before": 0.25, "accuracy_after": 0.75, "pass_at_4_after": 0.9}, ("accuracy", [0.5, 0.75])),
        ({"name": "x", "nothing": None, "loss_low": 1.0, "loss": 1.5, "loss_high": 2}, ("loss", [1.5])),
        ({"steps": 3, "won": True, "text": "x", "bad": math.nan}, ("steps", [3.0])),
        ({"text": "x"}, ("accuracy", [0.5])),
    ],
)
def test_the_metric_of_a_finished_run_is_its_result(home: Path, summary: dict[str, Any], shown: object) -> None:
    """Where its program was followed, and from the table of runs: not its last training accuracy, nor one before."""
    row = BoardRow("q-1", "", metric="accuracy", values=[0.5])
    row.show_result(summary)
    assert (row.metric, row.values) == shown
    index.append_rows(home, [{"run": "q-1", "sweep": "q-abc", "state": "finished", "metrics": summary}])
    known = sweeps.read_board(home, "q-abc").rows["q-1"]
    assert (known.metric, known.values) == (("", []) if summary == {"text": "x"} else (row.metric, row.values[-1:]))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 10**400, "x", None])
def test_a_metric_that_is_not_finite_leaves_the_board_as_it_was(tmp_path: Path, bad: object) -> None:
    made = board(tmp_path / "s.json", BoardRow("q-1", "", "running", 1, 1000.0))
    good = {"step": 1, "steps_total": 9, "step_time": 2.0, "loss": 2.0}
    for metrics in (good, dict.fromkeys(good, bad)):
        made.on_event("q-1", Event(0.0, "metrics", "q-1", data={"metrics": metrics}))
    [row] = made.rows()
    assert (row.step, row.steps_total, row.step_time, row.metric, row.values) == (1, 9, 2.0, "loss", [2.0])
    assert sparkline([1.0, math.nan, 2.0, math.inf]) == sparkline([1.0, 2.0])
    assert sparkline([math.nan]) == ""


def status(*words: str) -> int:
    return main.run(["status", *words])


def test_status_of_a_sweep_by_its_name_means_the_newest(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_ids_by_sweep(home) == {}
    for age, name in enumerate(("q-111", "q-other-333")):
        board(file := home / "sweeps" / f"{name}.json", BoardRow(f"{name}-run", "")).close()
        os.utime(file, (1e9 - age, 1e9 - age))
    made = board(home / "sweeps" / "q-abc.json", BoardRow("q-1", "seed=1"), BoardRow("q-2", "seed=2"))
    made.set_state("q-1", "running", pod=2, began=0.0)
    capsys.readouterr()
    assert run_ids_by_sweep(home) == {
        "q-111": ["q-111-run"],
        "q-abc": ["q-1", "q-2"],
        "q-other-333": ["q-other-333-run"],
    }
    assert status("--sweep", "q") == 0
    assert capsys.readouterr().out.startswith("sweep q-abc: 1 running, 1 waiting\nrun")
    assert status("--sweep", "q-abc", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    told = [(run["run"], run["state"], run["pod"]) for run in document["runs"]]
    assert (told, document["over"]) == ([("q-1", "running", 2), ("q-2", "waiting", None)], False)


def test_a_sweep_of_another_machine_is_known_from_the_table(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"run": f"q-{i}", "sweep": "q-abc", "state": "finished", "usd": 1.5, "metrics": {"loss": 0.25},
             "overrides": ["+experiment=q", f"run.seed={i}"]} for i in range(2)]  # fmt: skip
    index.append_rows(home, [*rows, {"run": "x-1", "sweep": "q-xyz", "state": "failed"}])
    assert status("--sweep", "q-abc", "--follow") == 0
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 6  # each once, then the table
    assert out[-1].split() == ["q-1", "run.seed=1", "finished", "loss", "0.25", "▁", "about", "$1.50"]
    assert [status("--sweep", "q-"), status("--sweep", "nothing"), status("--follow", "run.seed=1")] == [2, 2, 2]
    err = capsys.readouterr().err
    assert "--sweep q-: ambiguous, matches q-abc, q-xyz" in err
    assert "no such sweep; the latest: q-abc, q-xyz" in err
    assert "--follow: needs --sweep ID" in err


def test_following_says_what_changes_until_it_is_over(home: Path) -> None:
    file = home / "sweeps" / "q-abc.json"
    made = board(file, BoardRow("q-1", ""), BoardRow("q-2", ""))

    def moved(step: int) -> None:
        made.on_event("q-1", Event(0.0, "metrics", "q-1", data={"metrics": {"step": step}}))

    acts = [
        lambda: made.set_state("q-1", "running", pod=1),
        lambda: made.set_state("q-2", "running", pod=2),
        lambda: (moved(1), made.set_state("q-2", "finished")),
        made.close,
    ]
    made.set_state("q-1", "waiting")
    clock = ManualClock(1000.0, 100.0, lambda: acts.pop(0)())
    seen = [(line.run, line.state, line.step) for line in sweeps.watch_changes(home, "q-abc", clock)]
    begun = [(run, told, None) for told in ("waiting", "running") for run in ("q-1", "q-2")]
    assert seen == [*begun, ("q-1", "running", 1), ("q-2", "finished", None)]
    assert load_board(file).is_finished


@pytest.mark.skipif(sys.platform != "linux", reason="processes are told apart by /proc")
def test_a_sweep_whose_controller_was_killed_says_so(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = home / "sweeps/q-abc.json"
    made = board(file, BoardRow("q-1", "seed=1"), BoardRow("q-2", "seed=2"))
    made.set_state("q-1", "running", pod=1)
    assert not load_board(file).is_abandoned, "this process is alive"
    capsys.readouterr()
    body = json.loads(file.read_text())
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        pass
    ended = f"{process_id().rpartition(':')[0]}:{child.pid}/1"
    for process in (ended, "another-boot:4026531836:1/1"):
        file.write_text(json.dumps(body | {"process": process, "time": 1.7e9}))
        for words in ([], ["--follow"]):  # which ends
            assert status("--sweep", "q-abc", *words) == 0
            said = " ".join(capsys.readouterr().out.split())
            since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(1.7e9))
            assert f"nobody drives this sweep: its controller has ended, and was last heard of at {since};" in said
        assert status("--sweep", "q-abc", "--json") == 0
        document = json.loads(capsys.readouterr().out)
        assert (document["over"], document["driven"]) == (False, False)
    made.close()
    assert not load_board(file).is_abandoned


def test_the_file_of_a_large_board_is_written_seldom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each write takes all rows: with one for each change, a thousand runs would write two thousand times as much."""
    now, late, written = [100.0], list[Any](), list[int]()

    def timer(seconds: float, act: Any) -> Any:
        made: Any = SimpleNamespace(start=lambda: late.append(act), cancel=lambda: late.remove(act))
        return made

    monkeypatch.setattr("controller.sweep.board.time.monotonic", lambda: now[0])
    monkeypatch.setattr("controller.sweep.board.threading.Timer", timer)
    file = tmp_path / "s.json"
    one = board(file, *(BoardRow(f"r-{i}", "") for i in range(1000)))
    monkeypatch.setattr(one, "out", lambda _: None)
    write = one._write

    def counted(**how: bool) -> None:
        write(**how)
        written.append(file.stat().st_size)

    monkeypatch.setattr(one, "_write", counted)
    for i in range(1000):
        one.set_state(f"r-{i}", "running")
        one.set_state(f"r-{i}", "finished")
    assert (len(written), len(late)) == (1, 1)
    assert load_board(file).rows["r-999"].state == "waiting"
    now[0] += 1.0
    late[0]()
    assert {row.state for row in load_board(file).rows.values()} == {"finished"}
    assert late == []
    one.set_state("r-0", "running")
    one.close()
    assert (len(written), late) == (3, [])
    assert load_board(file).is_finished

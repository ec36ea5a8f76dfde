"""Trackers of the user's own, which write down what they get: each step once, whatever interrupts the run."""

import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from controller.agent import trackers
from controller.agent.fs import AgentError
from controller.agent.trackers import SAVE_SECONDS, Follower
from controller.agent.transfers import TransferError
from tests.controller.agent.conftest import ProgramRun
from tests.fakes.loopback import FakeBucket

OWN = """
import json, os
class Recorder:
    def __init__(self, run, config, folder):
        self.path = os.path.join(folder, "rows")
        self.write("begin", run, config["name"])
    def write(self, *row):
        with open(self.path, "a") as file: print(json.dumps(row), file=file)
    def log(self, step, metrics):
        self.write(step, metrics)
        if metrics.get("loss") == 13: raise ConnectionError("no network\\nand much more")
    def finish(self, results):
        self.write("end", results)
class Dies(Recorder):
    def log(self, step, metrics):
        if step > 1: os._exit(3)
def refuses(run, config, folder): raise ValueError("no key")
"""
PROGRAM = """
import json, os, sys, time
first, last, code = map(int, sys.argv[1:4])
folder = os.environ["SLIPWAY_RUN_DIR"]
with open(folder + "/metrics.jsonl", "a") as file:
    for step in range(first, last + 1):
        print(json.dumps({"step": step, "loss": step / 2, "time": 1.0}), file=file)
        print(json.dumps({"step": step, "phase": "eval", "loss": 1 / step, "text": "x"}), file=file)
json.dump({"score": last}, open(folder + "/summary.json", "w"))
sys.exit(code)
"""


def order(use: str) -> dict[str, Any]:
    return {
        "use": use,
        "settings": {},
        "config": {"name": "e", "pod": {"accelerator_type": "v"}},
        "by_phase": True,
        "earlier": "",
    }


@pytest.fixture
def own(tmp_path: Path) -> str:
    """A folder with the module `my_own`."""
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "my_own.py").write_text(OWN)
    return str(folder)


def stored_rows(bucket: FakeBucket, name: str = "my_own.Recorder") -> list[Any]:
    return [*map(json.loads, bucket.objects[f"runs/run-1/trackers/{name}/rows"].splitlines())]


def test_each_step_arrives_once_on_whichever_machine(run: ProgramRun, bucket: FakeBucket, own: str) -> None:
    """The second attempt finds the folder of the first, the third one is on another machine and repeats two steps."""
    given = {"trackers": [order("my_own:Recorder")], "env": {"PYTHONPATH": own}}
    given |= {"bucket": "b", "log_object": "log", "exit_object": "exit"}
    for attempt, (first, last, code) in enumerate([(1, 3, 75), (3, 4, 75), (3, 6, 0)], 1):
        run.start(PROGRAM, str(first), str(last), str(code), attempt=attempt, **given)
        ended = run.wait_ended(attempt)
        assert (ended["code"], ended["summary"], ended["log_tail"]) == (code, {"score": last}, "")
        if attempt == 2:
            shutil.rmtree(run.folder)
    waits = [["end", None], ["begin", "run-1", "e"]]
    rows = [[step, {"loss": step / 2, "eval/loss": 1 / step}] for step in range(1, 7)]
    assert stored_rows(bucket) == [waits[1], *rows[:2], *waits, rows[2], *waits, *rows[3:], ["end", {"score": 6}]]


@pytest.mark.parametrize(
    ("use", "said", "count"),
    [
        ("my_own:refuses", "ValueError: no key; the run goes on", 2),
        ("my_own:Dies", "ended with code 3: see attempt-1/tracker-*.log on worker 0", 1),
        ("absent:x", "ModuleNotFoundError: No module named 'absent'; the run goes on", 2),
    ],
)
def test_an_error_is_told_once_and_counted(run: ProgramRun, own: str, use: str, said: str, count: int) -> None:
    run.start(PROGRAM, "1", "3", "0", trackers=[order(use)], env={"PYTHONPATH": own})
    ended = run.wait_ended()
    assert (ended["code"], ended["log_tail"]) == (0, f"slipway: logging.trackers: {use}: {said}\n")
    assert ended["summary"]["score"] == 3
    assert 1 <= ended["summary"]["tracker_errors"] <= count


class Life:
    """Attempts of a run followed in this process; `bucket` is a folder, as on a machine without a pod."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.rows, self.root = 0.0, list[Any](), folder
        monkeypatch.setenv("SLIPWAY_AGENT_ROOT", str(folder / "root"))
        module = ModuleType("my_followed")
        module.Recorder = self.made  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "my_followed", module)
        self.last_step: int | None = None
        self.fails = set[int]()
        self.begins: Callable[[], object] = lambda: None
        self.attempt = 0
        self.bucket = str(folder / "bucket")

    def made(self, run: str, config: dict[str, Any], folder: str) -> Any:
        self.files = Path(folder)
        self.begins()
        return SimpleNamespace(log=self.log, finish=lambda _: None, last_step=self.last_step)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.rows.append((step, metrics))
        if step in self.fails:
            raise OSError("full")

    @property
    def run(self) -> Path:
        return self.root / "root/runs/run-1"

    def begin(self, earlier: str = "") -> Follower:
        self.attempt += 1
        folder = self.run / f"attempt-{self.attempt}"
        folder.mkdir(parents=True)
        use: dict[str, Any] = order("my_followed:Recorder") | {"earlier": earlier}
        return Follower(folder, self.bucket, **use, clock=lambda: self.now)

    def write(self, *lines: dict[str, Any], mode: str = "a") -> None:
        with (self.run / "metrics.jsonl").open(mode) as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in self.rows]


@pytest.fixture
def life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Life]:
    return Life(tmp_path, monkeypatch)  # type: ignore[return-value]


def steps(first: int, last: int) -> list[dict[str, Any]]:
    return [{"step": step, "loss": 1.0} for step in range(first, last + 1)]


def test_a_machine_that_is_gone_at_once_costs_nothing_that_was_stored(life: Life) -> None:
    follower = life.begin()
    life.write(*steps(1, 4))
    follower.look()
    assert life.steps == [1, 2, 3], "a later line may add to the last step"
    life.write(*steps(5, 6))
    follower.look()
    shutil.rmtree(life.run)  # what came after the store is unknown there
    life.rows.clear()
    follower = life.begin()
    life.write(*steps(4, 8))
    follower.look()
    assert life.steps == [4, 5, 6, 7]
    follower.end(final=False, goes_on=True)
    shutil.rmtree(life.run)
    follower = life.begin()
    life.write({"step": 9, "loss": 2.0})
    follower.look()
    follower.end(final=True, goes_on=False)
    assert life.steps == [4, 5, 6, 7, 8, 9]


def test_what_a_machine_told_before_it_died_is_passed_on(life: Life) -> None:
    follower = life.begin()
    life.write(*steps(1, 4))
    follower.look()
    shutil.rmtree(life.run)
    life.rows.clear()
    follower = life.begin('p": 3, "loss": 9}\n' + "".join(json.dumps(line) + "\n" for line in steps(2, 7)))
    life.write(*steps(8, 9))
    follower.look()
    assert life.steps == [4, 5, 6, 7, 8]


def test_a_store_that_knows_better_counts(life: Life) -> None:
    follower = life.begin()
    life.write(*steps(1, 9))
    follower.look()
    life.rows.clear()
    life.last_step = 5  # it writes late, so that a part is lost with the machine
    shutil.rmtree(life.run)
    follower = life.begin()
    life.write({"step": 10, "loss": 2.0})
    follower.look()
    assert life.steps == [6, 7, 8, 9]
    life.last_step = 12
    follower = life.begin()
    life.write(*steps(11, 14))
    life.rows.clear()
    follower.look()
    assert life.steps == [13]


def test_a_program_that_cuts_its_file_and_lines_that_are_no_metrics(life: Life) -> None:
    follower = life.begin()
    life.write(*steps(1, 6), {"step": 7, "note": "x"}, {"loss": 3.0}, {"step": True, "loss": 1}, {"step": "8", "a": 1})
    with (life.run / "metrics.jsonl").open("a") as file:
        file.write('no JSON\n[1]\n{"step": 8, "loss": NaN}\n{"step": 7, "lo')
    follower.look()
    assert life.steps == [1, 2, 3, 4, 5]
    life.write(*steps(1, 3), mode="w")
    follower.look()
    life.write(*steps(4, 7), {"step": 7.0, "accuracy": 1, "by": None, "ok": True})
    follower.look()
    follower.end(final=True, goes_on=False)
    assert life.steps == [1, 2, 3, 4, 5, 6, 7]
    assert life.rows[-1] == (7, {"loss": 1.0, "accuracy": 1.0})


def test_an_error_costs_one_step_and_is_counted_over_all_attempts(life: Life) -> None:
    life.fails = {2, 3, 6}
    follower = life.begin()
    life.write(*steps(1, 5))
    follower.look()
    follower.end(final=False, goes_on=True)
    shutil.rmtree(life.run)
    follower = life.begin()
    life.write(*steps(3, 7))
    follower.look()
    follower.end(final=True, goes_on=False)
    assert life.steps == [1, 2, 3, 4, 5, 6, 7]
    life.begin().look()
    assert json.loads((life.run / "attempt-3/my_followed.Recorder.errors.json").read_text())["errors"] == 3
    assert not (life.run / "attempt-2/log").exists(), "it was told in the first attempt"


def test_a_bucket_that_does_not_answer_is_asked_again_and_nothing_is_overwritten(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    follower = life.begin()
    life.write(*steps(1, 5))
    follower.look()
    follower.end(final=False, goes_on=True)
    stored = [*(life.root / "bucket").rglob("*.tar")]

    def down(*_: Any) -> bool:
        raise TransferError("the bucket does not answer")

    content = stored[0].read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(trackers, "read_object", down)
        follower = life.begin()
        life.write(*steps(5, 7))
        follower.look()
        assert "TransferError: the bucket does not answer" in (life.run / "attempt-2/log").read_text()
        follower.end(final=False, goes_on=True)
    assert stored[0].read_bytes() == content
    follower.look()
    follower.end(final=True, goes_on=False)
    assert life.steps == [1, 2, 3, 4, 5, 6, 7]


def test_stores_are_rare_unless_the_machine_may_go_away(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    uploads: list[str] = []
    monkeypatch.setattr(trackers, "upload_file", lambda path, bucket, name: uploads.append(name))
    follower = life.begin()
    for now, hurried, count in ((0.0, False, 1), (1.0, False, 1), (2.0, True, 2), (3.0, False, 2), (13.0, False, 3)):
        life.now = now
        life.write({"step": int(now * 10), "loss": now})
        if hurried:
            follower.hurry()
        follower.look()
        assert len(uploads) == count, now
    assert SAVE_SECONDS == 10.0
    assert set(uploads) == {"runs/run-1/trackers/my_followed.Recorder.tar"}


@pytest.mark.parametrize("times", [1, 10, 100])
def test_of_files_that_grow_as_many_bytes_are_sent_as_are_written(
    life: Life, bucket: FakeBucket, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """A store each 10 s. Whole files would send 5 times as many at 10 x, and 50 times at 100 x, each twice."""
    monkeypatch.setenv("SLIPWAY_STORAGE_ROOT", bucket.url)
    life.bucket = "b"
    follower = life.begin()
    for step in range(times):
        life.now += 1000
        life.write({"step": step, "loss": step})
        follower.look()
        with (life.files / "rows").open("a") as file:
            file.write(f"{step}{'x' * 20_000}\n")
    life.now += 1000
    life.write({"step": times, "loss": times})
    follower.look()
    assert bucket.objects["runs/run-1/trackers/my_followed.Recorder/rows"] == (life.files / "rows").read_bytes()
    written = (life.files / "rows").stat().st_size
    state = 13_000  # each time: an archive of one small file, and what the requests say
    assert bucket.sent <= 1.2 * written + state * (times + 1)


def test_a_tracker_continues_from_the_files_that_belong_to_its_state(life: Life) -> None:
    """What was sent after the last state is cut off, and a file that was rewritten is part of the state."""

    def write(name: str, content: bytes) -> None:
        (life.files / name).write_bytes(content)
        life.now += 1000
        life.write({"step": int(life.now), "loss": 1.0})

    follower = life.begin()
    follower.look()
    (life.files / "sub").mkdir()
    write("sub/grown", b"one\n")
    write("same", b"same\n")
    write("changed", b"abc\n")
    follower.look()
    write("changed", b"xyz\nmore\n")
    write("sub/grown", b"one\ntwo\n")
    follower.look()
    place = life.root / "bucket/runs/run-1/trackers/my_followed.Recorder"
    for restored in range(3):
        for name, content in {"sub/grown": b"one\ntwo\n", "same": b"same\n", "changed": b"xyz\nmore\n"}.items():
            assert (place / name).read_bytes() == (life.files / name).read_bytes() == content, restored
        with (place / "sub/grown").open("ab") as file:
            file.write(b"of no state\n")  # killed before that was stored
        shutil.rmtree(life.run)
        follower = life.begin()
        life.write({"step": int(life.now), "loss": 1.0})
        life.now += 1000
        life.write({"step": int(life.now), "loss": 1.0})
        follower.look()


@pytest.mark.parametrize("size", [4, 3, 9])
def test_a_file_that_is_rewritten_after_a_restore_is_part_of_the_state(
    life: Life, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    follower = life.begin()
    follower.look()
    (life.files / "rows").write_bytes(b"one\n")
    follower.save()
    shutil.rmtree(life.run)
    life.begins = lambda: (life.files / "rows").write_bytes(b"x" * size)
    (follower := life.begin()).look()
    with monkeypatch.context() as patch:
        patch.setattr(trackers, "upload_file", Mock(side_effect=TransferError("down", permanent=True, denied=True)))
        follower.save()
    stored = life.root / "bucket/runs/run-1/trackers/my_followed.Recorder/rows"
    assert stored.read_bytes() == b"one\n", "the state that is stored needs it"
    follower.save()
    assert stored.read_bytes() == b"x" * size


@pytest.mark.parametrize("name", ["x" * 250, "byte\udcff"])
@pytest.mark.parametrize("place", ["bucket", "folder"])
def test_a_file_that_can_never_be_sent_is_part_of_the_state(
    life: Life, bucket: FakeBucket, monkeypatch: pytest.MonkeyPatch, capsys: Any, name: str, place: str
) -> None:
    """A folder's names are shorter than the copy's; a bucket's are UTF-8, and it may refuse any."""
    monkeypatch.setenv("SLIPWAY_STORAGE_ROOT", bucket.url)
    bucket.refused = re.compile("x{250}")
    life.bucket = "b" if place == "bucket" else life.bucket
    follower = life.begin()
    follower.look()
    for step in range(1, 4):
        for each in ("first", name, "last"):
            (life.files / each).write_bytes(b"row\n" * step)
        life.write({"step": step, "loss": 1.0})
        life.now += 1000
        follower.look()
    assert capsys.readouterr().err.count("is stored with the state only") == (
        0 if (name[0], place) == ("b", "folder") else 1
    )
    shutil.rmtree(life.run)
    life.begin().look()
    assert [(life.files / each).read_bytes() for each in ("first", name, "last")] == [b"row\n" * 3] * 3


def test_files_elsewhere_are_refused_and_those_that_are_gone_are_told(life: Life, capsys: Any) -> None:
    follower = life.begin()
    follower.look()
    (life.files / "rows").write_bytes(b"one\n")
    life.write(*steps(1, 2))
    follower.look()
    (life.root / "bucket/runs/run-1/trackers/my_followed.Recorder/rows").unlink()
    shutil.rmtree(life.run)
    life.begin().look()
    assert "trackers/my_followed.Recorder/rows is not what was stored" in capsys.readouterr().err
    with pytest.raises(AgentError, match=r"names a file elsewhere: '\.\./x'"):
        follower._restore_file(life.files / "../x", "../x", 1)

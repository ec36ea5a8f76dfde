"""Uploads of files that grow: bytes that are sent, threads, kills, refusals, and what readers find meanwhile."""

import json
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from etils import epath

from tests.controller.localcloud.conftest import cloud as cloud
from tests.trainer.buckets import BUCKET
from tests.trainer.buckets import bucket as bucket
from trainer.checkpoint.storage import RunStorage
from trainer.corpus.buckets import BucketFileSystem
from trainer.telemetry.metrics import MetricsLogger
from trainer.telemetry.uploads import PARTS, Uploads

VALUES = {f"metric_{number}": number / 7 for number in range(15)}
ROWS_AN_UPLOAD = 20
MOST = 1.2
"""Bytes that may be sent of each byte that is written, at any length."""
FIRST_BYTES = 4096
"""What the first requests may add to that."""


@pytest.fixture
def run(bucket, cloud) -> Iterator[str]:
    """A run's folder in a bucket that takes more than one write of an object in a second."""
    cloud.call_ok("POST", "emulator/settings", {"realism": "relaxed"})
    yield f"{BUCKET}/runs/{uuid.uuid4().hex}"
    cloud.call_ok("POST", "emulator/settings", {"realism": "strict"})


@pytest.fixture(params=["folder", "bucket"])
def remote(request, tmp_path) -> str:
    """The run's folder."""
    return str(tmp_path / "run") if request.param == "folder" else request.getfixturevalue("run")


@pytest.fixture
def sent(monkeypatch) -> list[int]:
    """Bytes of each request's body."""
    found: list[int] = []
    real = BucketFileSystem._request

    async def count(self, method, *args, **kwargs):
        body = json.dumps(kwargs["json"]).encode() if kwargs.get("json") else kwargs.get("data") or b""
        found.append(len(body))
        return await real(self, method, *args, **kwargs)

    monkeypatch.setattr(BucketFileSystem, "_request", count)
    return found


Open = Callable[[Path, str], MetricsLogger]


@pytest.fixture
def open_log() -> Iterator[Open]:
    """Loggers that end like their process: what they have not uploaded stays where it is."""
    made: list[MetricsLogger] = []

    def open_one(local: Path, remote: str) -> MetricsLogger:
        made.append(MetricsLogger(local, remote, writes=True))
        return made[-1]

    yield open_one
    for log in made:
        log._uploads.close()
        for file in (log._events, log._metrics_file, log._transcripts_file):
            file.close()


def on_compose(monkeypatch, act: Callable[[Callable[[], Any]], Any]) -> None:
    """Let `act` do the next requests that join objects; it gets the real one."""
    real = BucketFileSystem.call

    def call(self, method, *args, **kwargs):
        request = lambda: real(self, method, *args, **kwargs)  # noqa: E731
        return act(request) if method == "POST" else request()

    monkeypatch.setattr(BucketFileSystem, "call", call)


def steps_of(folder: str) -> list[int]:
    return [json.loads(line)["step"] for line in (epath.Path(folder) / "metrics.jsonl").read_text().splitlines()]


def names(folder: str) -> list[str]:
    files, root = fsspec.core.url_to_fs(folder)
    return sorted(name.removeprefix(f"{root}/") for name in files.find(root))


@pytest.mark.parametrize("times", [1, 10, 100])
def test_the_bytes_that_are_sent_are_those_that_are_written(run, sent, open_log, tmp_path, times) -> None:
    """At any length: whole files at each upload would send 2.9 times as many at 10 x, and 25 times at 100 x."""
    log = open_log(tmp_path, run)
    for step in range(1, 10 * times + 1):
        log.log(step, "train", **VALUES)
        if step % ROWS_AN_UPLOAD == 0:
            log.upload().result()
    log.close()
    written = sum(path.stat().st_size for path in tmp_path.rglob("*"))
    assert written > 2000 * times
    assert sum(sent) <= MOST * written + FIRST_BYTES


def test_readers_see_one_file_before_during_and_after(remote, open_log, tmp_path, monkeypatch) -> None:
    """Uploads of several lengths, a file that does not change, and one that is replaced by another of the same size."""
    log, root = open_log(tmp_path / "local", remote), epath.Path(remote)
    for step in (1, 2, 3):
        log.log(step, "train", loss=step)
        log.upload().result()
        for name in names(remote):
            assert (root / name).read_bytes() == (tmp_path / "local" / name).read_bytes()
        assert [name.partition("/")[0] for name in names(remote)] == ["metrics.jsonl", "tb"]
    log.summarize(loss=1.0)
    log.upload().result()
    log.summarize(loss=0.5)  # another file, of the same size
    log.close()
    assert json.loads((root / "summary.json").read_text()) == {"loss": 0.5}
    assert [name.partition("/")[0] for name in names(remote)] == ["metrics.jsonl", "summary.json", "tb"]


def test_a_store_that_hangs_holds_up_nobody(open_log, tmp_path, monkeypatch) -> None:
    free = threading.Event()
    monkeypatch.setattr(RunStorage, "answers", lambda self: free.wait())
    log = open_log(tmp_path / "local", str(tmp_path / "run"))
    log.log(1, "train", loss=1)
    first = log.upload()
    log.log(2, "train", loss=2)
    second = log.upload()
    log.log(3, "train", loss=3)
    assert (first.done(), second.done(), (tmp_path / "run").exists()) == (False, False, False)
    free.set()
    second.result()
    assert steps_of(str(tmp_path / "run")) == [1, 2]
    log.close()
    assert steps_of(str(tmp_path / "run")) == [1, 2, 3]


KILLED = """
import os, signal, sys
from pathlib import Path
from trainer.telemetry.metrics import MetricsLogger
log = MetricsLogger(Path(sys.argv[1]), sys.argv[2], writes=True)
log.resume(0)
for step in range(1, 6):
    log.log(step, "train", loss=step)
    if step in (2, 4):
        log.upload().result()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_after_kill_9_nothing_is_lost_or_twice(open_log, tmp_path) -> None:
    remote = str(tmp_path / "run")
    command = [sys.executable, "-c", KILLED, str(tmp_path / "local"), remote]
    assert subprocess.run(command, cwd=Path(__file__).parents[3]).returncode == -signal.SIGKILL
    assert steps_of(remote) == [1, 2, 3, 4]
    for machine, last, kept in (("local", 4, 5), ("other", 5, 6), ("third", 3, 4)):  # from checkpoints of these steps
        log = open_log(tmp_path / machine, remote)
        log.resume(last)
        log.log(last + 1, "train", loss=last)
        log.upload().result()  # then it is lost
        assert steps_of(remote) == [*range(1, kept + 1)]
        assert steps_of(str(tmp_path / machine)) == [*range(1, kept + 1)]


def test_a_later_attempt_sends_only_what_is_new(run, sent, open_log, tmp_path) -> None:
    for machine, first in (("local", 0), ("local", 50), ("other", 100)):
        log = open_log(tmp_path / machine, run)
        log.resume(first)
        for step in range(first + 1, first + 51):
            log.log(step, "train", **VALUES)
        log.close()
    assert steps_of(run) == [*range(1, 151)]
    stored = sum((epath.Path(run) / name).stat().length for name in names(run))
    assert stored > 30_000
    assert sum(sent) <= MOST * stored + FIRST_BYTES


class KilledError(BaseException):
    """Stands for the end of the process, which nothing catches."""


def test_killed_before_a_part_is_joined_the_next_attempt_sends_it(run, open_log, tmp_path, monkeypatch) -> None:
    log = open_log(tmp_path / "local", run)
    log.log(1, "train", loss=1)
    log.upload().result()

    def die(request):
        raise KilledError

    with monkeypatch.context() as patch:
        on_compose(patch, die)
        log.log(2, "train", loss=2)
        with pytest.raises(KilledError):
            log.upload().result()
    assert f"{PARTS}/metrics" in names(run)
    assert [name for name in names(run) if name.startswith("metrics")] == ["metrics.jsonl"]
    assert steps_of(run) == [1]
    log = open_log(tmp_path / "local", run)
    log.resume(2)
    log.close()
    assert steps_of(run) == [1, 2]
    assert f"{PARTS}/metrics" not in names(run)


def test_an_answer_that_is_lost_joins_nothing_twice(run, sent, open_log, tmp_path, monkeypatch, caplog) -> None:
    log = open_log(tmp_path / "local", run)
    log.log(1, "train", **VALUES)
    log.upload().result()

    def again(request):
        request()
        return request()  # as gcsfs does, if the connection breaks before the answer

    on_compose(monkeypatch, again)
    log.log(2, "train", loss=2)
    log.upload().result()
    log.log(3, "train", loss=3)
    log.close()
    assert steps_of(run) == [1, 2, 3]
    assert not caplog.records


@pytest.mark.parametrize("disturb", [lambda path: path.unlink(), lambda path: path.write_bytes(b"other")])
def test_what_somebody_has_changed_is_sent_whole_and_told(remote, open_log, tmp_path, disturb, caplog) -> None:
    log, target = open_log(tmp_path / "local", remote), epath.Path(remote) / "metrics.jsonl"
    log.log(1, "train", loss=1)
    log.upload().result()
    log.upload().result()
    disturb(target)
    log.log(2, "train", loss=2)
    log.upload().result()
    assert steps_of(remote) == [1, 2]
    log.log(3, "train", loss=3)
    log.close()
    assert steps_of(remote) == [1, 2, 3]
    assert ["metrics.jsonl is uploaded whole" in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize(("error", "told"), [(TimeoutError("slow"), True), (ZeroDivisionError("a mistake"), False)])
def test_an_outage_is_told_and_made_up_for_and_a_mistake_ends_the_run(
    open_log, tmp_path, monkeypatch, caplog, error, told
) -> None:
    log = open_log(tmp_path / "local", str(tmp_path / "run"))
    log.log(1, "train", loss=1)

    def fail(self, path, inode, size):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Uploads, "_send", fail)
        upload = log.upload()
        if told:
            upload.result()
        else:
            assert upload.exception() is error
    if told:
        log.close()
        assert steps_of(str(tmp_path / "run")) == [1]
        assert [record.getMessage() for record in caplog.records] == [
            "metrics.jsonl was not uploaded, the bucket does not answer: slow"
        ]
    else:
        with pytest.raises(ZeroDivisionError):
            log.upload()

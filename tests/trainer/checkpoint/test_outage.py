"""An outage of the bucket: checkpoints wait on the disk, reach the bucket whole and in order, and end with a bound."""

import shutil
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.trainer.checkpoint.test_manager import abstract, arrays, assert_equal, kept
from trainer.checkpoint import local_saves, outage
from trainer.checkpoint.local_saves import local_bytes
from trainer.checkpoint.manager import LOCAL_FOLDER, CheckpointManager
from trainer.checkpoint.outage import OutageError, ReplacedError, wait_for_storage
from trainer.checkpoint.storage import RunStorage
from trainer.distributed.preemption import PreemptedError


@dataclass
class Bucket:
    """A bucket that is a folder, answers or does not, and a clock that runs while somebody waits."""

    folder: Path
    up: bool = True
    now: float = 1000.0
    pace: float = 0.0
    """Seconds that pass with every look at the clock."""
    probes: int = 0
    uploads: list[list[str]] = field(default_factory=list)

    @property
    def storage(self) -> RunStorage:
        return RunStorage(str(self.folder / "run"), self.probe, self.clock)

    def clock(self) -> float:
        self.now += self.pace
        return self.now

    def probe(self) -> bool:
        self.probes += 1
        return self.up

    def open(self, **settings: Any) -> CheckpointManager:
        settings = {"max_outage_hours": 2} | settings
        log = SimpleNamespace(storage=self.storage, local=self.folder / "disk", upload=self.upload)
        return CheckpointManager(str(self.folder / "run"), kept(2, **settings), ("eval_loss",), log)

    def upload(self) -> Future[None]:
        return Upload(self)

    def steps(self) -> list[str]:
        """Complete checkpoints."""
        return sorted(path.parent.name for path in self.folder.glob("run/checkpoints/*/commit_success.txt"))

    def on_disk(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "disk" / LOCAL_FOLDER).glob("*"))

    def later(self, seconds: float = 60.0) -> None:
        self.now += seconds


class Upload(Future[None]):
    """Notes which checkpoints count when somebody has waited for it."""

    def __init__(self, bucket: Bucket) -> None:
        super().__init__()
        self._bucket = bucket

    def result(self, timeout: float | None = None) -> None:
        self._bucket.uploads.append(self._bucket.steps())


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    made = Bucket(tmp_path)
    monkeypatch.setattr(outage.time, "sleep", lambda seconds: made.later(max(seconds, 10.0)))
    return made


def cut_off(bucket: Bucket, *steps: int, **settings: Any) -> CheckpointManager:
    """Checkpoints of a run that has saved these steps since the bucket is down."""
    checkpoints = bucket.open(**settings)
    bucket.up = False
    for step in steps:
        checkpoints.save(step, arrays(step), {"at": step})
    return checkpoints


def read(checkpoints: CheckpointManager, step: int) -> tuple[Any, dict[str, Any]]:
    return checkpoints.restore(step, abstract())


def end_with(kind: type[Exception], checkpoints: CheckpointManager) -> str:
    """Let the next update end the run, and return what it says."""
    with pytest.raises(kind) as ended:
        checkpoints.catch_up()
    checkpoints.__exit__(kind, ended.value)
    return str(ended.value)


def test_checkpoints_wait_on_the_disk_and_are_uploaded_in_order(bucket, caplog):
    with bucket.open() as checkpoints:
        checkpoints.save(2, arrays(2), {"at": 2})
        checkpoints._manager.wait_until_finished()
        bucket.up = False
        for step in (4, 6):
            bucket.later()
            checkpoints.save(step, arrays(step), {"at": step})
            checkpoints.save(step, arrays(0), {"at": 0})  # a step that is saved is not overwritten
            checkpoints.catch_up()
        assert (bucket.steps(), bucket.on_disk()) == (["2"], ["4", "6"])
        bucket.up = True
        bucket.later()
        checkpoints.catch_up()
        assert (bucket.steps(), bucket.on_disk()) == (["2", "4", "6"], [])
        assert bucket.uploads == [[], ["2"]], (
            "a checkpoint counts after its metrics: a run that resumes there reads them"
        )
        checkpoints.save(8, arrays(8), {"at": 8})
    assert bucket.steps() == ["6", "8"]
    with bucket.open() as again:
        assert again.latest_step() == 8
        for step in (6, 8):
            state, position = read(again, step)
            assert position == {"at": step}
            assert_equal(state, arrays(step))
    lines = [record.getMessage() for record in caplog.records]
    assert [line.partition(";")[0] for line in lines] == [
        "the bucket does not answer", "the bucket answers again: uploaded the checkpoints of steps 4, 6",
    ]  # fmt: skip
    assert "for at most 2 h (checkpoint.max_outage_hours)" in lines[0]


def test_an_upload_that_breaks_off_leaves_nothing_that_counts(bucket, monkeypatch):
    checkpoints = cut_off(bucket, 2, 4)
    bucket.up = True
    bucket.later()
    real, sent = local_saves.fsspec.core.url_to_fs, []

    def breaking(url: str) -> Any:
        files, path = real(url)

        def put(source: str, target: str) -> None:
            sent.append(target)
            if len(sent) == 5:
                raise ConnectionResetError("cut")
            files.put_file(source, target)

        return SimpleNamespace(put_file=put), path

    monkeypatch.setattr(local_saves.fsspec.core, "url_to_fs", breaking)
    checkpoints.catch_up()
    assert (bucket.steps(), bucket.on_disk()) == ([], ["2", "4"])
    checkpoints.catch_up()  # not at once again
    assert len(sent) < 2 * len(list((bucket.folder / "disk" / LOCAL_FOLDER / "2").rglob("*")))
    bucket.later(61)
    checkpoints.catch_up()
    assert (bucket.steps(), bucket.on_disk()) == (["2", "4"], [])
    assert_equal(read(checkpoints, 4)[0], arrays(4))
    checkpoints.close()


def test_past_the_bound_the_run_ends_and_the_next_attempt_on_the_pod_uploads(bucket):
    checkpoints = cut_off(bucket, 2)
    bucket.later(2 * 3600 - 1)
    checkpoints.catch_up()
    bucket.later(1)
    ended = end_with(OutageError, checkpoints)
    folder = bucket.folder / "disk" / LOCAL_FOLDER
    assert ended == (
        f"checkpoint.max_outage_hours: {bucket.folder}/run has not answered for 2 h, the limit. The checkpoints of "
        f"steps 2 are on the workers' disks ({folder}): the same command uploads them and resumes there once the "
        "bucket answers, as long as the pod exists"
    )
    assert (bucket.steps(), bucket.on_disk()) == ([], ["2"])
    (folder / "4.partial").mkdir()  # a save that was killed
    with pytest.raises(OutageError, match=r"has not answered for 2 h, the limit"):
        bucket.open()
    bucket.up = True
    with bucket.open() as again:
        assert (again.latest_step(), bucket.on_disk()) == (2, [])
        assert read(again, 2)[1] == {"at": 2}


@pytest.mark.parametrize("room", [True, False])
def test_the_end_of_a_run_and_a_disk_without_room_wait_for_the_bucket(bucket, monkeypatch, room):
    back = bucket.now + 300
    if not room:
        monkeypatch.setattr(local_saves.shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    with bucket.open() as checkpoints:
        checkpoints._bridge._storage._probe = lambda: bucket.now >= back
        bucket.later(31)
        checkpoints.save(2, arrays(2), {})
        assert (bucket.now >= back) is not room
    assert (bucket.steps(), bucket.on_disk()) == (["2"], [])
    assert bucket.now >= back


def test_a_preempted_run_does_not_wait(bucket):
    checkpoints = cut_off(bucket, 2)
    before = bucket.now
    checkpoints.__exit__(PreemptedError, None)
    assert (bucket.now, bucket.on_disk()) == (before, ["2"])


def test_a_write_that_failed_in_the_background_is_an_outage(bucket, monkeypatch):
    with bucket.open() as checkpoints:
        checkpoints.save(2, arrays(2), {})
        checkpoints._manager.wait_until_finished()
        failed = [ValueError("UNAVAILABLE: Error writing object")]
        monkeypatch.setattr(checkpoints._manager, "check_for_errors", lambda: (_ for _ in ()).throw(failed.pop()))
        checkpoints.save(4, arrays(4), {})
        assert (bucket.steps(), bucket.on_disk()) == (["2"], ["4"])
        monkeypatch.undo()
        bucket.later()
        checkpoints.catch_up()
        assert (bucket.steps(), bucket.on_disk()) == (["2", "4"], [])


def test_a_last_checkpoint_that_failed_in_the_background_is_saved_again(bucket, monkeypatch):
    with bucket.open() as checkpoints:
        checkpoints.save(2, arrays(2), {"at": "first"})
        assert checkpoints.has_begun(2)
        assert not checkpoints.has_begun(4)
        checkpoints._manager.wait_until_finished()
        shutil.rmtree(bucket.folder / "run/checkpoints/2")
        failed = [ValueError("UNAVAILABLE: Error writing object")]

        def fail_once() -> None:
            if failed:
                raise failed.pop()

        monkeypatch.setattr(checkpoints._manager, "check_for_errors", fail_once)
        checkpoints.save(2, arrays(2), {"at": "second"})
        assert (bucket.steps(), bucket.on_disk()) == ([], ["2"])
        monkeypatch.undo()
    with bucket.open() as checkpoints:
        checkpoints.save(2, arrays(3), {"at": "third"})
        state, position = read(checkpoints, 2)
    assert position == {"at": "second"}
    assert_equal(state, arrays(2))


def test_a_last_checkpoint_that_is_complete_is_not_sent_again(bucket, monkeypatch):
    """The bucket does not answer when it is saved once more."""
    uploads: list[str] = []
    monkeypatch.setattr(local_saves.LocalSaves, "upload", lambda *_: uploads.append("upload") or "")
    with bucket.open() as checkpoints:
        checkpoints.save(2, arrays(2), {"at": "first"})
        checkpoints._manager.wait_until_finished()
        bucket.up = False
        bucket.later(31)
        checkpoints.save(2, arrays(2), {"at": "second"})
        assert (bucket.steps(), bucket.on_disk()) == (["2"], [])
        bucket.up = True
    assert uploads == []
    with bucket.open() as checkpoints:
        assert read(checkpoints, 2)[1] == {"at": "first"}


def test_a_disk_without_room_sends_nothing_that_the_bucket_has(bucket, monkeypatch):
    """The write of the last checkpoint ends during the outage, and the disk has no room for it."""
    with bucket.open() as checkpoints:
        checkpoints.save(2, arrays(2), {"at": "first"})
        checkpoints._manager.wait_until_finished()
        monkeypatch.setattr(checkpoints, "_is_written", lambda: False)
        monkeypatch.setattr(local_saves.shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
        back = bucket.now + 300
        checkpoints._bridge._storage._probe = lambda: bucket.now >= back
        bucket.later(31)
        checkpoints.save(2, arrays(2), {"at": "second"})
        assert (bucket.now >= back, bucket.steps(), bucket.on_disk()) == (True, ["2"], [])
    with bucket.open() as checkpoints:
        assert read(checkpoints, 2)[1] == {"at": "first"}


def test_the_disk_holds_as_many_checkpoints_as_the_bucket(bucket):
    best = {"metric": "eval_loss", "mode": "min"}
    with bucket.open(best=best) as checkpoints:
        bucket.up = False
        for step in (2, 4, 6, 8, 10):
            checkpoints.save(step, arrays(step), {})
            checkpoints.record_score(step, eval_loss=abs(step - 4))
            bucket.later()
        assert bucket.on_disk() == ["10", "4", "8"]
        assert not (bucket.folder / "run/scores.json").exists()
        bucket.up = True
    assert (bucket.steps(), bucket.on_disk()) == (["10", "4", "8"], [])
    assert '"best": 4' in (bucket.folder / "run/scores.json").read_text()


def test_a_disk_without_room_is_named(bucket, monkeypatch):
    free = SimpleNamespace(free=local_saves.MIN_FREE_BYTES + 600)  # of the 580 bytes of a checkpoint, with the margin
    monkeypatch.setattr(local_saves.shutil, "disk_usage", lambda _: free)
    assert local_bytes(arrays(0)) == 516
    checkpoints = cut_off(bucket, 2)
    monkeypatch.setattr(local_saves.shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    with pytest.raises(OutageError) as ended:
        checkpoints.save(4, arrays(4), {})
    assert str(ended.value) == (
        f"checkpoint.max_outage_hours: {bucket.folder}/run has not answered for 15 minutes, and no disk has room for a "
        f"checkpoint: worker 0: {bucket.folder}/disk/{LOCAL_FOLDER} has 0.0 GB free; a checkpoint takes 0.0 GB, and "
        "1.1 GB must stay free. To fix: attach a data disk (tpu.data_disk_gb), or lower checkpoint.max_to_keep"
    )


def test_a_replaced_attempt_uploads_nothing(bucket, monkeypatch):
    monkeypatch.setenv("SLIPWAY_SUCCESSOR", "runs/run/launches/0002.json")
    record = bucket.folder / "run/launches/0002.json"
    checkpoints = cut_off(bucket, 2)
    record.parent.mkdir(parents=True)
    record.write_text("{}")
    bucket.up = True
    bucket.later()
    assert end_with(ReplacedError, checkpoints) == f"{record} exists: a later attempt has replaced this one"
    assert (bucket.steps(), bucket.on_disk(), bucket.uploads) == ([], ["2"], [])


def test_what_the_bucket_has_already_is_not_uploaded(bucket):
    with cut_off(bucket, 2) as checkpoints:
        checkpoints._bridge.suspended = False  # as after kill -9
        checkpoints._bridge.steps = []
        bucket.up = True
        bucket.later()
        checkpoints.save(4, arrays(4), {})
    with bucket.open() as again:
        assert again.latest_step() == 4
    assert (bucket.steps(), bucket.on_disk()) == (["4"], [])


def test_zero_hours_bridge_nothing(bucket):
    with cut_off(bucket, 2, max_outage_hours=0):
        pass
    assert (bucket.steps(), bucket.probes) == (["2"], 0)


def test_an_outage_costs_few_probes_and_a_start_waits_for_the_bucket(bucket):
    storage = bucket.storage
    bucket.up = False
    for _ in range(3600):
        bucket.now += 1
        assert not storage.answers()
    assert bucket.probes < 150
    with pytest.raises(OutageError, match=r"checkpoint\.max_outage_hours: .*/run has not answered for 1 h"):
        wait_for_storage(storage, 1)
    wait_for_storage(storage, 0)
    wait_for_storage(RunStorage(str(bucket.folder)), 1)
    bucket.up = True
    bucket.later(31)
    assert storage.answers()

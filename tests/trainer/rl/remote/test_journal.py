"""The journal: what an outage of the bucket, a killed trainer and a damaged file leave of it."""

from pathlib import Path

import numpy as np
import pytest

from trainer.checkpoint.outage import ReplacedError
from trainer.checkpoint.storage import RunStorage
from trainer.rl.remote import journal as journals
from trainer.rl.remote.journal import DrawnSample, Journal, JournalError, decode, encode


class Bucket:
    """A folder that answers or does not, and a clock that runs with every look at it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.up, self.now = folder / "run", True, 0.0

    def open(self, disk: Path) -> Journal:
        """The journal as an attempt opens it, on a worker with this disk."""
        return Journal(str(self.folder), RunStorage(str(self.folder), lambda: self.up, self.clock), disk)

    def clock(self) -> float:
        self.now += 100.0
        return self.now

    def files(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("journal/*"))


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return Bucket(tmp_path)


def content(number: int, samples: int = 2) -> bytes:
    drawn = DrawnSample(np.arange(3, dtype=np.int32), np.ones(3, np.float32), np.zeros(3, np.int32), np.ones(4), True)
    return encode(number, [drawn] * samples)


def test_what_is_written_in_an_outage_survives_the_trainer_and_is_uploaded_later(bucket, tmp_path) -> None:
    disk = tmp_path / "disk"
    first = bucket.open(disk)
    first.write(0, content(0))
    bucket.up = False
    first.write(1, content(1))
    first.write(2, content(2))
    assert bucket.files() == ["00000000.npz"]
    assert first.read(2) == content(2)
    second = bucket.open(disk)  # the first one was killed
    assert [second.read(number) for number in range(4)] == [content(0), content(1), content(2), None]
    assert second.upload() == 2
    bucket.up = True
    second.write(3, content(3))
    assert bucket.files() == [f"{number:08}.npz" for number in range(4)]
    assert list(disk.iterdir()) == []
    assert [second.read(number) for number in range(4)] == [content(number) for number in range(4)]


def test_an_outage_does_not_hold_up_a_look_for_a_rollout_that_is_not_there(bucket, tmp_path, monkeypatch) -> None:
    journal = bucket.open(tmp_path / "disk")
    journal.write(0, content(0))
    bucket.up = False
    monkeypatch.setattr(Journal, "_path", lambda *_: pytest.fail("a request to the bucket"))
    journal.write(1, content(1))
    assert journal.read(1) == content(1)
    assert journal.read(2) is None


def test_an_outage_in_the_middle_of_an_upload_loses_nothing(bucket, tmp_path, monkeypatch) -> None:
    journal, whole = bucket.open(tmp_path / "disk"), Journal._upload

    def fail(*_: object) -> None:
        raise ConnectionError("reset by peer")

    monkeypatch.setattr(Journal, "_upload", fail)
    journal.write(0, content(0))
    assert bucket.files() == []
    monkeypatch.setattr(Journal, "_upload", whole)
    assert journal.upload() == 0
    assert bucket.files() == ["00000000.npz"]


def test_the_bucket_counts_where_another_pod_has_gone_on(bucket, tmp_path) -> None:
    bucket.up = False
    before = bucket.open(tmp_path / "old pod")
    before.write(0, content(0))
    before.write(1, content(1))
    bucket.up = True
    other = content(0, samples=1)
    bucket.open(tmp_path / "new pod").write(0, other)
    back = bucket.open(tmp_path / "old pod")
    assert back.read(0) == other
    assert back.read(1) is None, "a rollout of weights that are no longer those of the run"
    assert back.upload() == 0
    assert list((tmp_path / "old pod").iterdir()) == []
    assert bucket.open(tmp_path / "third pod").read(0) == other


def replace(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the next attempt on record, as its controller does before anything else."""
    monkeypatch.setenv("SLIPWAY_SUCCESSOR", "runs/run/launches/0002.json")
    record = bucket.folder / "launches/0002.json"
    record.parent.mkdir(parents=True)
    record.write_text("{}")


def test_an_attempt_that_a_later_one_has_replaced_writes_nothing(bucket, tmp_path, monkeypatch) -> None:
    disk = tmp_path / "disk"
    journal = bucket.open(disk)
    journal.write(0, content(0))
    bucket.up = False
    journal.write(1, content(1))
    replace(bucket, monkeypatch)
    bucket.up = True
    with pytest.raises(ReplacedError, match=r"0002\.json exists: a later attempt has replaced this one"):
        journal.upload()
    with pytest.raises(ReplacedError, match="has the journal"):
        journal.write(2, content(2))
    assert bucket.files() == ["00000000.npz"]
    assert sorted(path.name for path in disk.iterdir()) == ["00000001.npz", "00000002.npz"]


def test_what_another_attempt_has_written_first_counts(bucket, tmp_path) -> None:
    one, two = bucket.open(tmp_path / "one"), bucket.open(tmp_path / "two")
    first, second = content(0), content(0, samples=1)
    assert one.write(0, first) == first
    assert two.write(0, second) == first
    assert two.read(0) == first
    assert two.write(1, content(1)) == content(1)
    assert one.write(1, content(1)) == content(1)
    assert one.upload() == two.upload() == 0
    assert bucket.files() == ["00000000.npz", "00000001.npz"]
    assert bucket.open(tmp_path / "three").read(0) == first


@pytest.mark.parametrize("act", [lambda journal: journal.upload(), lambda journal: journal.write(1, content(1))])
def test_an_attempt_that_has_trained_on_other_samples_than_the_journal_has_ends(bucket, tmp_path, act) -> None:
    journal = bucket.open(tmp_path / "one")
    bucket.up = False
    journal.write(0, content(0))
    bucket.up = True
    other = content(0, samples=1)
    bucket.open(tmp_path / "two").write(0, other)
    with pytest.raises(ReplacedError, match="another attempt has written rollout 0 of the journal"):
        act(journal)
    assert bucket.open(tmp_path / "three").read(0) == other


def test_an_upload_whose_answer_was_lost_is_done(bucket, tmp_path, monkeypatch) -> None:
    real = journals.create_file

    def create(path, content) -> None:
        real(path, content)
        raise ConnectionError("reset by peer")

    journal = bucket.open(tmp_path / "disk")
    monkeypatch.setattr(journals, "create_file", create)
    assert journal.write(0, content(0)) == content(0)
    monkeypatch.setattr(journals, "create_file", real)
    assert journal.upload() == 0
    assert bucket.files() == ["00000000.npz"]


def test_a_torn_file_on_the_disk_is_drawn_again(bucket, tmp_path, caplog) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    (disk / "00000000.npz").write_bytes(content(0)[:100])
    (disk / "00000001.npz").write_bytes(content(2))
    journal = bucket.open(disk)
    assert journal.read(0) is None
    assert journal.read(1) is None
    assert "rollout 0 is drawn again" in caplog.text
    assert "it holds rollout 2, not 1" in caplog.text


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"no zip",
        content(0)[:-40],
        journals._pack({"rollout": 0}, {}),
        journals._pack(
            {}, dict.fromkeys(("tokens", "logprobs", "versions", "lengths", "scores", "finished"), np.zeros(2))
        ),
    ],
)
def test_a_damaged_file_is_one_error(bad) -> None:
    with pytest.raises(JournalError, match="damaged"):
        decode(bad, 0)

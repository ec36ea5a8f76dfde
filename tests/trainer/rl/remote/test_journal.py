"""The journal: what an outage of the bucket, a killed trainer and a damaged file leave of it."""

from pathlib import Path

import numpy as np
import pytest

from tests.trainer.checkpoint.test_outage import Bucket
from trainer.checkpoint.outage import ReplacedError
from trainer.rl.remote import journal as journals
from trainer.rl.remote.journal import DrawnSample, Journal, JournalError, decode, encode


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return Bucket(tmp_path, pace=100.0)


def opened(bucket: Bucket, disk: Path) -> Journal:
    """The journal as an attempt opens it, on a worker with this disk."""
    return Journal(str(bucket.folder / "run"), bucket.storage, disk)


def files(bucket: Bucket) -> list[str]:
    return sorted(path.name for path in bucket.folder.glob("run/journal/*"))


def samples(*lengths: int) -> list[DrawnSample]:
    parts = [(np.arange(n, dtype=np.int32), np.sqrt(np.arange(n, dtype=np.float32))) for n in lengths]
    return [DrawnSample(*part, part[0] + 7, np.array([1 / 3, 1, 0, 0]), len(part[0]) % 2 == 0) for part in parts]


def content(number: int, count: int = 2) -> bytes:
    return encode(number, samples(*[3] * count))


@pytest.mark.parametrize("prompt", [None, 2])
def test_the_journal_keeps_every_bit(bucket, tmp_path, prompt) -> None:
    """prompt: tokens of prompts, whose routes are kept with those of responses."""
    drawn = samples(1, 4, 3)
    if prompt is not None:
        routes = [np.full((prompt + len(one.tokens), 3, 2), 300 + len(one.tokens), np.uint16) for one in drawn]
        drawn = [one._replace(routes=own) for one, own in zip(drawn, routes, strict=True)]
    opened(bucket, tmp_path / "disk").write(12, encode(12, drawn))
    assert files(bucket) == ["00000012.npz"]
    found = Journal(str(bucket.folder / "run")).read(12)
    assert found is not None
    for one, other in zip(drawn, decode(found), strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(a, b)


def test_what_is_written_in_an_outage_survives_the_trainer_and_is_uploaded_later(bucket, tmp_path, monkeypatch) -> None:
    disk = tmp_path / "disk"
    first = opened(bucket, disk)
    first.write(0, content(0))
    bucket.up = False
    first.write(1, content(1))
    first.write(2, content(2))
    assert files(bucket) == ["00000000.npz"]
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "_path", lambda *_: pytest.fail("a request to the bucket, which would hold it up"))
        assert (first.read(2), first.read(3)) == (content(2), None)
    second = opened(bucket, disk)  # the first one was killed
    assert [second.read(number) for number in range(4)] == [content(0), content(1), content(2), None]
    assert second.upload() == 2
    bucket.up = True
    second.write(3, content(3))
    assert files(bucket) == [f"{number:08}.npz" for number in range(4)]
    assert list(disk.iterdir()) == []
    assert [second.read(number) for number in range(4)] == [content(number) for number in range(4)]


@pytest.mark.parametrize("written", [False, True])
def test_an_upload_that_breaks_off_loses_nothing_though_only_its_answer_may_be_lost(
    bucket, tmp_path, monkeypatch, written
) -> None:
    real = journals.create_file

    def create(path, content) -> None:
        if written:
            real(path, content)
        raise ConnectionError("reset by peer")

    journal = opened(bucket, tmp_path / "disk")
    with monkeypatch.context() as patch:
        patch.setattr(journals, "create_file", create)
        assert journal.write(0, content(0)) == content(0)
    assert files(bucket) == ["00000000.npz"] * written
    assert journal.upload() == 0
    assert files(bucket) == ["00000000.npz"]


def test_the_bucket_counts_where_another_pod_has_gone_on(bucket, tmp_path) -> None:
    bucket.up = False
    before = opened(bucket, tmp_path / "old pod")
    before.write(0, content(0))
    before.write(1, content(1))
    bucket.up = True
    other = content(0, count=1)
    opened(bucket, tmp_path / "new pod").write(0, other)
    back = opened(bucket, tmp_path / "old pod")
    assert back.read(0) == other
    assert back.read(1) is None, "a rollout of weights that are no longer those of the run"
    assert back.upload() == 0
    assert list((tmp_path / "old pod").iterdir()) == []
    assert opened(bucket, tmp_path / "third pod").read(0) == other


def replace(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the next attempt on record, as its controller does before anything else."""
    monkeypatch.setenv("SLIPWAY_SUCCESSOR", "runs/run/launches/0002.json")
    record = bucket.folder / "run/launches/0002.json"
    record.parent.mkdir(parents=True)
    record.write_text("{}")


def test_an_attempt_that_a_later_one_has_replaced_writes_nothing(bucket, tmp_path, monkeypatch) -> None:
    disk = tmp_path / "disk"
    journal = opened(bucket, disk)
    journal.write(0, content(0))
    bucket.up = False
    journal.write(1, content(1))
    replace(bucket, monkeypatch)
    bucket.up = True
    with pytest.raises(ReplacedError, match=r"0002\.json exists: a later attempt has replaced this one"):
        journal.upload()
    with pytest.raises(ReplacedError, match="has the journal"):
        journal.write(2, content(2))
    assert files(bucket) == ["00000000.npz"]
    assert sorted(path.name for path in disk.iterdir()) == ["00000001.npz", "00000002.npz"]


def test_what_another_attempt_has_written_first_counts(bucket, tmp_path) -> None:
    one, two = opened(bucket, tmp_path / "one"), opened(bucket, tmp_path / "two")
    first, second = content(0), content(0, count=1)
    assert one.write(0, first) == first
    assert two.write(0, second) == first
    assert two.read(0) == first
    assert two.write(1, content(1)) == content(1)
    assert one.write(1, content(1)) == content(1)
    assert one.upload() == two.upload() == 0
    assert files(bucket) == ["00000000.npz", "00000001.npz"]
    assert opened(bucket, tmp_path / "three").read(0) == first


@pytest.mark.parametrize("act", [lambda journal: journal.upload(), lambda journal: journal.write(1, content(1))])
def test_an_attempt_that_has_trained_on_other_samples_than_the_journal_has_ends(bucket, tmp_path, act) -> None:
    journal = opened(bucket, tmp_path / "one")
    bucket.up = False
    journal.write(0, content(0))
    bucket.up = True
    other = content(0, count=1)
    opened(bucket, tmp_path / "two").write(0, other)
    with pytest.raises(ReplacedError, match="another attempt has written rollout 0 of the journal"):
        act(journal)
    assert opened(bucket, tmp_path / "three").read(0) == other


def test_a_torn_file_on_the_disk_is_drawn_again(bucket, tmp_path, caplog) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    (disk / "00000000.npz").write_bytes(content(0)[:100])
    (disk / "00000001.npz").write_bytes(content(2))
    journal = opened(bucket, disk)
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

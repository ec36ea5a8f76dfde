"""The lease as an object of a bucket that others can write to, and its renewal in its real thread."""

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import pytest

from controller.core.errors import CloudError
from controller.core.this_process import Clock
from controller.gcp.folder_store import FolderClient
from controller.gcp.google_errors import NotFoundError
from controller.lease import Lease, ReleaseRequestedError, lease_guard
from controller.lease_store import KEY, BucketLeaseStore, DamagedLeaseError, Identity, LeaseSnapshot, ReleaseRequest
from tests.controller.localcloud.harness import wait_for
from tests.controller.test_lease import file, time
from tests.fakes.clock import ManualClock
from tests.fakes.leases import FakeFile, last_words, lease

TERM = Identity("laptop", "run-1", holder="anna@lab", process="boot:pid[1]:7/9").new_record(3, 1.0, 60.0).to_json()


class Bucket:
    """Has one object, written five seconds before it is asked for, or none."""

    def __init__(self, metadata: dict[str, str] | None, is_there: bool = True) -> None:
        self.metadata_of_it, self.is_there = metadata, is_there

    def object_metadata(self, bucket: str, name: str) -> tuple[dict[str, Any], float]:
        assert bucket == "b"
        assert name in ("pods/pod/lease.json", "sweeps/pod/lease.json", "pods/pod/release.json")
        if not self.is_there:
            raise NotFoundError("objects.get", 404, "notFound", "no such object")
        kept = {} if self.metadata_of_it is None else {"metadata": self.metadata_of_it}
        return {"generation": "12", "updated": "1970-01-01T00:01:40Z", **kept}, 105.0


def read(google: Any, among: Literal["pods", "sweeps"] = "pods") -> LeaseSnapshot | None:
    return BucketLeaseStore(google, "b", "pod", among).read()


def test_a_lease_is_read_with_its_age_and_a_later_versions_keys_are_left_out() -> None:
    assert read(Bucket(None, is_there=False)) is None
    seen = read(Bucket({KEY: json.dumps(TERM | {"later": [1]})}))
    assert seen is not None
    assert (seen.record.to_json(), seen.generation, seen.age) == (TERM, 12, 5.0)


HOSTILE: list[dict[str, Any]] = [
    *({"token": value} for value in ("next", 0, None)),
    *({"acquired": value} for value in ("yesterday", 1e300, float("nan"))),
    *({"duration_seconds": value} for value in (float("inf"), [])),
    {"holder": {"name": "anna"}},
    *({"process": f"boot:pid[1]:{pid}/9"} for pid in ("seven", "7" * 5000)),
    {"release_requested": 1},
    *({"exit_code": value} for value in ("none", 1 << 40)),
]
BROKEN = ["", "{", "null", "7", "[]", "{}", '"lease"', "\ud800"]


@pytest.mark.parametrize(
    "text", [*(json.dumps(TERM | other) for other in HOSTILE), *BROKEN], ids=lambda t: ascii(t)[-40:]
)
def test_what_is_no_lease_is_one_clear_error(text: str) -> None:
    with pytest.raises(CloudError) as error:
        read(Bucket({KEY: text}))
    said = str(error.value)
    assert "gs://b/pods/pod/lease.json is not a lease written by slipway" in said
    assert "`gcloud storage rm gs://b/pods/pod/lease.json`" in said
    assert "\n" not in said


def test_an_object_of_somebody_else_is_the_same_error() -> None:
    """No worker remembers the lease of a sweep."""
    for metadata in (None, {}, {"other": "words"}):
        kinds: dict[Literal["pods", "sweeps"], bool] = {"pods": True, "sweeps": False}
        for among, is_said in kinds.items():
            words = rf"is not a lease written by slipway.*gcloud storage rm gs://b/{among}/pod/lease\.json"
            with pytest.raises(CloudError, match=words) as error:
                read(Bucket(metadata), among)
            assert ("slipway down" in str(error.value)) is is_said


REQUEST = ReleaseRequest("cancelled by ben@lab", "ben-1", "anna-1").to_json()


@pytest.mark.parametrize(
    ("text", "is_read"),
    [
        (json.dumps(REQUEST | {"later": [1]}), True),
        *((text, False) for text in BROKEN),
        *((json.dumps(REQUEST | {key: value}), False) for key in ("asker_id", "holder_id") for value in (None, 7, [])),
        (json.dumps(REQUEST | {"release_requested": {"by": "ben"}}), False),
        (json.dumps(REQUEST | {"format": 2}), False),
    ],
    ids=lambda value: ascii(value)[-40:],
)
def test_a_request_is_read_with_its_age_and_what_is_none_asks_nobody(text: str, is_read: bool) -> None:
    """Whoever asked asks again."""
    found = BucketLeaseStore(cast(Any, Bucket({KEY: text})), "b", "pod").read_request()
    assert found == ((ReleaseRequest("cancelled by ben@lab", "ben-1", "anna-1"), 5.0) if is_read else None)


def holder(folder: Path) -> tuple[Lease, BucketLeaseStore, ManualClock]:
    """A lease that is held in a bucket of this machine, with a term of a minute."""
    store, clock = BucketLeaseStore(FolderClient(Clock()), str(folder), "pod"), ManualClock()
    made = Lease(store, clock, Identity("laptop", "run-1", process=""), 60.0, 60.0, lambda: None)
    assert made.ensure() == 1
    return made, store, clock


@pytest.mark.parametrize("content", [b"", b"[]", b'{"format": 1, "token": 1}', b"\xff\x00"])
def test_a_lease_that_somebody_damaged_is_released_all_the_same(tmp_path: Path, content: bytes) -> None:
    """It would stand in the way of every later verb, and nobody is left who may mend it."""
    mine, store, _ = holder(tmp_path)
    store.google.upload(str(tmp_path), store.object_name, content)
    mine.release("finished", 0)
    found = store.read()
    assert found is not None
    assert (found.record.released, found.record.said, found.record.exit_code) == (True, "finished", 0)


def test_a_lease_is_not_released_over_another_holders_nor_after_its_term(tmp_path: Path) -> None:
    mine, store, _ = holder(tmp_path / "one")
    held = store.read()
    assert held is not None
    store.write(Identity("laptop", "run-1", id="ben", process="").new_record(2, 0.0, 60.0), held.generation)
    mine.release("finished", 0)
    found = store.read()
    assert found is not None
    assert (found.record.id, found.record.released) == ("ben", False)
    mine, store, clock = holder(tmp_path / "other")
    store.google.upload(store.bucket, store.object_name, b"")
    clock.elapsed = 61.0
    mine.release("finished", 0)
    with pytest.raises(DamagedLeaseError):
        store.read()


__all__ = ["file", "time"]


def is_renewed(file: FakeFile) -> bool:
    before = file.writes
    wait_for(lambda: file.writes >= before + 3, "renewals")
    return True


def test_a_lease_is_renewed_until_it_is_released_also_across_an_outage(file: FakeFile) -> None:
    mine = lease(file, renews=True)
    assert not mine.held
    assert mine.ensure() == 1
    assert is_renewed(file)
    file.down, before = True, file.attempts
    wait_for(lambda: file.attempts >= before + 3, "renewals in vain")
    file.down = False
    assert is_renewed(file)
    thread = cast(threading.Thread, mine._thread)
    mine.release("done", 0)
    assert not thread.is_alive()
    assert not mine.held
    assert (last_words(file).released, last_words(file).said) == (True, "done")
    assert mine.ensure() == 2, "it may be acquired again"
    file.down = True  # a lease that cannot be released expires by itself
    mine.release()
    assert not mine.held


def test_a_renewal_that_meets_a_request_to_release_wakes_who_sleeps_and_ends(file: FakeFile) -> None:
    woken = threading.Event()
    first, second = lease(file, "anna", woken.set, renews=True), lease(file, "ben", renews=True)
    first.ensure()
    thread = cast(threading.Thread, first._thread)
    while second.request_release("cancelled") is None:
        pass
    assert woken.wait(120)
    thread.join(120)
    assert not thread.is_alive()
    with pytest.raises(ReleaseRequestedError):
        first.ensure()
    with pytest.raises(ReleaseRequestedError):
        first.raise_if_lost()
    first.release()


def test_writes_to_the_pod_are_guarded_inside_the_block_only(file: FakeFile) -> None:
    mine = lease(file, renews=True)
    google = SimpleNamespace(before_pod_write=lambda: 0)
    context: Any = SimpleNamespace(google=google, before_pod_write=lambda: 0, lease_path="")
    plan: Any = SimpleNamespace(bucket="b", node=SimpleNamespace(name="pod"))
    with lease_guard(mine, plan, context):
        assert context.lease_path == "b/pod"
        assert (context.before_pod_write(), google.before_pod_write()) == (1, 1)
    assert (context.before_pod_write(), google.before_pod_write()) == (0, 0)
    assert not mine.held

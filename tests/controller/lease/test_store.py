"""The lease as an object of a bucket that others can write to."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest

from controller.core.errors import CloudError
from controller.gcp.errors import NotFoundError
from controller.lease.store import KEY, BucketLeaseStore, Identity, LeaseSnapshot

TERM = Identity("laptop", "run-1", holder="anna@lab", process="boot:pid[1]:7/9").new_record(3, 1.0, 60.0).to_json()


class Bucket:
    """Has one object, written five seconds before it is asked for, or none."""

    def __init__(self, metadata: dict[str, str] | None, is_there: bool = True) -> None:
        self.metadata_of_it, self.is_there = metadata, is_there

    def object_metadata(self, bucket: str, name: str) -> tuple[dict[str, Any], float]:
        assert (bucket, name) in (("b", "pods/pod/lease.json"), ("b", "sweeps/pod/lease.json"))
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
        for among, is_said in (("pods", True), ("sweeps", False)):
            words = rf"is not a lease written by slipway.*gcloud storage rm gs://b/{among}/pod/lease\.json"
            with pytest.raises(CloudError, match=words) as error:
                read(Bucket(metadata), among)
            assert ("slipway down" in str(error.value)) is is_said

"""The file system behind gs://: it outlasts refusals, and says what is in the bucket now, whichever library asks."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import fsspec
import gcsfs.retry
import orbax.checkpoint as ocp
import pytest
from etils import epath
from etils.epath import backend

from conf.schema.training.settings import CheckpointSettings
from tests.controller.localcloud.conftest import cloud as cloud
from tests.groups import CONF, load_yaml
from tests.trainer.buckets import BUCKET, NAME
from tests.trainer.buckets import bucket as bucket
from trainer.checkpoint.manager import CheckpointManager
from trainer.corpus import files
from trainer.corpus.buckets import BucketFileSystem
from trainer.distributed.fingerprint import file_fingerprint
from trainer.pretrained import run_weights
from trainer.rl.remote import journal

SETTINGS = CheckpointSettings(**load_yaml(CONF / "config.yaml")["checkpoint"])


def test_the_trainer_uses_it_for_all_paths_of_buckets() -> None:
    registry = importlib.import_module("fsspec.registry")
    with (
        mock.patch.dict(registry._registry, clear=True),
        mock.patch.dict(registry.known_implementations),
        mock.patch.dict(fsspec.config.conf, clear=True),
    ):
        files.use_buckets(24)
        assert fsspec.config.conf == {"gs": {"max_outage_hours": 24}, "gcs": {"max_outage_hours": 24}}
        assert {fsspec.get_filesystem_class(scheme) for scheme in ("gs", "gcs")} == {BucketFileSystem}


def refuse(cloud: Any, match: str, times: int) -> None:
    storm = {"kind": "http", "status": 503, "match": match, "times": times}
    cloud.call_ok("POST", "emulator/faults", {"key": f"{match} {times}", "faults": [storm]})


def test_it_outlasts_a_storm(cloud, bucket, monkeypatch):
    monkeypatch.setattr(gcsfs.retry, "min", lambda *_: 0.0, raising=False)  # of the pauses
    refuse(cloud, "POST /upload", 100)
    bucket.pipe(f"{BUCKET}/storm", b"bytes")
    assert bucket.cat(f"{BUCKET}/storm") == b"bytes"
    with pytest.raises(FileNotFoundError):
        bucket.cat(f"{BUCKET}/none")
    refuse(cloud, f"GET .*/{NAME}/o/storm.*", 200)
    patient = BucketFileSystem(max_outage_hours=1.0)
    assert patient.cat(f"{BUCKET}/storm") == b"bytes"
    refuse(cloud, f"GET .*/{NAME}/o/storm.*", 150)
    with pytest.raises(gcsfs.retry.HttpError):
        bucket.cat(f"{BUCKET}/storm")


def steps_of_orbax(address: str) -> Any:
    with ocp.CheckpointManager(address) as manager:
        return manager.all_steps(read=True)


def newest(address: str) -> Any:
    manager = CheckpointManager(address.rpartition("/")[0], SETTINGS)
    found = {manager.latest_step(), manager._newest_complete()} - {None}
    manager.close()
    return found


ASKERS: dict[str, Callable[[str], Any]] = {
    "fsspec": lambda at: fsspec.filesystem("gs").ls(at),
    "fsspec, recursively": lambda at: fsspec.filesystem("gs").find(at),
    "fsspec, a pattern": lambda at: fsspec.url_to_fs(at)[0].glob(f"{at}/*"),
    "epath": lambda at: list(epath.Path(at).iterdir()),
    "epath, a pattern": lambda at: list(epath.Path(at).glob("*.npz")),
    "epath, recursively": lambda at: [names for _, folders, names in epath.Path(at).walk() if folders or names],
    "Orbax, names of steps": lambda at: list(ocp.path.step.standard_name_format().find_all(at)),
    "Orbax, its manager": steps_of_orbax,
    "checkpoints of this run": newest,
    "checkpoints of a run": lambda at: run_weights.checkpoint_steps(epath.Path(at).parent),
    "journal": lambda at: journal._numbers(epath.Path(at)),
    "fingerprint": lambda at: file_fingerprint(at).replace("absent", ""),
}


@pytest.mark.parametrize("ask", ASKERS.values(), ids=ASKERS)
def test_a_folder_is_what_is_in_it_now(cloud, bucket, monkeypatch, ask):
    """It was never there; another attempt writes to it and deletes it, also between two calls of one listing."""
    folder = f"{ask.__name__}-{id(ask)}/checkpoints"
    names = [f"{folder}/5/commit_success.txt", f"{folder}/5/_CHECKPOINT_METADATA", f"{folder}/00000005.npz"]
    assert not ask(f"{BUCKET}/{folder}")
    for name in names:
        path = f"upload/storage/v1/b/{NAME}/o?uploadType=media&name={name.replace('/', '%2F')}"
        cloud.call_ok("POST", path, {})
    assert ask(f"{BUCKET}/{folder}")
    for name in names:
        cloud.call_ok("DELETE", f"storage/v1/b/{NAME}/o/{name.replace('/', '%2F')}")
    assert not ask(f"{BUCKET}/{folder}")
    monkeypatch.setattr(backend.fsspec_backend, "exists", lambda _: True)
    assert not ask(f"{BUCKET}/{folder}")


@pytest.mark.parametrize("at", ["gs://absent", "gs://absent/folder"])
def test_a_bucket_that_is_not_there_is_named(bucket, at):
    with pytest.raises(FileNotFoundError, match="absent"):
        bucket.ls(at)
    with pytest.raises(FileNotFoundError, match="absent"):
        list(epath.Path(at).iterdir())

"""Object storage that refuses for a while: gcsfs as the trainer sets it goes on asking."""

import importlib
from unittest import mock

import fsspec
import gcsfs.retry
import pytest

from tests.controller.localcloud.conftest import cloud as cloud
from trainer import main
from trainer.checkpoint.gcs_retry import RetryingFileSystem


def test_the_trainer_uses_it_for_all_paths_of_buckets() -> None:
    registry = importlib.import_module("fsspec.registry")
    with mock.patch.dict(registry._registry, clear=True), mock.patch.dict(registry.known_implementations):
        main._install_gcs_retries()
        assert {fsspec.get_filesystem_class(scheme) for scheme in ("gs", "gcs")} == {RetryingFileSystem}


def test_gcsfs_outlasts_a_storm(cloud, monkeypatch):
    cloud.call_ok("POST", "storage/v1/b?project=slipway-local", {"name": "storm"})
    monkeypatch.setattr(gcsfs.retry, "min", lambda *_: 0.0, raising=False)  # of the pauses
    endpoint = cloud.endpoint
    files = RetryingFileSystem(endpoint_url=f"{endpoint['url']}t/{endpoint['token']}", token="anon", project="p")
    storm = {"kind": "http", "status": 503, "match": "POST /upload", "times": 100}
    cloud.call_ok("POST", "emulator/faults", {"key": "storm", "faults": [storm]})
    files.pipe("storm/object", b"bytes")
    assert files.cat("storm/object") == b"bytes"
    with pytest.raises(FileNotFoundError):
        files.cat("storm/none")

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
    with (
        mock.patch.dict(registry._registry, clear=True),
        mock.patch.dict(registry.known_implementations),
        mock.patch.dict(fsspec.config.conf, clear=True),
    ):
        main._install_gcs_retries(24)
        assert fsspec.config.conf == {"gs": {"max_outage_hours": 24}, "gcs": {"max_outage_hours": 24}}
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


@pytest.mark.parametrize(("hours", "refusals"), [(1.0, 200), (0.0, 150)])
def test_a_read_waits_as_long_as_the_outage_may_last(cloud, monkeypatch, hours, refusals):
    cloud.call_ok("POST", "storage/v1/b?project=slipway-local", {"name": f"reads-{refusals}"})
    monkeypatch.setattr(gcsfs.retry, "min", lambda *_: 0.0, raising=False)  # of the pauses
    place = {"endpoint_url": f"{cloud.endpoint['url']}t/{cloud.endpoint['token']}", "token": "anon", "project": "p"}
    files = RetryingFileSystem(**place, max_outage_hours=hours)
    files.pipe(f"reads-{refusals}/object", b"bytes")
    storm = {"kind": "http", "status": 503, "match": f"GET .*/reads-{refusals}/.*", "times": refusals}
    cloud.call_ok("POST", "emulator/faults", {"key": f"reads-{refusals}", "faults": [storm]})
    if hours:
        assert files.cat(f"reads-{refusals}/object") == b"bytes"
    else:
        with pytest.raises(gcsfs.retry.HttpError):
            files.cat(f"reads-{refusals}/object")

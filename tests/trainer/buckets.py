"""gs:// means the emulated cloud in this process: for tests of what the trainer reads from and writes to a bucket."""

from collections.abc import Iterator

import fsspec
import fsspec.config
import pytest
from etils.epath import backend

from tests.controller.localcloud.harness import EmulatedCloud
from trainer.corpus import files
from trainer.corpus.buckets import BucketFileSystem

NAME = "trainer"
BUCKET = f"gs://{NAME}"


@pytest.fixture(scope="module")
def bucket(cloud: EmulatedCloud) -> Iterator[BucketFileSystem]:
    """The file system of the bucket, as the trainer's programs use it."""
    cloud.call_ok("POST", "storage/v1/b?project=slipway-local", {"name": NAME})
    root = f"{cloud.endpoint['url']}t/{cloud.endpoint['token']}"
    with pytest.MonkeyPatch.context() as patch:
        for variable in ("STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL"):
            patch.setenv(variable, root)
        for scheme in ("gs", "gcs"):
            patch.setitem(fsspec.config.conf, scheme, {"token": "anon", "project": "slipway-local"})
        _forget()
        files.use_buckets()
        yield fsspec.filesystem("gs")
        _forget()


def _forget() -> None:
    BucketFileSystem.clear_instance_cache()
    backend.fsspec_backend._get_filesystem.cache_clear()

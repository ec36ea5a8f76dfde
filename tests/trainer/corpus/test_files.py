"""Whatever a config names is read from a bucket as it is from a folder, within a block of fsspec's cache and beyond."""

from __future__ import annotations

import json
from collections.abc import Iterator

import fsspec
import pytest
from etils.epath import backend
from gcsfs import GCSFileSystem

from tests.controller.localcloud.conftest import cloud as cloud
from tests.controller.localcloud.harness import EmulatedCloud
from trainer.checkpoint.gcs_retry import RetryingFileSystem
from trainer.data.rows import read_rows

BLOCK = 1 << 12
BUCKET = "gs://files"


@pytest.fixture(scope="module")
def bucket(cloud: EmulatedCloud) -> Iterator[fsspec.AbstractFileSystem]:
    """The file system of a bucket; gs:// means the emulated cloud, with small blocks."""
    cloud.call_ok("POST", "storage/v1/b?project=slipway-local", {"name": BUCKET.removeprefix("gs://")})
    root = f"{cloud.endpoint['url']}t/{cloud.endpoint['token']}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", root)
        patch.setenv("TENSORSTORE_GCS_HTTP_URL", root)
        patch.setattr(GCSFileSystem, "default_block_size", BLOCK)
        for made in (GCSFileSystem, RetryingFileSystem):
            made.clear_instance_cache()
        backend.fsspec_backend._get_filesystem.cache_clear()
        yield fsspec.filesystem("gs")
        for made in (GCSFileSystem, RetryingFileSystem):
            made.clear_instance_cache()
        backend.fsspec_backend._get_filesystem.cache_clear()


@pytest.mark.parametrize("count", [3, 400])
def test_rows_of_json_lines(bucket, tmp_path, count):
    text = "".join(json.dumps({"question": f"{i} é?", "answer": f"#### {i}"}) + "\n" for i in range(count))
    (tmp_path / "train.jsonl").write_text(text)
    bucket.pipe(f"{BUCKET}/train-{count}.jsonl", text.encode())
    assert (len(text) > BLOCK) == (count == 400)
    ours = list(read_rows(str(tmp_path / "train.jsonl"), "data.path"))
    theirs = list(read_rows(f"{BUCKET}/train-{count}.jsonl", "data.path"))
    assert [row.value for row in theirs] == [row.value for row in ours] != []

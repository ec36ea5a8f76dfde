"""Files that are written once: whoever comes second is told, and changes nothing."""

import pytest
from etils import epath

from tests.controller.localcloud.conftest import cloud as cloud
from trainer.checkpoint import storage
from trainer.checkpoint.gcs_retry import RetryingFileSystem
from trainer.checkpoint.storage import create_file


def test_a_file_of_a_folder_is_created_once(tmp_path) -> None:
    path = epath.Path(tmp_path) / "journal" / "0.npz"
    create_file(path, b"first")
    with pytest.raises(FileExistsError):
        create_file(path, b"second")
    assert path.read_bytes() == b"first"
    assert [each.name for each in path.parent.iterdir()] == ["0.npz"]


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
@pytest.mark.parametrize("size", [7, 60 << 20])
def test_an_object_of_a_bucket_is_created_once(cloud, monkeypatch, size) -> None:
    name = f"once-{size}"
    cloud.call_ok("POST", "storage/v1/b?project=slipway-local", {"name": name})
    root = f"{cloud.endpoint['url']}t/{cloud.endpoint['token']}"
    files = RetryingFileSystem(endpoint_url=root, token="anon", project="p")
    monkeypatch.setattr(storage.fsspec.core, "url_to_fs", lambda url: (files, url.removeprefix("gs://")))
    path = epath.Path(f"gs://{name}/runs/one/journal/0.npz")
    create_file(path, b"a" * size)
    with pytest.raises(FileExistsError):
        create_file(path, b"b" * size)
    assert files.cat_file(f"{name}/runs/one/journal/0.npz") == b"a" * size

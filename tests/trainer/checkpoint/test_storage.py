"""Files that are written once: whoever comes second is told, and changes nothing."""

import pytest
from etils import epath

from tests.conftest import deep
from tests.controller.localcloud.conftest import cloud as cloud
from tests.trainer.buckets import BUCKET
from tests.trainer.buckets import bucket as bucket
from trainer.checkpoint.storage import create_file


def test_a_file_of_a_folder_is_created_once(tmp_path) -> None:
    path = epath.Path(tmp_path) / "journal" / "0.npz"
    create_file(path, b"first")
    with pytest.raises(FileExistsError):
        create_file(path, b"second")
    assert path.read_bytes() == b"first"
    assert [each.name for each in path.parent.iterdir()] == ["0.npz"]


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
@pytest.mark.parametrize("size", [7, *deep(60 << 20)])
def test_an_object_of_a_bucket_is_created_once(bucket, size) -> None:
    path = epath.Path(f"{BUCKET}/once-{size}/journal/0.npz")
    create_file(path, b"a" * size)
    with pytest.raises(FileExistsError):
        create_file(path, b"b" * size)
    assert bucket.cat_file(str(path)) == b"a" * size

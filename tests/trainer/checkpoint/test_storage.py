"""Files that are written once: whoever comes second is told, and changes nothing."""

import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from etils import epath

from tests.conftest import deep
from tests.controller.localcloud.conftest import cloud as cloud
from tests.trainer.buckets import BUCKET
from tests.trainer.buckets import bucket as bucket
from trainer.checkpoint.quiet_credentials import without_lines
from trainer.checkpoint.storage import create_file


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
@pytest.mark.parametrize("size", [7, *deep(60 << 20)])
def test_a_file_of_a_folder_and_an_object_of_a_bucket_are_created_once(bucket, tmp_path, size) -> None:
    for folder in (str(tmp_path), f"{BUCKET}/once-{size}"):
        path = epath.Path(folder) / "journal" / "0.npz"
        create_file(path, b"a" * size)
        with pytest.raises(FileExistsError):
            create_file(path, b"b" * size)
        assert path.read_bytes() == b"a" * size
        assert [each.name for each in path.parent.iterdir()] == ["0.npz"]


LOOK_UP = """
import os, sys
from trainer.checkpoint.quiet_credentials import find_credentials
if sys.argv[1] == "quiet":
    find_credentials("gs://slipway-nowhere/runs/x")
else:
    import tensorstore
    tensorstore.KvStore.open("gs://slipway-nowhere/runs/x/").result().read("credentials").result()
os.write(2, b"afterwards\\n")
"""


class NotFound(BaseHTTPRequestHandler):
    """A metadata server without an account, and a Cloud Storage without objects."""

    def do_GET(self) -> None:
        self.send_response(404)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_only_the_named_lines_are_left_out(capfd):
    with without_lines(re.compile(rb"harmless")):
        os.write(2, b"E1122 harmless: nothing\n")
        os.write(2, b"E1122 serious\nlast, without an end of line")
    os.write(2, b"\nafterwards\n")
    assert capfd.readouterr().err == "E1122 serious\nlast, without an end of line\nafterwards\n"


def test_tensorstore_finds_its_credentials_in_silence(tmp_path):
    with ThreadingHTTPServer(("127.0.0.1", 0), NotFound) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        root = f"127.0.0.1:{server.server_port}"
        env = {**os.environ, "HOME": str(tmp_path), "GCE_METADATA_ROOT": root}
        env = {**env, "TENSORSTORE_GCS_HTTP_URL": f"http://{root}"}
        said = [
            subprocess.run([sys.executable, "-c", LOOK_UP, how], capture_output=True, text=True, env=env, check=True)
            for how in ("quiet", "loud")
        ]
        server.shutdown()
    assert said[0].stderr == "afterwards\n"
    assert "Could not find the credentials file" in said[1].stderr  # else there is nothing to leave out any more

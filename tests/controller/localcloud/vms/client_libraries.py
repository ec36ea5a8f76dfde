"""Runs on a worker of the emulated cloud: every storage client that programs use, in the environment found there."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import googleapiclient
import googleapiclient.http
import numpy as np
import tensorstore
from etils import epath
from gcsfs import GCSFileSystem
from google.oauth2.credentials import Credentials
from google_auth_httplib2 import AuthorizedHttp
from googleapiclient.discovery import build_from_document
from googleapiclient.http import MediaIoBaseDownload, MediaIoBaseUpload

BUCKET, ROOT, TOKEN, EVENTS = sys.argv[1:]
BIG = os.urandom(3_000_001)


def use_gcsfs() -> None:
    files = GCSFileSystem()
    files.pipe(f"{BUCKET}/gcsfs/small", b"small")
    with files.open(f"{BUCKET}/gcsfs/big", "wb", block_size=1 << 20) as file:
        file.write(BIG)
    assert files.cat(f"{BUCKET}/gcsfs/big") == BIG
    assert files.cat_file(f"{BUCKET}/gcsfs/small", start=1, end=3) == b"ma"
    files.mv(f"{BUCKET}/gcsfs/small", f"{BUCKET}/gcsfs/sub/moved")
    assert files.find(f"{BUCKET}/gcsfs") == [f"{BUCKET}/gcsfs/big", f"{BUCKET}/gcsfs/sub/moved"]
    files.rm(f"{BUCKET}/gcsfs", recursive=True)
    files.invalidate_cache()
    assert not files.exists(f"{BUCKET}/gcsfs/big")


def use_epath() -> None:
    folder = epath.Path(f"gs://{BUCKET}/epath")
    (folder / "a" / "b.txt").write_text("text")
    assert (folder / "a" / "b.txt").read_text() == "text"
    assert [path.name for path in folder.iterdir()] == ["a"]
    folder.rmtree()
    assert not (folder / "a" / "b.txt").exists()


def use_tensorstore() -> None:
    spec = {"driver": "zarr3", "kvstore": f"gs://{BUCKET}/tensorstore/"}
    shape = [64, 8]
    array = tensorstore.open(spec, create=True, dtype=tensorstore.float32, shape=shape).result()
    array.write(np.ones(shape, np.float32)).result()
    assert np.asarray(tensorstore.open(spec).result().read().result()).sum() == 512


def use_google_api_client() -> None:
    folder = Path(googleapiclient.__file__).parent / "discovery_cache" / "documents"
    document = json.loads((folder / "storage.v1.json").read_text())
    document["rootUrl"] = document["mtlsRootUrl"] = ROOT
    http = AuthorizedHttp(Credentials(TOKEN), http=googleapiclient.http.build_http())
    objects = build_from_document(document, http=http).objects()
    for name, resumable in (("whole", False), ("chunks", True)):
        media = MediaIoBaseUpload(io.BytesIO(BIG), "application/x", chunksize=1 << 20, resumable=resumable)
        made = objects.insert(bucket=BUCKET, name=name, media_body=media, ifGenerationMatch=0).execute()
        assert made["size"] == str(len(BIG))
        target = io.BytesIO()
        download = MediaIoBaseDownload(target, objects.get_media(bucket=BUCKET, object=name), chunksize=1 << 20)
        while not download.next_chunk()[1]:
            pass
        assert target.getvalue() == BIG


def use_tensorboard() -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary import Writer

    folder = Path(os.environ["TMPDIR"]) / "events"
    writer = Writer(str(folder))
    for step in range(13):
        writer.add_scalar("loss", float(step), step)
    writer.close()
    (path,) = folder.iterdir()
    (epath.Path(EVENTS) / path.name).write_bytes(path.read_bytes())
    events = EventAccumulator(EVENTS, size_guidance={"tensors": 0})
    events.Reload()
    assert len(events.Tensors("loss")) == 13


for use in (use_gcsfs, use_epath, use_tensorstore, use_google_api_client, use_tensorboard):
    use()
    print(use.__name__, flush=True)

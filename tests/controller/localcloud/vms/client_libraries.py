"""Runs on a worker of the emulated cloud: storage clients of other people's programs, in the environment found there.

The trainer's own are in tests/scenarios/training/test_bucket.py.
"""

import io
import json
import os
import sys
from pathlib import Path

import googleapiclient
import googleapiclient.http
from gcsfs import GCSFileSystem
from google.oauth2.credentials import Credentials
from google_auth_httplib2 import AuthorizedHttp
from googleapiclient.discovery import build_from_document
from googleapiclient.http import MediaIoBaseDownload, MediaIoBaseUpload

BUCKET, ROOT, TOKEN = sys.argv[1:]
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


for use in (use_gcsfs, use_google_api_client):
    use()
    print(use.__name__, flush=True)

#!/bin/sh
# A folder of a bucket exists for gcsfs, and listing it says that it does not.
#
# gcsfs 2026.10.1, fsspec 2026.9.0, etils 1.15.0, Python 3.11; 2026-11-28. The server below answers the two requests
# that are made as Cloud Storage's JSON API documents them (objects.list and objects.get).
#
# One process lists the folder `run` of a bucket; another one then deletes the only object in `run/steps`. One would
# guess that `exists()` is False from then on, or at least that what exists can be listed: a bucket has no folders, so an
# empty listing is what objects.list answers. The same for a folder after `mkdir`, which raises nothing.
#
# Seen:
#   before          exists True, holds ['1']
#   deleted         exists True, listing: FileNotFoundError
#   cache emptied   exists False, listing: FileNotFoundError
#   after mkdir     exists False, listing: FileNotFoundError
#
# Exits 0 while that is what happens, and 1 once it is not.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet gcsfs==2026.10.1 fsspec==2026.9.0 "etils[epath]==1.15.0"
cat >"$folder/look.py" <<'PYTHON'
import http.server, json, os, threading
from urllib.parse import parse_qs, unquote, urlsplit

names = {"run/steps/1", "run/log"}


class Server(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        name = unquote(url.path.partition("/o/")[2])
        if name and name not in names:
            return self.answer(404, {"error": {"code": 404, "message": f"No such object: bucket/{name}"}})
        if name:
            return self.answer(200, self.describe(name))
        prefix, cut = query.get("prefix", ""), query.get("delimiter", "")
        found = sorted(name for name in names if name.startswith(prefix))
        below = {name for name in found if cut and cut in name[len(prefix) :]}
        folders = sorted({prefix + name[len(prefix) :].split(cut)[0] + cut for name in below})
        body = {"kind": "storage#objects", "prefixes": folders}
        self.answer(200, body | {"items": [self.describe(name) for name in found if name not in below]})

    def describe(self, name):
        times = {"timeCreated": "2026-11-28T00:00:00.000Z", "updated": "2026-11-28T00:00:00.000Z"}
        return {"kind": "storage#object", "bucket": "bucket", "name": name, "size": "1", "generation": "1"} | times

    def answer(self, status, body):
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ["STORAGE_EMULATOR_HOST"] = f"http://127.0.0.1:{server.server_port}"
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"

import fsspec
from etils import epath

fsspec.config.conf["gcs"] = {"token": "anon"}
steps = epath.Path("gs://bucket/run/steps")


def show(when, folder):
    exists = folder.exists()
    try:
        listing = f"holds {[path.name for path in folder.iterdir()]}"
    except Exception as error:
        listing = f"listing: {type(error).__name__}"
    print(f"{when:<15} exists {exists}, {listing}")


files = fsspec.filesystem("gcs", finalize_on_close=True)  # the one of etils
show("before", steps)
files.invalidate_cache()
list(steps.parent.iterdir())
names.remove("run/steps/1")
show("deleted", steps)
files.invalidate_cache()
show("cache emptied", steps)
(new := epath.Path("gs://bucket/run/new")).mkdir(parents=True, exist_ok=True)
show("after mkdir", new)
PYTHON
"$folder/venv/bin/python" "$folder/look.py" | tee "$folder/seen"
cat >"$folder/expected" <<'SEEN'
before          exists True, holds ['1']
deleted         exists True, listing: FileNotFoundError
cache emptied   exists False, listing: FileNotFoundError
after mkdir     exists False, listing: FileNotFoundError
SEEN
cmp "$folder/seen" "$folder/expected"

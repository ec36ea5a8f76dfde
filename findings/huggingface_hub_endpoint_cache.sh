#!/bin/sh
# The cache of huggingface_hub does not know which server a repository came from.
#
# huggingface_hub 2.4.0, Python 3.11; 2026-11-30. Two servers that answer as the Hub does, each with a repository
# owner/model: in the first one's there is config.json and no chat_template.jinja, in the second one's both are there, and
# config.json is another. The first is asked, then the second, with the cache where it was.
#
# One would guess that `endpoint` is part of a file's place in the cache, as the repository and the revision are: a mirror
# may be behind, and a server for tests has other files under the same names. The place is made of the names alone. So the
# cache says of a file that the second server has that it does not exist, and without a network a download from the second
# gives what the first one had.
#
# Seen (of the second server: whether the cache says that chat_template.jinja does not exist; its config.json by the cache,
# and by a download that may only read the cache; what a download asks it for):
#   absent True
#   cached first
#   offline first
#   asked second
#
# Exits 0 while that is what happens, and 1 once it is not.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet huggingface_hub==2.4.0
cat >"$folder/load.py" <<'PYTHON'
import contextlib, http.server, os, sys, threading

os.environ["HF_HUB_CACHE"] = sys.argv[1]
from huggingface_hub import _CACHED_NO_EXIST, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError


def serve(name, *files):
    class Hub(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            there = self.path.rpartition("/")[2] in files
            self.send_response(200 if there else 404)
            if not there:
                self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("X-Repo-Commit", name[0] * 40)
            self.send_header("ETag", f'"{name}"')
            self.send_header("Content-Length", str(len(name) if there else 0))
            self.end_headers()
            return there

        def do_GET(self):
            if self.do_HEAD():
                self.wfile.write(name.encode())

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


def text(path):
    with open(path) as file:
        return file.read()


first, second = serve("first", "config.json"), serve("second", "config.json", "chat_template.jinja")
hf_hub_download("owner/model", "config.json", endpoint=first)
with contextlib.suppress(EntryNotFoundError):
    hf_hub_download("owner/model", "chat_template.jinja", endpoint=first)

print("absent", try_to_load_from_cache("owner/model", "chat_template.jinja") is _CACHED_NO_EXIST)
print("cached", text(try_to_load_from_cache("owner/model", "config.json")))
print("offline", text(hf_hub_download("owner/model", "config.json", endpoint=second, local_files_only=True)))
print("asked", text(hf_hub_download("owner/model", "chat_template.jinja", endpoint=second)))
PYTHON
HF_HUB_DISABLE_TELEMETRY=1 "$folder/venv/bin/python" "$folder/load.py" "$folder/cache" 2>"$folder/log" | tee "$folder/seen"
cat >"$folder/expected" <<'SEEN'
absent True
cached first
offline first
asked second
SEEN
cmp "$folder/seen" "$folder/expected"

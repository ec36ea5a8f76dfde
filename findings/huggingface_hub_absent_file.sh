#!/bin/sh
# A file that the Hugging Face Hub refuses or cannot serve is, for huggingface_hub, a file that is not there.
#
# huggingface_hub 2.4.0, Python 3.11; 2026-11-28. `hf_hub_download` of an optional file of a model, with a server that answers
# as the Hub does: 404 with `X-Error-Code: EntryNotFound` where the repository lacks the file, and 403.
#
# Many loaders read an optional file (a chat template, an index of shards) by `except EntryNotFoundError: none`. One would
# guess that the exception means the first answer only, and that a refusal is an HfHubHTTPError. With an empty cache every
# failure, also 5xx and no network after five retries, is LocalEntryNotFoundError, a subclass of EntryNotFoundError: the
# model is read on without the file, here without its chat template.
#
# Seen (answer, exception, whether it is an EntryNotFoundError, whether it is an HfHubHTTPError):
#   404 RemoteEntryNotFoundError True True
#   403 LocalEntryNotFoundError True False
#
# Exits 0 while that is what happens, and 1 once it is not.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet huggingface_hub==2.4.0
cat >"$folder/load.py" <<'PYTHON'
import http.server, os, sys, threading


class Hub(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self):
        code = int(self.path.split("/")[2])
        self.send_response(code)
        if code == 404:
            self.send_header("X-Error-Code", "EntryNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD

    def log_message(self, *_):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ |= {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_CACHE": sys.argv[1]}
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

for code in (404, 403):
    try:
        hf_hub_download(f"owner/{code}", "chat_template.jinja")
    except Exception as error:
        kinds = isinstance(error, EntryNotFoundError), isinstance(error, HfHubHTTPError)
        print(code, type(error).__name__, *kinds)
PYTHON
HF_HUB_DISABLE_TELEMETRY=1 "$folder/venv/bin/python" "$folder/load.py" "$folder/cache" 2>"$folder/log" | tee "$folder/seen"
cat >"$folder/expected" <<'SEEN'
404 RemoteEntryNotFoundError True True
403 LocalEntryNotFoundError True False
SEEN
cmp "$folder/seen" "$folder/expected"

#!/bin/sh
# google-api-python-client goes past a proxy that the environment names, without a word.
#
# google-api-python-client 2.202.0, httplib2 0.32.1, Python 3.11; 2026-11-28. PySocks is no dependency of either.
#
# One would guess that `http_proxy` and `https_proxy` are obeyed, as by urllib, requests, curl and gcloud, or that the
# missing PySocks is an error: httplib2 does read the variables. Behind a company's proxy the user is told that the server
# cannot be found. The program below counts the requests that reach a proxy, and those that go straight to the server.
#
# Seen:
#   without PySocks: proxy 0, server 1
#   with PySocks: proxy 1, server 0
#
# Exits 0 while that is what happens, and 1 once it is not.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet google-api-python-client==2.202.0 httplib2==0.32.1
cat >"$folder/ask.py" <<'PYTHON'
import http.server, os, sys, threading

seen = {"proxy": 0, "server": 0}


def serve(name):
    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self):
            seen[name] += 1
            self.send_response(503)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_CONNECT = answer
        log_message = lambda *_: None

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


os.environ["http_proxy"] = os.environ["https_proxy"] = serve("proxy")
os.environ["no_proxy"] = ""
from googleapiclient.discovery import build
from googleapiclient.http import build_http

server = serve("server")
service = build("storage", "v1", http=build_http(), client_options={"api_endpoint": f"{server}/storage/v1/"})
try:
    service.buckets().list(project="project").execute()
except Exception:
    pass
print(f"{sys.argv[1]}: proxy {seen['proxy']}, server {seen['server']}")
PYTHON
cd "$folder"
venv/bin/python ask.py "without PySocks" | tee seen
venv/bin/pip install --quiet PySocks==1.7.1
venv/bin/python ask.py "with PySocks" | tee -a seen
cat >expected <<'SEEN'
without PySocks: proxy 0, server 1
with PySocks: proxy 1, server 0
SEEN
cmp seen expected

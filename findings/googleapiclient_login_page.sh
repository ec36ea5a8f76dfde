#!/bin/sh
# google-api-python-client returns the login page of a captive portal as the answer of a call, without an error.
#
# google-api-python-client 2.202.0, httplib2 0.32.1, Python 3.11; 2026-11-28.
#
# One would guess that a call whose answer is no JSON raises, as requests' `.json()` does. With status 200
# the text itself is returned, where every caller expects a dict: `in`, `len` and a loop over it do not fail, so a network
# that answers for everybody reads as "nothing is there". With status 403 the same page is an HttpError. The program below asks
# a server that answers each request with one page for a list of buckets.
#
# Seen:
#   200: str, 'items' in it: False
#   403: HttpError
#
# Exits 0 while that is what happens, and 1 once it is not.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet google-api-python-client==2.202.0 httplib2==0.32.1
cat >"$folder/ask.py" <<'PYTHON'
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import httplib2
from googleapiclient.discovery import build
from googleapiclient.errors import HttpError

PAGE = b"<html><title>Hotel</title><body>Enter your room number</body></html>"


class Portal(BaseHTTPRequestHandler):
    status = 200

    def do_GET(self):
        self.send_response(self.status)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(PAGE)))
        self.end_headers()
        self.wfile.write(PAGE)

    def log_message(self, *_):
        pass


server = HTTPServer(("127.0.0.1", 0), Portal)
threading.Thread(target=server.serve_forever, daemon=True).start()
there = {"api_endpoint": f"http://127.0.0.1:{server.server_port}/storage/v1/"}
service = build("storage", "v1", http=httplib2.Http(proxy_info=None), client_options=there)
for Portal.status in (200, 403):
    try:
        answer = service.buckets().list(project="project").execute(num_retries=0)
        print(f"{Portal.status}: {type(answer).__name__}, 'items' in it: {'items' in answer}")
    except HttpError as error:
        print(f"{Portal.status}: {type(error).__name__}")
PYTHON
cd "$folder"
venv/bin/python ask.py | tee seen
cat >expected <<'SEEN'
200: str, 'items' in it: False
403: HttpError
SEEN
cmp seen expected

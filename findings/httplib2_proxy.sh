#!/bin/sh
# google-api-python-client goes past a proxy that the environment names, without a word.
#
# google-api-python-client 2.202.0, httplib2 0.32.1, Python 3.11; 2026-11-28. PySocks is no dependency of either.
#
# One would guess that `https_proxy` is obeyed, as by urllib, requests, curl and gcloud, or that the missing PySocks is an
# error, as it is for `http_proxy`: httplib2 reads both variables. Behind a company's proxy the user is told that Google's
# server cannot be found. The program below counts the connections to a proxy and to the server, of one call by each scheme.
#
# Seen:
#   without PySocks, https: proxy 0, server 1
#   without PySocks, http: proxy 0, server 0, ProxiesUnavailableError
#   with PySocks, https: proxy 1, server 0
#   with PySocks, http: proxy 1, server 0
#
# Exits 0 while that is what happens, and 1 once it is not.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet google-api-python-client==2.202.0 httplib2==0.32.1
cat >"$folder/ask.py" <<'PYTHON'
import os, socket, sys, threading


class Listener:
    """Counts connections, and closes each."""

    def __init__(self):
        self.seen, self.socket = 0, socket.create_server(("127.0.0.1", 0))
        self.address = "127.0.0.1:%d" % self.socket.getsockname()[1]
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self):
        while True:
            connection, _ = self.socket.accept()
            self.seen += 1
            connection.close()


from googleapiclient.discovery import build
from googleapiclient.http import build_http
from httplib2.error import ProxiesUnavailableError

for scheme in ("https", "http"):
    proxy, server = Listener(), Listener()
    os.environ |= {"http_proxy": f"http://{proxy.address}", "https_proxy": f"http://{proxy.address}", "no_proxy": ""}
    there = {"api_endpoint": f"{scheme}://{server.address}/storage/v1/"}
    service, refused = build("storage", "v1", http=build_http(), client_options=there), ""
    try:
        service.buckets().list(project="project").execute(num_retries=0)
    except ProxiesUnavailableError:
        refused = ", ProxiesUnavailableError"
    except Exception:
        pass  # whoever was asked has closed the connection
    print(f"{sys.argv[1]}, {scheme}: proxy {min(1, proxy.seen)}, server {min(1, server.seen)}{refused}")
PYTHON
cd "$folder"
venv/bin/python ask.py "without PySocks" | tee seen
venv/bin/pip install --quiet PySocks==1.7.1
venv/bin/python ask.py "with PySocks" | tee -a seen
cat >expected <<'SEEN'
without PySocks, https: proxy 0, server 1
without PySocks, http: proxy 0, server 0, ProxiesUnavailableError
with PySocks, https: proxy 1, server 0
with PySocks, http: proxy 1, server 0
SEEN
cmp seen expected

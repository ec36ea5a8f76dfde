#!/bin/sh
# fsspec's remote files have no readline(size).
#
# fsspec 2026.9.0 with aiohttp 3.14.5, Python 3.11; 2026-11-28.
#
# Files that fsspec opens in "rb" derive from io.IOBase, whose readline(size=-1) reads at most `size` bytes:
# https://docs.python.org/3/library/io.html#io.IOBase.readline. One would guess that readline(4) of a remote file of
# "first line\n" is b"firs", as it is of a local file, and of a remote one within io.BufferedReader.
#
# Seen:
#   local    b'firs'
#   remote   TypeError: AbstractBufferedFile.readline() takes 1 positional argument but 2 were given
#   buffered b'firs'
#
# Exits 0 while that is what happens, and 1 once it is not.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet fsspec==2026.9.0 aiohttp==3.14.5
printf 'first line\nsecond line\n' >"$folder/lines.txt"
cat >"$folder/read.py" <<'PYTHON'
import functools, http.server, io, sys, threading

import fsspec

folder = sys.argv[1]


class Server(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Server, directory=folder))
threading.Thread(target=server.serve_forever, daemon=True).start()
remote = f"http://127.0.0.1:{server.server_port}/lines.txt"


def attempt(read):
    try:
        return repr(read())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


with fsspec.open(f"{folder}/lines.txt", "rb") as file:
    print("local   ", attempt(lambda: file.readline(4)))
with fsspec.open(remote, "rb") as file:
    print("remote  ", attempt(lambda: file.readline(4)))
with fsspec.open(remote, "rb") as file:
    print("buffered", attempt(lambda: io.BufferedReader(file).readline(4)))
PYTHON
"$folder/venv/bin/python" "$folder/read.py" "$folder" | tee "$folder/seen"
cat >"$folder/expected" <<'SEEN'
local    b'firs'
remote   TypeError: AbstractBufferedFile.readline() takes 1 positional argument but 2 were given
buffered b'firs'
SEEN
cmp "$folder/seen" "$folder/expected"

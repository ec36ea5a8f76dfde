"""Emulated Hugging Face Hub on loopback: its HTTP API over a folder, with its refusals, redirects and ranges.

    python -m controller.localcloud.hub FOLDER     # prints its address, and ends with its standard input

`FOLDER/models/OWNER/NAME` and `FOLDER/datasets/OWNER/NAME` are repositories with one commit on `main`, and
`FOLDER/datasets/OWNER/NAME@REVISION`, with slashes as %2F, is another revision of one, with one commit. As on the Hub,
large and binary files are in LFS: `resolve` redirects to a signed address on another host, which refuses a token.
"""

import argparse
import hashlib
import json
import re
import secrets
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, quote, unquote, urlsplit

LFS_BYTES = 10_000_000
LFS_SUFFIXES = (".safetensors", ".parquet", ".bin", ".npy", ".arrow", ".gz", ".zip")
"""What the Hub's usual .gitattributes keep in LFS, whatever its size."""
PAGE_SIZE = 1000
CHUNK = 1 << 20
API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree)/(refs/\w+/[^/]+|[^/]+)(?:/(.*))?)?")
RESOLVE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/(refs/\w+/[^/]+|[^/]+)/(.+)")
STORED = re.compile(r"/lfs/([0-9a-f]{64})")


class HubFile(NamedTuple):
    """A file of a repository, with its hashes; `blob` is git's id of the content, of the pointer if in LFS."""

    path: Path
    size: int
    sha256: str
    blob: str
    is_lfs: bool


@dataclass
class HubState:
    """Repositories, and who may read them.

    Attributes:
        gated: repositories that need an accepted license, as `OWNER/NAME`.
        tokens: the valid tokens, and the repositories whose license their users have accepted; None: any token is valid
            and its user has accepted all.
    """

    folder: Path
    gated: set[str] = field(default_factory=set)
    tokens: dict[str, set[str]] | None = field(default_factory=dict)
    key: str = field(default_factory=lambda: secrets.token_hex(8))
    stored: dict[str, Path] = field(default_factory=dict)
    _known: dict[Path, tuple[tuple[int, int], HubFile]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def repository(self, kind: str, name: str) -> Path | None:
        folder = self.folder / kind / name
        return folder if folder.is_dir() and ".." not in name.split("/") else None

    def files(self, repository: Path) -> dict[str, HubFile]:
        found = sorted(path for path in repository.rglob("*") if path.is_file())
        return {path.relative_to(repository).as_posix(): self._hashed(path) for path in found}

    def commit(self, repository: Path) -> str:
        listed = [f"{name} {file.blob}" for name, file in self.files(repository).items()]
        return hashlib.sha1("\n".join(listed).encode(), usedforsecurity=False).hexdigest()

    def _hashed(self, path: Path) -> HubFile:
        status = path.stat()
        stamp = (status.st_size, status.st_mtime_ns)
        with self._lock:
            if path in self._known and self._known[path][0] == stamp:
                return self._known[path][1]
        content = path.read_bytes()
        sha256 = hashlib.sha256(content).hexdigest()
        is_lfs = len(content) > LFS_BYTES or path.suffix in LFS_SUFFIXES
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {len(content)}\n".encode()
        stored = pointer if is_lfs else content
        blob = hashlib.sha1(b"blob %d\0" % len(stored) + stored, usedforsecurity=False).hexdigest()
        file = HubFile(path, len(content), sha256, blob, is_lfs)
        with self._lock:
            self._known[path] = (stamp, file)
            self.stored[sha256] = path
        return file


class HubServer(ThreadingHTTPServer):
    """The server of a folder of repositories; a context manager that serves in a thread."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, state: HubState, handler: type["HubHandler"] | None = None) -> None:
        super().__init__(("127.0.0.1", 0), handler or HubHandler)
        self.state = state
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    @property
    def endpoint(self) -> str:
        """Address for HF_ENDPOINT."""
        return f"http://127.0.0.1:{self.server_port}"

    def __enter__(self) -> "HubServer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing when a client goes away."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class HubHandler(BaseHTTPRequestHandler):
    """The answers of the Hub, with the headers by which its client tells refusals apart."""

    protocol_version = "HTTP/1.1"

    @property
    def state(self) -> HubState:
        assert isinstance(self.server, HubServer)
        return self.server.state

    def log_message(self, format: str, *args: Any) -> None:
        """Keep no log on stderr."""

    def do_GET(self) -> None:
        """Answer; a HEAD is answered like a GET, without the body."""
        path = unquote(urlsplit(self.path).path)
        if stored := STORED.fullmatch(path):
            return self._serve_stored(stored[1])
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and self.state.tokens is not None and token not in self.state.tokens:
            return self.refuse(401, "", "Invalid credentials in Authorization header")
        if found := API.fullmatch(path):
            kind, name, part, revision, rest = found.groups()
            if (repository := self._find(kind, name, revision, token)) is None:
                return None
            return self._list(repository, rest or "") if part == "tree" else self._describe(repository, name)
        if found := RESOLVE.fullmatch(path):
            kind, name, revision, file = found.groups()
            repository = self._find("datasets" if kind else "models", name, revision, token)
            return None if repository is None else self._resolve(repository, name, file, token)
        return self.refuse(404, "", "Not Found")

    do_HEAD = do_GET  # noqa: N815 - the name that the server calls

    def _find(self, kind: str, name: str, revision: str | None, token: str) -> Path | None:
        """Return the folder of a repository; None after a refusal. Strangers learn nothing of what does not exist."""
        repository = self.state.repository(kind, name)
        if repository is None:
            self.refuse(404 if token else 401, "RepoNotFound", "Repository not found")
            return None
        if revision in (None, "main"):
            return repository
        for folder in (repository, *repository.parent.glob(f"{repository.name}@*")):
            if revision in (unquote(folder.name.partition("@")[2]), self.state.commit(folder)):
                return folder
        self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return None

    def _describe(self, repository: Path, name: str) -> None:
        sizes = "blobs" in parse_qs(urlsplit(self.path).query)
        siblings = [
            {"rfilename": path} | ({"size": file.size, "blobId": file.blob} if sizes else {})
            for path, file in self.state.files(repository).items()
        ]
        gated = "manual" if name in self.state.gated else False
        about = {"id": name, "sha": self.state.commit(repository), "private": False, "gated": gated, "tags": []}
        self.send(200, {"Content-Type": "application/json"}, json.dumps({**about, "siblings": siblings}).encode())

    def _list(self, repository: Path, folder: str) -> None:
        """Answer a page of the tree; a header links the next."""
        asked = {key: values[0] for key, values in parse_qs(urlsplit(self.path).query).items()}
        recursive = asked.get("recursive", "").lower() == "true"
        items: dict[str, dict[str, Any]] = {}
        start = f"{folder}/" if folder else ""
        for path, file in self.state.files(repository).items():
            if not path.startswith(start):
                continue
            parts = path.removeprefix(start).split("/")
            for i in range(1, len(parts) if recursive else min(len(parts), 2)):
                name = start + "/".join(parts[:i])
                items[name] = {"type": "directory", "oid": "0" * 40, "size": 0, "path": name}
            if recursive or len(parts) == 1:
                lfs = {"oid": file.sha256, "size": file.size, "pointerSize": 134}
                entry = {"type": "file", "oid": file.blob, "size": file.size, "path": path}
                items[path] = entry | ({"lfs": lfs} if file.is_lfs else {})
        if folder and not items:
            return self.refuse(404, "EntryNotFound", f"{folder} does not exist on main")
        limit, begin = int(asked.get("limit", PAGE_SIZE)), int(asked.get("cursor", "0"))
        headers = {"Content-Type": "application/json"}
        if begin + limit < len(items):
            assert isinstance(self.server, HubServer)
            place = f"{self.server.endpoint}{urlsplit(self.path).path}"
            query = "&".join(f"{key}={quote(value)}" for key, value in {**asked, "cursor": str(begin + limit)}.items())
            headers["Link"] = f'<{place}?{query}>; rel="next"'
        return self.send(200, headers, json.dumps(list(items.values())[begin : begin + limit]).encode())

    def _resolve(self, repository: Path, name: str, path: str, token: str) -> None:
        accepted = bool(token) if self.state.tokens is None else name in self.state.tokens.get(token, ())
        if name in self.state.gated and not accepted:
            return self.refuse(403 if token else 401, "GatedRepo", f"Access to model {name} is restricted")
        file, commit = self.state.files(repository).get(path), self.state.commit(repository)
        if file is None:
            return self.refuse(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": commit})
        headers = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if not file.is_lfs:
            return self._serve(file.path, f'"{file.blob}"', headers)
        assert isinstance(self.server, HubServer)
        place = f"http://localhost:{self.server.server_port}/lfs/{file.sha256}?Signature={self._signature(file.sha256)}"
        linked = {"X-Linked-Size": str(file.size), "X-Linked-Etag": f'"{file.sha256}"', "ETag": f'"{file.blob}"'}
        return self.send(302, {**headers, **linked, "Location": place})

    def _serve_stored(self, sha256: str) -> None:
        """Answer as the storage behind LFS: by the signature alone."""
        signature = parse_qs(urlsplit(self.path).query).get("Signature", [""])[0]
        if "Authorization" in self.headers:
            return self.refuse(400, "", "Only one auth mechanism allowed")
        if sha256 not in self.state.stored or signature != self._signature(sha256):
            return self.refuse(403, "", "SignatureDoesNotMatch")
        return self._serve(self.state.stored[sha256], f'"{sha256[:32]}"', {"Accept-Ranges": "bytes"})

    def _signature(self, sha256: str) -> str:
        return hashlib.sha256(f"{self.state.key}{sha256}".encode()).hexdigest()[:20]

    def _serve(self, path: Path, etag: str, headers: Mapping[str, str]) -> None:
        size = path.stat().st_size
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        begin, end = (int(wanted[1]), int(wanted[2] or size - 1) + 1) if wanted else (0, size)
        end = min(end, size)
        if begin >= size and wanted:
            return self.refuse(416, "", "Range Not Satisfiable", {"Content-Range": f"bytes */{size}"})
        headers = {**headers, "ETag": etag, "Content-Length": str(end - begin)}
        if wanted:
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
        self._begin(206 if wanted else 200, headers)
        if self.command == "GET":
            self.send_range(path, begin, end)
        return None

    def send_range(self, path: Path, begin: int, end: int) -> None:
        with path.open("rb") as file:
            file.seek(begin)
            while chunk := file.read(min(CHUNK, end - begin)):
                begin += self.wfile.write(chunk)

    def refuse(self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        told = {"X-Error-Code": code, "X-Error-Message": message} if code else {"X-Error-Message": message}
        if status in (429, 503):
            told["Retry-After"] = "0"
        body = json.dumps({"error": message}).encode()
        self.send(status, {**(headers or {}), **told, "Content-Type": "application/json"}, body)

    def send(self, status: int, headers: Mapping[str, str], body: bytes = b"") -> None:
        self._begin(status, {**headers, "Content-Length": str(len(body))})
        if self.command == "GET":
            self.wfile.write(body)

    def _begin(self, status: int, headers: Mapping[str, str]) -> None:
        self.send_response_only(status)
        for name, value in {"Date": formatdate(usegmt=True), **headers}.items():
            self.send_header(name, value)
        self.end_headers()


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve a folder until standard input ends, as it does when the process that started this one has gone."""
    parser = argparse.ArgumentParser("python -m controller.localcloud.hub", description="An emulated Hugging Face Hub.")
    parser.add_argument("folder", type=Path, help="folder with models/OWNER/NAME and datasets/OWNER/NAME")
    folder: Path = parser.parse_args(arguments).folder
    if not folder.is_dir():
        parser.error(f"{folder} is no folder")
    with HubServer(HubState(folder, tokens=None)) as server:
        print(server.endpoint, flush=True)
        sys.stdin.read()
    return 0


if __name__ == "__main__":
    sys.exit(main())

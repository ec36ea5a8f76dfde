"""Assets that a worker copies to the bucket, because it has the bandwidth and possibly the only access."""

from __future__ import annotations

import errno
import hashlib
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from ..formats import say
from ..fs import CHUNK_BYTES, AgentError, agent_root, checked, file_size, locked, safe_join
from ..storage import TransferError, object_exists, read_object, upload_file, upload_stream, with_retries
from ..tree_hash import file_hash

THREADS = 4
RETRY_PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds before each further try of a download without progress."""
ORDERS_PAUSE_SECONDS = 10.0
"""Between two tries of `fetch_ordered`."""


class FinalError(AgentError):
    """Failure that no further try of a VM would change: a wrong content, a full disk."""


def fetch_ordered(bucket: str, orders: str) -> None:
    """Run `fetch_asset` or `build_asset` with the request in an object of the bucket, until it succeeds.

    Otherwise prints {"error": …}, with {"final": true} where a further try would not help.

    The controller replaces the object now and then: signed addresses expire.
    """
    from .build import build_asset as build  # which imports this module

    while True:
        try:
            request = checked(json.loads(read_object(bucket, orders)), orders)
            return build(**request) if "argv" in request else fetch_asset(**request)
        except AgentError as error:
            say(failure(error))
        time.sleep(ORDERS_PAUSE_SECONDS)


def failure(error: AgentError) -> dict[str, Any]:
    """Return the line of a failure, with the end of a log if there is one."""
    said = f"{error}:\n{error.detail}" if error.detail else str(error)
    return {"error": said, "final": True} if isinstance(error, FinalError) else {"error": said}


def fetch_asset(
    bucket: str, prefix: str, files: dict[str, dict[str, str]], manifest: str, tokens: dict[str, str] | None = None
) -> None:
    """Copy files from their URLs to the bucket, then write the manifest. Existing objects are skipped.

    Prints {"bytes": so far} periodically, and {"done": true} at the end.

    Args:
        bucket: destination bucket.
        prefix: common prefix of the objects.
        files: {url, sha256} by name below `prefix`.
        manifest: content of manifest.json.
        tokens: bearer token by name below `prefix`.

    Raises:
        AgentError: a file cannot be downloaded, or its content does not match its sha256.
    """
    telling = ProgressReporter()
    with locked(f"fetch-{hashlib.sha256(prefix.encode()).hexdigest()[:16]}"):
        pool = ThreadPoolExecutor(max_workers=THREADS)
        try:
            jobs = [
                pool.submit(_fetch_file, bucket, f"{prefix}/{name}", name, file, (tokens or {}).get(name), telling)
                for name, file in sorted(files.items())
            ]
            for job in jobs:
                job.result()
        finally:
            pool.shutdown(cancel_futures=True)
        text = manifest.encode()
        with_retries(lambda: upload_stream([text], len(text), bucket, f"{prefix}/manifest.json"))
    telling.emit({"done": True})


class ProgressReporter:
    """Prints how many bytes have been moved."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes_done = self._reported_at = 0

    def add_bytes(self, size: int) -> None:
        with self._lock:
            self._bytes_done += size
            if self._bytes_done - self._reported_at >= 16 * CHUNK_BYTES:
                self._reported_at = self._bytes_done
                self.emit({"bytes": self._bytes_done})

    def emit(self, line: dict[str, Any]) -> None:
        say(line)


def _fetch_file(
    bucket: str, target: str, name: str, file: dict[str, str], token: str | None, telling: ProgressReporter
) -> None:
    if object_exists(bucket, target):
        return  # verified before it was uploaded
    place = file["url"].partition("?")[0]  # the query of a signed address is a key to the file
    (agent_root() / "fetched").mkdir(mode=0o700, parents=True, exist_ok=True)
    part = safe_join("fetched", file["sha256"])
    in_pieces = _fill(name, file["url"], part, token, telling)
    if in_pieces and file_hash(part) != file["sha256"]:  # the server's file may have changed between two pieces
        part.unlink()
        _fill(name, file["url"], part, token, telling)
    if (found := file_hash(part)) != file["sha256"]:
        part.unlink()
        raise FinalError(f"{name}: {place} has SHA-256 {found[:12]}…, but the config has {file['sha256'][:12]}…")
    with_retries(lambda: upload_file(part, bucket, target))
    part.unlink()


def _fill(name: str, url: str, part: Path, token: str | None, telling: ProgressReporter) -> bool:
    """Download what is missing of a file; only tries without progress count. Returns whether it came in pieces."""
    failures, had, in_pieces = 0, -1, file_size(part) > 0
    while True:
        have = file_size(part)
        failures, had = (0, have) if have > had else (failures + 1, had)
        try:
            _download(name, url, part, token, telling)
        except TransferError as error:
            if error.permanent or failures == len(RETRY_PAUSES):
                raise
        else:
            return in_pieces
        in_pieces = True
        time.sleep(RETRY_PAUSES[failures])


def _download(name: str, url: str, part: Path, token: str | None, telling: ProgressReporter) -> None:
    """Download a file, resuming a partial one. Redirects lead to storage that must not see the token."""
    size, place = file_size(part), url.partition("?")[0]
    request = Request(url, headers={"Range": f"bytes={size}-"} if size else {})  # noqa: S310 (http(s) by schema)
    if token:
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    try:
        with urlopen(request, timeout=60) as answer, part.open("ab" if answer.status == 206 else "wb") as out:  # noqa: S310
            expected = answer.headers.get("Content-Length")
            begin = out.tell()
            while chunk := answer.read(CHUNK_BYTES):
                out.write(chunk)
                telling.add_bytes(len(chunk))
            if expected is not None and out.tell() - begin != int(expected):
                raise TransferError(f"{name}: {place} dropped the connection after {out.tell()} bytes")
    except HTTPError as error:
        error.close()
        if error.code == 416:  # the file is already complete
            return
        why = "; it requires a token" if error.code in (401, 403) and not token else ""
        why = "; it is redirected in a circle, or not to http" if 300 <= error.code < 400 else why
        lasting = error.code < 500 and error.code not in (408, 429)
        raise TransferError(f"{name}: {place} answered HTTP {error.code}{why}", lasting) from error
    except (OSError, HTTPException) as error:
        if getattr(error, "errno", None) == errno.ENOSPC:
            raise FinalError(f"{name}: no space left in {part.parent} of this machine") from error
        raise TransferError(f"{name}: cannot fetch {place}: {error}") from error

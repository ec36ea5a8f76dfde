"""Assets that this worker copies to the bucket, or that a command makes on it.

A worker has the bandwidth and possibly the only access. A build runs in a copy of the code, with the packages of the
program.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from ..attempts import SecretMask, tool_environment
from ..fs import (
    CHUNK_BYTES,
    AgentError,
    agent_root,
    file_hash,
    file_size,
    locked,
    read_json,
    read_range,
    remove_tree,
    safe_join,
    say,
    write_json,
)
from ..transfers import TransferError, is_folder, object_exists, upload_file, upload_stream, with_retries
from ..worker_processes import is_alive, send_signal, start_time
from .run_inputs import check_out
from .venv import program_env

THREADS = 4
RETRY_PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds before each further try of a download without progress."""


def fetch_asset(
    bucket: str, prefix: str, files: dict[str, dict[str, str]], manifest: str, tokens: dict[str, str] | None = None
) -> None:
    """Copy files from their URLs to the bucket, then write the manifest. Existing objects are skipped.

    Prints {"bytes": so far} periodically, and {"done": true} at the end. Raises AgentError if a file cannot be
    downloaded, or its content does not match its sha256.

    Args:
        bucket: destination bucket.
        prefix: common prefix of the objects.
        files: {url, sha256} by name below `prefix`.
        manifest: content of manifest.json.
        tokens: bearer token by name below `prefix`.
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
    say({"done": True})


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
                say({"bytes": self._bytes_done})


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
        raise AgentError(f"{name}: {place} has SHA-256 {found[:12]}…, but the config has {file['sha256'][:12]}…")
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
        permanent = error.code < 500 and error.code not in (408, 429)
        raise TransferError(f"{name}: {place} answered HTTP {error.code}{why}", permanent) from error
    except (OSError, HTTPException) as error:
        if getattr(error, "errno", None) == errno.ENOSPC:
            raise AgentError(f"{name}: no space left in {part.parent} of this machine") from error
        raise TransferError(f"{name}: cannot fetch {place}: {error}") from error


TAIL_BYTES = 3000
SKIPPED = frozenset({".DS_Store", ".git", "__pycache__"})
"""Not part of an asset, as on the controller's machine."""


def build_asset(
    bucket: str,
    prefix: str,
    argv: list[str],
    code: str,
    venv: str,
    env: dict[str, str] | None = None,
    secrets: dict[str, str] | None = None,
) -> None:
    """Run a command that fills a folder, copy its files to the bucket, then write the manifest.

    A command that was killed starts again in an empty folder; one that has ended does not run again. Prints {"bytes":
    so far} at the beginning and while files are copied, and {"done": true} at the end. Raises AgentError if the command
    fails, with the end of its log as detail.

    Args:
        bucket: destination bucket.
        prefix: common prefix of the objects.
        argv: command; {output} in its words is the folder to fill.
        code: tree hash of the code in a copy of which it runs.
        venv: fingerprint of the venv in which it runs.
        env: its variables beside those of this session.
        secrets: more of them, masked in the log.
    """
    name = prefix.rpartition("/")[2]
    folder, telling = safe_join("builds", name), ProgressReporter()
    say({"bytes": 0})
    with locked(f"fetch-{hashlib.sha256(prefix.encode()).hexdigest()[:16]}"):
        if not object_exists(bucket, f"{prefix}/manifest.json"):
            if not (folder / "output").is_dir():
                with tool_environment(secrets or {}) as given:
                    variables = program_env(venv, {**(env or {}), **given})
                    failure = _run(folder, argv, code, variables, SecretMask(secrets or {}), bucket)
                if failure is not None:
                    raise failure
            _send(folder, bucket, prefix, telling)
        remove_tree(folder)
    say({"done": True})


def _run(
    folder: Path, argv: list[str], code: str, env: dict[str, str], mask: SecretMask, bucket: str
) -> AgentError | None:
    """Run the command and return why it failed, if it did; its folder becomes `output` only if it succeeds."""
    earlier = read_json(folder / "process.json")  # of an agent that was killed
    if earlier is not None and is_alive(earlier):
        send_signal(os.killpg, earlier["pid"], signal.SIGKILL)
    work, draft, log = folder / "work", folder / "draft", folder / "build.log"
    for old in (work, draft):
        remove_tree(old)
    check_out(code, work)
    draft.mkdir(mode=0o700)
    words = [word.replace("{output}", str(draft)) for word in argv]
    program = shutil.which(words[0], path=env["PATH"]) or words[0]
    with log.open("wb") as out:
        try:
            process = subprocess.Popen(
                [program, *words[1:]], stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=work, env=env,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            return AgentError(f"`{shlex.join(argv)}` cannot start here: {error.strerror}")
        write_json(folder / "process.json", {"pid": process.pid, "start_time": start_time(process.pid)})
        status = process.wait()
    mask.mask_file(log)
    why = f"ended with code {status}" if status else "" if any(draft.iterdir()) else "wrote no file to {output}"
    if why:
        name = f"builds/{folder.name}.log"
        with_retries(lambda: upload_file(log, bucket, name))
        tail = read_range(log, max(0, file_size(log) - TAIL_BYTES), TAIL_BYTES).decode(errors="replace").rstrip()
        where = f"{bucket}/{name}" if is_folder(bucket) else f"gs://{bucket}/{name}"
        return AgentError(f"`{shlex.join(argv)}` {why}; its log is {where}", tail)
    draft.rename(folder / "output")
    return None


def _send(folder: Path, bucket: str, prefix: str, telling: ProgressReporter) -> None:
    """Copy the files that an earlier agent has not copied; the manifest comes last."""
    output, record, lock = folder / "output", folder / "sent.json", threading.Lock()
    sent: dict[str, str] = (read_json(record) or {"files": {}})["files"]

    def send(path: Path) -> None:
        name = path.relative_to(output).as_posix()
        if name in sent:
            return
        digest = file_hash(path)
        with_retries(lambda: upload_file(path, bucket, f"{prefix}/{name}"))
        telling.add_bytes(file_size(path))
        with lock:
            sent[name] = digest
            write_json(record, {"files": sent})

    found = [p for p in sorted(output.rglob("*")) if p.is_file() and not SKIPPED & set(p.relative_to(output).parts)]
    with ThreadPoolExecutor(max_workers=THREADS) as pool:
        list(pool.map(send, found))
    text = (json.dumps(sent, indent=1, sort_keys=True) + "\n").encode()
    with_retries(lambda: upload_stream([text], len(text), bucket, f"{prefix}/manifest.json"))

"""A running program as others see it: its stream, the notices that it gets, and its end.

Google guarantees no lead time; a spot VM usually has half a minute, maintenance a minute or more.
https://cloud.google.com/compute/docs/instances/create-use-spot#handle-preemption
https://cloud.google.com/compute/docs/metadata/getting-live-migration-notice
"""

from __future__ import annotations

import codecs
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .attempts import SecretMask, attempt_status, delete_secrets, state
from .fs import (
    CHUNK_BYTES,
    AgentError,
    agent_root,
    attempt_folder,
    attempt_number,
    dump,
    file_size,
    free_gb,
    locked,
    parse_object,
    read_json,
    read_range,
    say,
    wait_until,
    write_json,
)
from .transfers import GrowingObject, TransferError, open_url, upload_stream, with_retries
from .worker_processes import attempt_processes, boot_id, group_members, is_alive, send_signal, wall_time

if TYPE_CHECKING:
    from .protocol import State

PREEMPTION, MAINTENANCE, SHUTDOWN = "preemption", "maintenance", "shutdown"
METADATA_KEYS = {PREEMPTION: ("preempted", "TRUE"), MAINTENANCE: ("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE")}
"""Metadata key by kind of notice, with the value that means that this VM goes away."""
LONG_POLL_SECONDS = 30
RETRY_PAUSE_SECONDS = 5.0
"""Seconds before the metadata server is retried after a failure."""


def record_notice(attempt: Path, kind: str) -> None:
    """Record a notice; only the first one is kept."""
    if recorded_notice(attempt) is None:
        write_json(attempt / "notice.json", {"kind": kind, "time": wall_time()})


def recorded_notice(attempt: Path) -> str | None:
    """Return the kind of notice that arrived during an attempt, if any."""
    found: dict[str, Any] | None = read_json(attempt / "notice.json")
    return found["kind"] if found else None


def watch_notices(tell: Callable[[str], None]) -> None:
    """Call `tell` with the kind of each notice, from daemon threads, for the lifetime of this process.

    Only the first program to run during a maintenance event is notified of it: the event lasts, and would otherwise
    stop the next program as well. SLIPWAY_NO_METADATA: this machine is none of Google's, so none arrives.
    """
    if os.environ.get("SLIPWAY_NO_METADATA"):
        return
    for kind in METADATA_KEYS:
        threading.Thread(target=_watch_kind, args=(kind, tell), daemon=True, name=kind).start()


def _watch_kind(kind: str, tell: Callable[[str], None]) -> None:
    key, meant = METADATA_KEYS[kind]
    etag, before = "0", ""
    while True:
        try:
            value, etag = _wait_for_change(key, etag)
        except (HTTPException, OSError, ValueError):
            time.sleep(RETRY_PAUSE_SECONDS)
            continue
        if value == meant != before and not (kind == MAINTENANCE and _update_maintenance_flag(now=True)):
            tell(kind)
        elif value != meant and kind == MAINTENANCE:
            _update_maintenance_flag(now=False)
        before = value


def _wait_for_change(key: str, etag: str) -> tuple[str, str]:
    """Return a metadata value and its ETag, once it differs from that of `etag` or the long poll times out."""
    host = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
    query = f"wait_for_change=true&timeout_sec={LONG_POLL_SECONDS}&last_etag={etag}"
    url = f"http://{host}/computeMetadata/v1/instance/{key}?{query}"
    with open_url(url, {"Metadata-Flavor": "Google"}) as answer:
        headers: Any = answer
        return answer.read(1000).decode().strip(), headers.headers.get("ETag", "0")


def _update_maintenance_flag(now: bool) -> bool:
    """Record whether maintenance is announced; return whether it already was during this boot."""
    path = agent_root() / "maintenance.json"
    known = read_json(path)
    if now:
        write_json(path, {"boot_id": boot_id()})
    else:
        path.unlink(missing_ok=True)
    return bool(known and known["boot_id"] == boot_id())


SUPERVISOR_TIMEOUT_SECONDS = 60.0
"""Seconds that a supervisor may take after its program to upload and exit."""


def stop(run_id: str, attempt: int | None = None, grace_seconds: float = 30.0) -> State:
    """Stop an attempt (default: the latest) by SIGTERM, after the grace period by SIGKILL; return its `state`."""
    folder = attempt_folder(run_id, attempt)
    with locked("start"):  # by now, a start in progress has recorded its program
        begun = read_json(folder / "pid.json", "boot_id", "started", "program", "supervisor")
    if begun and begun["boot_id"] == boot_id():
        _signal_group(begun["program"], signal.SIGTERM, grace_seconds)
        _signal_group(begun["program"], signal.SIGKILL, SUPERVISOR_TIMEOUT_SECONDS)
        wait_until(lambda: not is_alive(begun["supervisor"]), SUPERVISOR_TIMEOUT_SECONDS)
    finalize_lost_attempt(folder)
    return state(run_id, attempt)


def _signal_group(leader: dict[str, Any], signum: int, seconds: float) -> None:
    """Signal a group and wait for its leader to exit; a dead leader is not signaled because its pid may be reused."""
    if is_alive(leader):
        send_signal(os.killpg, leader["pid"], signum)
        wait_until(lambda: not is_alive(leader), seconds)


def kill_leftovers(folder: Path) -> None:
    """Kill the remaining processes of an attempt, even outside its process group."""
    for pid in attempt_processes(folder):
        send_signal(os.kill, pid, signal.SIGKILL)


def finalize_lost_attempt(folder: Path) -> None:
    """Finish what a lost supervisor left undone."""
    with locked("ending"):
        status = attempt_status(folder)
        if status.get("lost"):
            kill_leftovers(folder)
            known = {key: status[key] for key in ("code", "signal", "error", "ended") if key in status}
            finalize_attempt(folder, {"code": None, "signal": None, "error": None, "ended": wall_time(), **known})


def finalize_attempt(
    folder: Path, how: dict[str, Any], uploads: Callable[[], GrowingObject | None] = lambda: None
) -> dict[str, Any]:
    """Record the end, delete the secrets, upload the log and the record, and record the result of the upload.

    uploads: ends the uploads of the log, and returns what of it is in the bucket.
    """
    begun, path = read_json(folder / "pid.json", "boot_id", "started", "program", "supervisor"), folder / "exit.json"
    bucket = begun["bucket"]
    record = {**how, "notice": recorded_notice(folder), "started": begun["started"]}
    record |= {"upload": "pending" if bucket else "none", "upload_error": None}
    write_json(path, record)
    known = uploads()
    mask = SecretMask.for_run(folder.parent)
    for shown in (folder / "log", folder.parent / "metrics.jsonl", folder.parent / "summary.json"):
        mask.mask_file(shown)
    delete_secrets(folder.parent)
    if bucket:
        done = {**record, "upload": "done"}
        content = dump(done)
        log, size = known or GrowingObject(folder / "log", bucket, begun["log_object"]), file_size(folder / "log")
        log.has_only_grown(size)  # if not, as of a program that began it anew, it is sent whole
        try:
            with_retries(lambda: log.send(size))
            with_retries(lambda: upload_stream([content], len(content), bucket, begun["exit_object"]))
            record = done
        except TransferError as error:
            record = {**record, "upload": "failed", "upload_error": str(error)}
        write_json(path, record)
    return record


HEARTBEAT_SECONDS = 5.0
LOG_BYTES = 1 << 17
"""Bytes of log in a line: a controller holds some lines of every worker. No variable, and so no secret, is longer."""
POLL_SECONDS = 0.25


def watch(
    run_id: str, attempt: int | None = None, log_offset: int = 0, metrics_offset: int = 0, follow: bool = True
) -> None:
    """Stream until the attempt (by default the latest) has ended and its log is uploaded.

    Without `follow`, stop at the current end of the files. Prints a heartbeat every 5 s, `exited` when the program
    ends, and `end` as the last line. Offsets are in bytes; passing them back resumes the stream without loss or
    repetition. A negative offset counts from the end, rounded down to the start of a line: -1 starts at the last line.
    """
    folder = attempt_folder(run_id, attempt)
    log_offset = _resolve_offset(folder / "log", log_offset)
    metrics_offset = _resolve_offset(folder.parent / "metrics.jsonl", metrics_offset)
    beat, exited, notice = time.monotonic(), False, None
    while True:
        status = attempt_status(folder)
        if status["state"] == "absent":
            raise AgentError(f"run {run_id} has no {folder.name} on this worker")
        if follow and status.get("lost"):
            finalize_lost_attempt(folder)
        mask = SecretMask.for_run(folder.parent)
        last = not follow or (status["state"] == "exited" and not status.get("uploading"))
        log_offset = _emit_log(folder / "log", log_offset, last, mask)
        metrics_offset = _emit_metrics(folder.parent / "metrics.jsonl", metrics_offset, mask)
        if notice is None and (notice := recorded_notice(folder)):
            say({"notice": notice})
        if follow and not exited and status["state"] == "exited":  # the upload may take a while
            exited = True
            say({"exited": state(run_id, attempt_number(folder)), "now": wall_time()})
        if last:
            return say({"end": state(run_id, attempt_number(folder)), "now": wall_time()})
        if time.monotonic() - beat > HEARTBEAT_SECONDS:
            beat = time.monotonic()
            say({"heartbeat": wall_time(), "stopped": _is_stopped(folder), "free_gb": round(free_gb(), 3)})
        time.sleep(POLL_SECONDS)


def _resolve_offset(path: Path, offset: int) -> int:
    if offset >= 0:
        return offset
    begin = max(0, file_size(path) + offset)
    while begin and (before := read_range(path, max(0, begin - CHUNK_BYTES), min(begin, CHUNK_BYTES))):
        if (newline := before.rfind(b"\n")) >= 0:
            return begin - len(before) + newline + 1
        begin -= len(before)
    return begin


def _is_stopped(folder: Path) -> bool:
    """Return whether a process of the program is stopped by a signal."""
    begun = read_json(folder / "pid.json", "boot_id", "started", "program", "supervisor")
    return bool(begun and is_alive(begun["program"]) and "T" in group_members(begun["program"]["pid"]).values())


def _emit_log(path: Path, offset: int, last: bool, mask: SecretMask) -> int:
    """Print new log output; hold back an incomplete character or secret, unless this is the last call."""
    while data := mask.apply(read_range(path, offset, LOG_BYTES)):
        whole = last and len(data) < LOG_BYTES
        shown = data if whole else data[: len(data) - mask.partial_length(data)]
        text, used = codecs.utf_8_decode(shown, "replace", whole)
        if not used:
            break
        offset += used
        say({"log": text, "offset": offset})
    return offset


def _emit_metrics(path: Path, offset: int, mask: SecretMask) -> int:
    """Print new complete lines; start over if a resumed program has truncated the file."""
    offset = 0 if file_size(path) < offset else offset
    for after, found in read_lines(path, offset, mask):
        offset = after
        say({"metrics": found, "offset": offset} if isinstance(found, dict) else {"warning": found})
    return offset


def read_lines(path: Path, offset: int, mask: SecretMask) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Yield each complete line of metrics.jsonl from a byte on, with where the next begins, or what is wrong with it.

    None is too long.
    """
    while data := mask.apply(read_range(path, offset, CHUNK_BYTES)):
        end = data.rfind(b"\n") + 1
        if not end and len(data) < CHUNK_BYTES:
            break  # the line is being written
        if not end:
            if not (after := _line_end(path, offset + len(data))):
                break
            offset = after
            yield offset, f"metrics.jsonl: the line before byte {offset} has over {CHUNK_BYTES} bytes: left out"
            continue
        for line in data[:end].splitlines(keepends=True):
            offset += len(line)
            try:
                found: dict[str, Any] | str = parse_object(line)
            except ValueError as error:
                shown = line[:200].decode(errors="replace")
                found = f"metrics.jsonl: the line before byte {offset} {error}: {shown}"
            yield offset, found


def _line_end(path: Path, offset: int) -> int:
    """Return where the next line begins; 0 while the one at this byte has no end."""
    while data := read_range(path, offset, CHUNK_BYTES):
        if found := data.find(b"\n") + 1:
            return offset + found
        offset += len(data)
    return 0

"""Stream of a running program's log, metrics and state."""

from __future__ import annotations

import codecs
import json
import time
from pathlib import Path

from ..formats import say
from ..fs import CHUNK_BYTES, AgentError, attempt_folder, attempt_number, file_size, free_gb, read_json, read_range
from ..process import group_members, is_alive, wall_time
from ..secrets import SecretMask
from .notice import recorded_notice
from .state import attempt_status, state
from .stop import finalize_lost_attempt

HEARTBEAT_SECONDS = 5.0
LOG_BYTES = 1 << 17
"""Bytes of log in a line: a controller holds some lines of every worker. No variable, and so no secret, is longer."""
POLL_SECONDS = 0.1


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
            say({"exited": state(run_id, attempt_number(folder))})
        if last:
            return say({"end": state(run_id, attempt_number(folder))})
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
    begun = read_json(folder / "pid.json")
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
    while end := (data := mask.apply(read_range(path, offset, CHUNK_BYTES))).rfind(b"\n") + 1:
        for line in data[:end].splitlines(keepends=True):
            offset += len(line)
            try:
                say({"metrics": dict(json.loads(line)), "offset": offset})
            except (ValueError, TypeError, RecursionError):
                shown = line[:200].decode(errors="replace")
                say({"warning": f"metrics.jsonl: the line before byte {offset} is not a JSON object: {shown}"})
    return offset

"""Telling what a program does while it does it."""

from __future__ import annotations

import codecs
import json
import time
from pathlib import Path

from ..formats import say
from ..fs import AgentError, attempt_folder, attempt_of, free_gb, read_from, read_json, size_of
from ..process import alive, group_of, wall_time
from ..secrets import Mask
from ..tree_hash import CHUNK
from .notice import noticed
from .state import situation, state
from .stop import finish_lost

HEARTBEAT_SECONDS = 5.0
POLL_SECONDS = 0.1


def watch(
    run_id: str, attempt: int | None = None, log_offset: int = 0, metrics_offset: int = 0, follow: bool = True
) -> None:
    """Stream until the attempt (by default the latest) has ended and its log is uploaded.

    Without `follow`: until what is there now has been told. A heartbeat comes every 5 s, `exited` when it has ended,
    and `end` as the last line.
    Offsets are bytes; given back, they resume the stream without loss or repetition. A negative one counts from the
    end, back to the beginning of its line: -1 begins with the last line.
    """
    folder = attempt_folder(run_id, attempt)
    log_offset = _from_the_end(folder / "log", log_offset)
    metrics_offset = _from_the_end(folder.parent / "metrics.jsonl", metrics_offset)
    beat, exited, notice = time.monotonic(), False, None
    while True:
        now = situation(folder)
        if now["state"] == "absent":
            raise AgentError(f"run {run_id} has no {folder.name} on this worker")
        if follow and now.get("lost"):
            finish_lost(folder)
        mask = Mask.of(folder.parent)
        last = not follow or (now["state"] == "exited" and not now.get("uploading"))
        log_offset = _tell_log(folder / "log", log_offset, last, mask)
        metrics_offset = _tell_metrics(folder.parent / "metrics.jsonl", metrics_offset, mask)
        if notice is None and (notice := noticed(folder)):
            say({"notice": notice})
        if follow and not exited and now["state"] == "exited":  # the upload may take its time
            exited = True
            say({"exited": state(run_id, attempt_of(folder))})
        if last:
            return say({"end": state(run_id, attempt_of(folder))})
        if time.monotonic() - beat > HEARTBEAT_SECONDS:
            beat = time.monotonic()
            say({"heartbeat": wall_time(), "stopped": _is_stopped(folder), "free_gb": round(free_gb(), 3)})
        time.sleep(POLL_SECONDS)


def _from_the_end(path: Path, offset: int) -> int:
    if offset >= 0:
        return offset
    begin = max(0, size_of(path) + offset)
    while begin and (before := read_from(path, max(0, begin - CHUNK), min(begin, CHUNK))):
        if (newline := before.rfind(b"\n")) >= 0:
            return begin - len(before) + newline + 1
        begin -= len(before)
    return begin


def _is_stopped(folder: Path) -> bool:
    """Has a signal stopped a process of the program?"""
    begun = read_json(folder / "pid.json")
    return bool(begun and alive(begun["program"]) and "T" in group_of(begun["program"]["pid"]).values())


def _tell_log(path: Path, offset: int, last: bool, mask: Mask) -> int:
    """Tell what is new; what is not all there yet, a character or a secret, waits, unless nothing more will come."""
    while data := mask.masked(read_from(path, offset, CHUNK)):
        whole = last and len(data) < CHUNK
        shown = data if whole else data[: len(data) - mask.begun(data)]
        text, used = codecs.utf_8_decode(shown, "replace", whole)
        if not used:
            break
        offset += used
        say({"log": text, "offset": offset})
    return offset


def _tell_metrics(path: Path, offset: int, mask: Mask) -> int:
    """Tell the new whole lines; all of them again where a resumed program has cut the file."""
    offset = 0 if size_of(path) < offset else offset
    while end := (data := mask.masked(read_from(path, offset, CHUNK))).rfind(b"\n") + 1:
        for line in data[:end].splitlines(keepends=True):
            offset += len(line)
            try:
                say({"metrics": dict(json.loads(line)), "offset": offset})
            except (ValueError, TypeError, RecursionError):
                words = line[:200].decode(errors="replace")
                say({"warning": f"metrics.jsonl: the line before byte {offset} is not a JSON object: {words}"})
    return offset

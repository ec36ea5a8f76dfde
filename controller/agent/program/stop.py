"""End of an attempt: stopped or by itself, always recorded."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..formats import dump
from ..fs import attempt_folder, locked, read_json, wait_until, write_json
from ..process import attempt_processes, boot_id, is_alive, send_signal, wall_time
from ..secrets import SecretMask, delete_secrets
from ..storage import TransferError, upload_file, upload_stream, with_retries
from .notice import recorded_notice
from .state import attempt_status, state

if TYPE_CHECKING:
    from ..protocol import State

SUPERVISOR_TIMEOUT_SECONDS = 60.0
"""Seconds that a supervisor may take after its program to upload and exit."""


def stop(run_id: str, attempt: int | None = None, grace_seconds: float = 30.0) -> State:
    """Stop an attempt (default: the latest) by SIGTERM, after the grace period by SIGKILL; return its `state`."""
    folder = attempt_folder(run_id, attempt)
    with locked("start"):  # by now, a start in progress has recorded its program
        begun = read_json(folder / "pid.json")
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
    folder: Path, how: dict[str, Any], before_masking: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Record the end, delete the secrets, upload the log and the record, and record the result of the upload."""
    begun, path = read_json(folder / "pid.json"), folder / "exit.json"
    bucket = begun["bucket"]
    record = {**how, "notice": recorded_notice(folder), "started": begun["started"]}
    record |= {"upload": "pending" if bucket else "none", "upload_error": None}
    write_json(path, record)
    before_masking()
    mask = SecretMask.for_run(folder.parent)
    for shown in (folder / "log", folder.parent / "metrics.jsonl", folder.parent / "summary.json"):
        mask.mask_file(shown)
    delete_secrets(folder.parent)
    if bucket:
        done = {**record, "upload": "done"}
        content = dump(done)
        try:
            with_retries(lambda: upload_file(folder / "log", bucket, begun["log_object"]))
            with_retries(lambda: upload_stream([content], len(content), bucket, begun["exit_object"]))
            record = done
        except TransferError as error:
            record = {**record, "upload": "failed", "upload_error": str(error)}
        write_json(path, record)
    return record

"""How an attempt ends: stopped or by itself, and always on record."""

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
"""How long a supervisor may take, after its program, to upload and go."""


def stop(run_id: str, attempt: int | None = None, grace_seconds: float = 30.0) -> State:
    """End an attempt (by default the latest): SIGTERM to its processes, and after the grace SIGKILL.

    Returns:
        What `state` says afterwards.
    """
    folder = attempt_folder(run_id, attempt)
    with locked("start"):  # a start that is under way has put its program on record by now
        begun = read_json(folder / "pid.json")
    if begun and begun["boot_id"] == boot_id():
        _signal_group(begun["program"], signal.SIGTERM, grace_seconds)
        _signal_group(begun["program"], signal.SIGKILL, SUPERVISOR_TIMEOUT_SECONDS)
        wait_until(lambda: not is_alive(begun["supervisor"]), SUPERVISOR_TIMEOUT_SECONDS)
    finalize_lost_attempt(folder)
    return state(run_id, attempt)


def _signal_group(leader: dict[str, Any], signum: int, seconds: float) -> None:
    """Signal a group and wait for its leader to go. Once that has gone, its number may be someone else's: no signal."""
    if is_alive(leader):
        send_signal(os.killpg, leader["pid"], signum)
        wait_until(lambda: not is_alive(leader), seconds)


def kill_leftovers(folder: Path) -> None:
    """End what is left of an attempt, wherever it went."""
    for pid in attempt_processes(folder):
        send_signal(os.kill, pid, signal.SIGKILL)


def finalize_lost_attempt(folder: Path) -> None:
    """Do what a lost supervisor left undone."""
    with locked("ending"):
        now = attempt_status(folder)
        if now.get("lost"):
            kill_leftovers(folder)
            known = {key: now[key] for key in ("code", "signal", "error", "ended") if key in now}
            finalize_attempt(folder, {"code": None, "signal": None, "error": None, "ended": wall_time(), **known})


def finalize_attempt(
    folder: Path, how: dict[str, Any], before_masking: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Put the end on record, take the secrets away, upload log and record, and put on record how that went."""
    begun, path = read_json(folder / "pid.json"), folder / "exit.json"
    bucket = begun["bucket"]
    record = {**how, "notice": recorded_notice(folder), "started": begun["started"]}
    record |= {"upload": "pending" if bucket else "none", "upload_error": None}
    write_json(path, record)
    before_masking()
    mask = SecretMask.of(folder.parent)
    for shown in (folder / "log", folder.parent / "metrics.jsonl", folder.parent / "summary.json"):
        mask.cover(shown)
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

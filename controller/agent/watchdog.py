"""The watchdog: deletes the pod from inside once nobody uses it or its time is up, though every controller is gone.

It runs on worker 0 and asks the TPU API in the name of the VM's service account, with a token of the metadata server.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError
from urllib.parse import quote

from .formats import dump
from .fs import AgentError, agent_root, locked, read_json, write_json
from .process import boot_id, is_alive, start_time, wall_time
from .program.state import active_attempt
from .storage import TransferError, access_token, open_url, upload_stream

if TYPE_CHECKING:
    from .protocol import Guard, GuardState

MAX_POLL_SECONDS = 15.0
"""Seconds between two looks."""
RETRY_AFTER_REFUSAL_SECONDS = 60.0
"""Seconds until a deletion that was refused is asked for again."""
DELETE_PERMISSION = "tpu.nodes.delete"


def guard(
    project: str,
    deletes: list[str],
    tpu_api: str,
    projects_api: str,
    idle_seconds: float | None = None,
    seconds_left: float | None = None,
    bucket: str | None = None,
    note_object: str = "",
) -> Guard:
    """Stand guard from now on, or under these orders if someone does already; the idle time begins anew.

    Args:
        deletes: what to delete, in order, each as a path and query below `tpu_api`; what does not exist is passed over.
        idle_seconds: so long without a program or an SSH session, and the pod is deleted; None: never for that.
        seconds_left: so long from now the pod is deleted, whatever runs; None: never for that.
        bucket: where `note_object` will say why it was deleted; None: nowhere.
    """
    now = wall_time()
    order = {
        "deletes": deletes,
        "tpu_api": tpu_api,
        "idle_seconds": idle_seconds,
        "until": None if seconds_left is None else now + seconds_left,
        "bucket": bucket,
        "note_object": note_object,
        "asked": now,
        "agent": Path(sys.argv[0]).name,
    }
    with locked("guard"):
        write_json(_limits_file(), order)
        if not _is_running():
            _spawn_watchdog()
    return {**guard_state(), "allowed": _may_delete(projects_api, project)}


def guard_state() -> GuardState:
    order = read_json(_limits_file())
    if order is None or not _is_running():
        return {"standing": False, "idle_seconds": None, "seconds_left": None, "refused": None}
    left = None if order["until"] is None else order["until"] - wall_time()
    refused = (read_json(agent_root() / "guard-refused.json") or {"error": None})["error"]
    return {"standing": True, "idle_seconds": order["idle_seconds"], "seconds_left": left, "refused": refused}


def stand_guard() -> None:
    """What `guard` leaves behind, and nobody else calls: looks now and then, and deletes the pod when it is time."""
    mine, used = Path(sys.argv[0]).name, wall_time()
    while (order := read_json(_limits_file())) and order["agent"] == mine:
        now = wall_time()
        if in_use():
            used = now
        pause = min(MAX_POLL_SECONDS, (order["idle_seconds"] or MAX_POLL_SECONDS) / 4)
        if why := deletion_reason(order, now, max(used, order["asked"])):
            refused = _delete_pod(order, why)
            write_json(agent_root() / "guard-refused.json", {"error": refused})
            if refused:
                print(f"{wall_time():.0f} {refused}", file=sys.stderr, flush=True)
            pause = RETRY_AFTER_REFUSAL_SECONDS if refused else MAX_POLL_SECONDS
        time.sleep(pause)


def deletion_reason(order: dict[str, Any], now: float, used: float) -> str:
    """Why the pod should go now, empty while it should not. Pure."""
    if order["until"] is not None and now >= order["until"]:
        return "the budget of the run is spent"
    if order["idle_seconds"] is not None and now - used >= order["idle_seconds"]:
        return f"no program and no SSH session for {order['idle_seconds'] / 60:g} minutes"
    return ""


def in_use() -> bool:
    """Is a program alive here, or somebody logged in?"""
    return active_attempt() is not None or bool(ssh_sessions(Path("/proc")))


def ssh_sessions(proc: Path) -> list[str]:
    """Titles of the SSH sessions of users, as OpenSSH names its processes: `sshd: me@pts/0`, `sshd: me@notty`."""
    found = []
    for path in proc.glob("[0-9]*/cmdline"):
        try:
            title = path.read_bytes().split(b"\0")[0].decode(errors="replace")
        except OSError:
            continue  # it ended meanwhile, or is someone else's
        if title.startswith(("sshd: ", "sshd-session: ")) and "@" in title:
            found.append(title)
    return found


def _limits_file() -> Path:
    return agent_root() / "guard.json"


def _is_running() -> bool:
    """Does someone of this agent's version stand guard since this boot?"""
    who = read_json(agent_root() / "guard-pid.json")
    return bool(who and who["boot_id"] == boot_id() and who["agent"] == Path(sys.argv[0]).name and is_alive(who))


def _spawn_watchdog() -> None:
    command = [sys.executable, str(Path(sys.argv[0]).resolve()), "stand_guard"]
    with (agent_root() / "guard.log").open("ab") as log:
        guardian = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    who = {"pid": guardian.pid, "start_time": start_time(guardian.pid)}
    write_json(agent_root() / "guard-pid.json", {**who, "boot_id": boot_id(), "agent": command[1].rpartition("/")[2]})


def _delete_pod(order: dict[str, Any], why: str) -> str | None:
    """Delete what there is, having said why; the reason of a refusal, or None."""
    if order["bucket"]:
        body = dump({"time": wall_time(), "reason": why})
        try:
            upload_stream([body], len(body), order["bucket"], order["note_object"])
        except TransferError as error:  # to say why is a courtesy; to delete is the point
            print(error, file=sys.stderr, flush=True)
    refusals = []
    for place in order["deletes"]:
        try:
            _request(f"{order['tpu_api']}v2/{place}", "DELETE")
            return None
        except HTTPError as error:
            if error.code != 404:
                refusals.append(f"HTTP {error.code}: {error.read(500).decode(errors='replace')}")
        except (HTTPException, OSError, ValueError, KeyError) as error:
            refusals.append(repr(error))
    return "; ".join(refusals) or None


def _may_delete(projects_api: str, project: str) -> bool | None:
    body = json.dumps({"permissions": [DELETE_PERMISSION]}).encode()
    try:
        answer = _request(f"{projects_api}v1/projects/{quote(project)}:testIamPermissions", "POST", body)
        return DELETE_PERMISSION in answer.get("permissions", [])
    except (AgentError, HTTPException, OSError, ValueError, KeyError):
        return None


def _request(url: str, method: str, body: bytes | None = None) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {access_token()}", "Content-Type": "application/json"}
    with open_url(url, headers, [body] if body else None, method) as answer:
        return json.loads(answer.read() or b"{}")

"""Watchdog: deletes the pod from inside when it is idle or its time is up, even if every controller is gone.

It is watched in turn: the supervisor of a program starts it again, and the dead man's switch of the pod
(`controller/resources/dead_mans_switch.py`) reads the same limits and enforces them a moment later. Its heartbeat
tells the switch that it lives. Limits are times of this boot, which a wrong clock does not move; after a reboot the
seconds that were left count from there.

It runs on worker 0 and calls Google as the VM's service account, with a token from the metadata server. What needs
HTTP imports it: that takes half of the time of `watchdog_state`, which needs none.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .attempts import active_attempt
from .fs import AgentError, agent_root, boot_time, complain, dump, locked, read_json, write_heartbeat, write_json
from .worker_processes import boot_id, is_alive, start_time, wall_time

if TYPE_CHECKING:
    from .watchdog_protocol import InstalledWatchdog, WatchdogState

MAX_POLL_SECONDS = 15.0
"""Maximum seconds between two checks."""
RETRY_AFTER_REFUSAL_SECONDS = 60.0
"""Seconds before a refused deletion is retried."""
SAVE_SECONDS = 60.0
"""Interval at which the seconds that are left are saved, for a reboot."""
MAX_SECONDS = 1e12
"""Greatest time, and greatest limit, that orders may have."""
LIMITS_FILE, PID_FILE, REFUSED_FILE = "watchdog.json", "watchdog-pid.json", "watchdog-refused.json"


def set_watchdog(
    project: str,
    deletes: list[str],
    delete_permission: str,
    projects_api: str,
    idle_seconds: float | None = None,
    seconds_left: float | None = None,
    bucket: str | None = None,
    note_object: str = "",
) -> InstalledWatchdog:
    """Start the watchdog, or update the limits of the running one; this resets the idle time.

    Args:
        project: project of the pod, to check the permission to delete.
        deletes: URLs of what to delete, in order, until one exists.
        delete_permission: permission that the deletion needs.
        projects_api: base URL of the Resource Manager API.
        idle_seconds: delete the pod after this long without a program or an SSH session; None: never.
        seconds_left: delete the pod after this long, whatever runs; None: never.
        bucket: bucket of `note_object`; None: write no note.
        note_object: object that records why the pod was deleted.
    """
    now = boot_time()
    order = {
        "deletes": deletes,
        "idle_seconds": idle_seconds,
        "until": None if seconds_left is None else now + seconds_left,
        "seconds_left": seconds_left,
        "boot_id": boot_id(),
        "bucket": bucket,
        "note_object": note_object,
        "asked": now,
        "agent": Path(sys.argv[0]).name,
    }
    if problem := order_problem(order):
        raise AgentError(f"no orders for a watchdog: {problem}")
    with locked("watchdog"):
        write_json(agent_root() / LIMITS_FILE, order)
        (agent_root() / REFUSED_FILE).unlink(missing_ok=True)  # of older orders
        _spawn_if_dead(order["agent"])
    return {**watchdog_state(), "allowed": _may_delete(projects_api, project, delete_permission)}


def watchdog_state() -> WatchdogState:
    order = _read_order()
    if order is None or not _is_running(Path(sys.argv[0]).name):
        return {"running": False, "idle_seconds": None, "seconds_left": None, "refused": None}
    left = None if order["until"] is None else order["until"] - boot_time()
    refused = (_read(REFUSED_FILE) or {}).get("error")
    why = None if refused is None else str(refused)
    return {"running": True, "idle_seconds": order["idle_seconds"], "seconds_left": left, "refused": why}


def keep_watchdog() -> None:
    """Start the watchdog of this boot again if it has died, whichever version of the agent it is of.

    A supervisor calls this with each heartbeat; a failure is tried again with the next one.
    """
    try:
        with locked("watchdog"):
            order = _read_order()
            if order and order["boot_id"] == boot_id():
                _spawn_if_dead(order["agent"])
    except Exception as error:
        complain(f"cannot look after the watchdog: {error!r}")


def run_watchdog() -> None:
    """Run the watchdog loop, in the process that `set_watchdog` spawns: check periodically, delete the pod when due."""
    mine, used, saved = Path(sys.argv[0]).name, boot_time(), boot_time()
    order = None
    while (order := _read_order(order)) and order["agent"] == mine and order["boot_id"] == boot_id():
        now = boot_time()
        write_heartbeat()
        if now - saved >= SAVE_SECONDS:
            saved = now
            with suppress(OSError), locked("watchdog"):  # for the next boot; a full disk keeps the older number
                if order["until"] is not None and _read(LIMITS_FILE) == order:
                    write_json(agent_root() / LIMITS_FILE, {**order, "seconds_left": max(0.0, order["until"] - now)})
        if in_use():
            used = now
        pause = min(MAX_POLL_SECONDS, (order["idle_seconds"] or MAX_POLL_SECONDS) / 4)
        if why := deletion_reason(order, now, max(used, order["asked"])):
            refused = _delete_pod(order, why)
            _note_refusal(refused)
            pause = RETRY_AFTER_REFUSAL_SECONDS if refused else MAX_POLL_SECONDS
        time.sleep(pause)


def _note_refusal(refused: str | None) -> None:
    with suppress(OSError):  # a full disk must not end the watchdog
        write_json(agent_root() / REFUSED_FILE, {"error": refused})
    if refused:
        complain(f"{wall_time():.0f} {refused}")


def deletion_reason(order: dict[str, Any], now: float, used: float) -> str:
    """Return why the pod should be deleted now, or "" if it should not. Pure; times are of this boot."""
    if order["until"] is not None and now >= order["until"]:
        return "the run's budget is spent"
    if order["idle_seconds"] is not None and now - used >= order["idle_seconds"]:
        return f"no program and no SSH session for {order['idle_seconds'] / 60:g} minutes"
    return ""


def in_use() -> bool:
    """Return whether a program is alive or a user is logged in. One whose record is damaged does not count."""
    try:
        if active_attempt() is not None:
            return True
    except Exception as error:
        complain(f"cannot tell whether a program runs: {error!r}")
    return bool(ssh_sessions(Path("/proc")))


def ssh_sessions(proc: Path) -> list[str]:
    """Return the titles of users' SSH sessions, as OpenSSH names its processes: `sshd: me@pts/0`, `sshd: me@notty`."""
    found = []
    for path in proc.glob("[0-9]*/cmdline"):
        try:
            title = path.read_bytes().split(b"\0")[0].decode(errors="replace")
        except OSError:
            continue  # it has ended in the meantime, or belongs to another user
        if title.startswith(("sshd: ", "sshd-session: ")) and "@" in title:
            found.append(title)
    return found


def order_problem(order: dict[str, Any]) -> str:
    """Return why these are no orders; empty if they are. Pure."""
    for key, least, most in (
        ("until", -MAX_SECONDS, MAX_SECONDS),
        ("seconds_left", -MAX_SECONDS, MAX_SECONDS),
        ("idle_seconds", 0.0, MAX_SECONDS),
        ("asked", -MAX_SECONDS, MAX_SECONDS),
    ):
        value: Any = order.get(key, "")
        if value is None and key != "asked":
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            return f"{key} is no number from {least:g} to {most:g}"
    deletes = order.get("deletes")
    if not isinstance(deletes, list) or not all(isinstance(url, str) for url in deletes):
        return "deletes is no list of addresses"
    texts = ("boot_id", "agent", "note_object", *(("bucket",) if order.get("bucket") is not None else ()))
    return next((f"{key} is no text" for key in texts if not isinstance(order.get(key), str)), "")


def _read_order(known: dict[str, Any] | None = None) -> dict[str, Any] | None:
    """Return the orders; None without any. Damaged ones never replace those that are known."""
    order = _read(LIMITS_FILE, {})
    if order is None or not order_problem(order):
        return order
    return known


def _read(name: str, damaged: dict[str, Any] | None = None) -> Any:
    """Return what one of the watchdog's files holds; None without one; `damaged` if it is: new orders replace it."""
    try:
        return read_json(agent_root() / name)
    except (AgentError, OSError):
        return damaged


def _is_running(agent: str) -> bool:
    """Return whether a watchdog of this version of the agent has been running since this boot."""
    who = _read(PID_FILE) or {}
    is_ours = who.get("boot_id") == boot_id() and who.get("agent") == agent and isinstance(who.get("pid"), int)
    return is_ours and 0 < who["pid"] < 1 << 31 and is_alive({"start_time": None, **who})


def _spawn_if_dead(agent: str) -> None:
    """Start the watchdog of that version of the agent unless it runs."""
    if _is_running(agent):
        return
    import subprocess

    command = [sys.executable, str(Path(sys.argv[0]).resolve().with_name(agent)), "run_watchdog"]
    with (agent_root() / "watchdog.log").open("ab") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    who = {"pid": process.pid, "start_time": start_time(process.pid)}
    write_json(agent_root() / PID_FILE, {**who, "boot_id": boot_id(), "agent": agent})


def _delete_pod(order: dict[str, Any], why: str) -> str | None:
    """Record the reason and delete the pod; return why the deletion was refused, or None."""
    from urllib.error import HTTPError

    from .transfers import upload_stream

    if order["bucket"]:
        body = dump({"time": wall_time(), "reason": why})
        try:
            upload_stream([body], len(body), order["bucket"], order["note_object"])
        except Exception as error:  # the note is optional; the deletion is not
            complain(repr(error))
    refusals = []
    for url in order["deletes"]:
        try:
            _request(url, "DELETE")
            return None
        except HTTPError as error:
            if error.code != 404:
                refusals.append(f"HTTP {error.code}: {error.read(500).decode(errors='replace')}")
        except Exception as error:
            refusals.append(repr(error))
    return "; ".join(refusals) or None


def _may_delete(projects_api: str, project: str, permission: str) -> bool | None:
    from http.client import HTTPException
    from urllib.parse import quote

    body = json.dumps({"permissions": [permission]}).encode()
    try:
        answer = _request(f"{projects_api}v1/projects/{quote(project)}:testIamPermissions", "POST", body)
        return permission in answer.get("permissions", [])
    except (AgentError, HTTPException, OSError, ValueError, KeyError):
        return None


def _request(url: str, method: str, body: bytes | None = None) -> dict[str, Any]:
    from .transfers import access_token, open_url

    headers = {"Authorization": f"Bearer {access_token()}", "Content-Type": "application/json"}
    if body:  # otherwise urllib sends it in chunks
        headers["Content-Length"] = str(len(body))
    with open_url(url, headers, [body] if body else None, method) as answer:
        return json.loads(answer.read() or b"{}")

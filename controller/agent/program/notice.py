"""Notices that this VM will go away: read from the metadata server and passed on to the program.

Google guarantees no lead time; a spot VM usually has half a minute, maintenance a minute or more.
https://cloud.google.com/compute/docs/instances/create-use-spot#handle-preemption
https://cloud.google.com/compute/docs/metadata/getting-live-migration-notice
"""

import os
import threading
import time
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from typing import Any

from ..fs import agent_root, read_json, write_json
from ..process import boot_id, wall_time
from ..storage import open_url

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

"""A notice that this VM will go away: the metadata server gives it, the supervisor passes it on to the program.

Google promises none; a spot VM usually has half a minute, maintenance a minute or more.
https://cloud.google.com/compute/docs/instances/create-use-spot#handle-preemption
https://cloud.google.com/compute/docs/metadata/getting-live-migration-notice
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from typing import Any

from ..fs import read_json, root, write_json
from ..process import boot_id, wall_time
from ..storage import open_url

PREEMPTION, MAINTENANCE, SHUTDOWN = "preemption", "maintenance", "shutdown"
MEANT = {PREEMPTION: ("preempted", "TRUE"), MAINTENANCE: ("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE")}
"""By kind of notice: the key of the metadata server, and the value that means that this VM goes away."""
WAIT_SECONDS = 30
PAUSE_SECONDS = 5.0
"""Until it is asked again where it did not answer."""


def put_on_record(attempt: Path, kind: str) -> None:
    """Of a notice; the first one counts."""
    if noticed(attempt) is None:
        write_json(attempt / "notice.json", {"kind": kind, "time": wall_time()})


def noticed(attempt: Path) -> str | None:
    """The kind of notice that was given while an attempt ran."""
    found: dict[str, Any] | None = read_json(attempt / "notice.json")
    return found["kind"] if found else None


def listen(tell: Callable[[str], None]) -> None:
    """Call `tell` with the kind of each notice, from threads of their own, for as long as this process lives.

    Of one announcement of maintenance only the first program that runs here hears: it lasts, and would otherwise end
    the next one as well.
    """
    for kind in MEANT:
        threading.Thread(target=_listen_for, args=(kind, tell), daemon=True, name=kind).start()


def _listen_for(kind: str, tell: Callable[[str], None]) -> None:
    key, meant = MEANT[kind]
    etag, before = "0", ""
    while True:
        try:
            value, etag = _change_of(key, etag)
        except (HTTPException, OSError, ValueError):
            time.sleep(PAUSE_SECONDS)
            continue
        if value == meant != before and not (kind == MAINTENANCE and _announced(now=True)):
            tell(kind)
        elif value != meant and kind == MAINTENANCE:
            _announced(now=False)
        before = value


def _change_of(key: str, etag: str) -> tuple[str, str]:
    """The value once it is another one than that of `etag`, or after a while; and its own etag.

    https://cloud.google.com/compute/docs/metadata/querying-metadata#waitforchange
    """
    host = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
    query = f"wait_for_change=true&timeout_sec={WAIT_SECONDS}&last_etag={etag}"
    url = f"http://{host}/computeMetadata/v1/instance/{key}?{query}"
    with open_url(url, {"Metadata-Flavor": "Google"}) as answer:
        headers: Any = answer
        return answer.read(1000).decode().strip(), headers.headers.get("ETag", "0")


def _announced(now: bool) -> bool:
    """Put on record whether maintenance is; was it before, since this boot?"""
    path = root() / "maintenance.json"
    known = read_json(path)
    if now:
        write_json(path, {"boot_id": boot_id()})
    else:
        path.unlink(missing_ok=True)
    return bool(known and known["boot_id"] == boot_id())

"""Table of runs: one small row per run, in an index file of the state folder and on an object in the bucket.

The file is append-only and the last row of a run counts, so that ten thousand rows load in a moment. In the bucket each
row is the metadata of an object `index/<id>.json`: one request lists a thousand rows.
https://cloud.google.com/storage/docs/metadata#custom-metadata

Beside it are the overrides of the last `up` in each folder, so that `slipway logs` there means the run that was just
started.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from controller.core.json_documents import append_lines, checked, dump, has_format, load

if TYPE_CHECKING:
    from controller.gcp.client import GoogleClient

RunRow = dict[str, Any]
MAX_ROW_BYTES = 7000
"""Maximum bytes of a row in the bucket: custom metadata is limited to 8 KiB."""


def index_file(state: Path) -> Path:
    return state / "runs" / "index.jsonl"


def load_rows(state: Path, damaged: list[int] | None = None) -> list[RunRow]:
    """Return every run that this state folder knows, oldest first; the numbers of damaged lines go into `damaged`.

    A crash or a full disk may cut a line short.
    """
    file = index_file(state)
    found: dict[str, RunRow] = {}
    for number, line in enumerate(file.read_bytes().splitlines() if file.is_file() else (), 1):
        if row := _parse_row(line, str(file)):
            found[row["run"]] = {**found.get(row["run"], {}), **row}
        elif damaged is not None:
            damaged.append(number)
    return sorted(found.values(), key=lambda row: row.get("created", 0.0))


def append_rows(state: Path, new: Iterable[RunRow]) -> None:
    """Append rows, complete or with the changed keys only."""
    append_lines(index_file(state), "".join(dump(row) + "\n" for row in new))


def row_generation(google: GoogleClient, bucket: str, run_id: str) -> int:
    """Return the generation of the published row of a run; 0 without one."""
    from controller.gcp.google_errors import NotFoundError

    try:
        return int(google.object_metadata(bucket, _object_name(run_id))[0]["generation"])
    except NotFoundError:
        return 0


def publish_row(google: GoogleClient, bucket: str, row: RunRow, generation: int | None = None) -> None:
    """Publish a row to the bucket in place of the last one; if too large, without metrics, overrides and reason.

    With `generation`, raise ConflictError if the last one has another.
    """
    text = dump(row)
    for key in ("metrics", "overrides", "reason"):
        if len(text.encode()) > MAX_ROW_BYTES:
            row = {**row, key: {} if key == "metrics" else []}
            text = dump(row)
    name = _object_name(row["run"])
    google.upload(bucket, name, text.encode(), generation=generation, metadata={"row": text})


def _object_name(run_id: str) -> str:
    return f"index/{run_id}.json"


def list_published_rows(google: GoogleClient, bucket: str) -> list[RunRow]:
    from controller.gcp.google_errors import NotFoundError

    where: Mapping[str, Any] = {"bucket": bucket, "prefix": "index/", "fields": "items(metadata),nextPageToken"}
    try:
        items = list(google.list_all("storage", "objects.list", "items", **where))
    except NotFoundError:
        return []
    found = [
        _parse_row(item["metadata"]["row"], f"a row of gs://{bucket}/index/")
        for item in items
        if "row" in item.get("metadata", {})
    ]
    return [row for row in found if row]


def _parse_row(text: str | bytes, where: str) -> RunRow | None:
    """Parse a row, None for anything else, such as a line cut short by a crash. FormatError: of a later Slipway."""
    try:
        row = json.loads(text)
    except ValueError:
        return None
    return checked(row, where) if has_format(row) and isinstance(row.get("run"), str) else None


RUN_VERBS = frozenset({"status", "logs", "verify", "cancel", "stop", "down", "ssh", "exec", "forward"}) | {
    *("get", "export", "chat", "generate"),
}
"""Commands that accept --run to name the run."""
RECALLING_VERBS = RUN_VERBS | {"orphans"}
"""Commands that inspect, change or end what `up` created; without overrides they use those of the last `up`."""
PROJECT_VERBS = frozenset({"orphans"})
"""Commands among them that need no run: the overrides only select the project."""


@dataclass(frozen=True)
class LastCommand:
    """The last `up` of a folder.

    Attributes:
        overrides: its overrides; of a sweep, those that all runs share.
        run: id of the run if it was started from its record.
        sweep: id of the sweep if it was one.
        sweep_words: all overrides of the sweep, the swept ones included.
    """

    overrides: tuple[str, ...] = ()
    run: str = ""
    sweep: str = ""
    sweep_words: tuple[str, ...] = ()


def save_last_command(command: LastCommand, folder: Path) -> None:
    """Save the last `up` of a folder. The caller reports a state folder that cannot be written."""
    file = _last_command_file(folder)
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file.write_text(dump({"folder": str(folder), **asdict(command)}))


def load_last_command(folder: Path) -> LastCommand:
    """Return what was last saved for this folder; empty if there was no `up`."""
    file = _last_command_file(folder)
    known = load(file.read_text(), str(file)) if file.is_file() else {}
    words = tuple(known.get("sweep_words", ()))
    return LastCommand(tuple(known.get("overrides", ())), known.get("run", ""), known.get("sweep", ""), words)


def _last_command_file(folder: Path) -> Path:
    import hashlib

    home = Path(os.environ.get("SLIPWAY_HOME") or "~/.slipway").expanduser()
    return home / "last" / f"{hashlib.sha256(str(folder).encode()).hexdigest()[:16]}.json"

"""Table of runs: one small row per run, in an index file of the state folder and on an object in the bucket.

The file is append-only and the last row of a run counts, so that ten thousand rows load in a moment. In the bucket each
row is the metadata of an object `index/<id>.json`: one request lists a thousand rows.
https://cloud.google.com/storage/docs/metadata#custom-metadata

Beside it are the overrides of the last `up` in each folder, so that `slipway logs` there means the run that was just
started.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Required, TypedDict

from conf.strict_json import dumps, loads
from controller.core.json_documents import (
    UnreadableError,
    append_lines,
    checked,
    dump,
    format_problem,
    has_format,
    load,
    replace_file,
    try_lock,
    type_problem,
)
from controller.core.this_process import state_home

if TYPE_CHECKING:
    from controller.gcp.client import GoogleClient

RunRow = dict[str, Any]
ID_PATTERN = re.compile(r"[A-Za-z0-9][\w.-]{0,199}", re.ASCII)
"""Pattern of the id of a run or sweep. Ids become part of paths, and others can write to the bucket of the rows."""
YEAR_9999 = 253370764800
LARGEST = {"created": YEAR_9999, "ended": YEAR_9999} | dict.fromkeys(
    ("seconds", "pod_hours", "usd", "attempts", "seed"), 1e15
)
"""Bounds of numbers that are shown; no NaN is below one."""
MAX_ROW_BYTES = 7000
"""Maximum bytes of a row in the bucket: custom metadata is limited to 8 KiB."""


def index_file(state: Path) -> Path:
    return state / "runs" / "index.jsonl"


class RowKeys(TypedDict, total=False):
    """What readers rely on; a row may have the changed keys only, and further ones of a later Slipway."""

    run: Required[str]
    created: float | None
    ended: float | None
    seconds: float | None
    pod_hours: float | None
    usd: float | None
    attempts: int | None
    seed: int | None
    metrics: dict[str, Any] | None
    overrides: list[str] | None
    pods: list[dict[str, Any]] | None
    name: str | None
    state: str | None
    reason: str | list[str] | None
    program: str | None
    samples_for: str | None
    sweep: str | None
    project: str | None
    bucket: str | None
    cloud: str | None
    type: str | None
    zone: str | None
    commit: str | None
    code: str | None


@dataclass(frozen=True)
class LeftOut:
    """A row that is not in the table: the number of its line, or the name of its object, and why."""

    where: int | str
    why: str
    is_later: bool = False
    """Whether a later Slipway may read it."""


def load_rows(state: Path, left_out: list[LeftOut] | None = None, fetched: Sequence[RunRow] = ()) -> list[RunRow]:
    """Return every run that this state folder knows, and those of `fetched`, oldest first.

    What is no row of ours goes into `left_out`: a crash or a full disk may cut a line short.
    """
    file = index_file(state)
    found: dict[str, RunRow] = {}
    for number, line in enumerate(file.read_bytes().split(b"\n") if file.is_file() else (), 1):
        row = _parse_row(line, number) if line.strip() else None
        if isinstance(row, LeftOut) and left_out is not None:
            left_out.append(row)
        elif isinstance(row, dict):
            found[row["run"]] = {**found.get(row["run"], {}), **row}
    for row in fetched:
        found[row["run"]] = {**found.get(row["run"], {}), **row}
    return sorted(found.values(), key=lambda row: row.get("created") or 0.0)


def mend(state: Path) -> None:
    """Blank out the lines that are rows of no Slipway, in place: other processes may be about to append."""
    with index_file(state).open("r+b") as table:
        if not try_lock(table):
            return
        start = 0
        for line in table.read().split(b"\n"):
            row = _parse_row(line, 0) if line.strip() else None
            if isinstance(row, LeftOut) and not row.is_later:
                table.seek(start)
                table.write(b" " * len(line))
            start += len(line) + 1


def append_rows(state: Path, new: Iterable[RunRow]) -> None:
    """Append rows, complete or with the changed keys only."""
    append_lines(index_file(state), as_lines(new))


def as_lines(rows: Iterable[RunRow]) -> str:
    return "".join(dump(row) + "\n" for row in rows)


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


def ended_row(run_id: str, state: str, at: float) -> RunRow:
    """Return the changed keys of a run that has ended without a result. Its duration is its controller's to say."""
    return {"run": run_id, "state": state, "ended": at}


def mark_ended(google: GoogleClient, bucket: str, run_id: str, state: str, at: float) -> None:
    """Show a run as ended in the bucket's table, unless somebody has just written its row or it was never launched."""
    from controller.gcp.google_errors import ConflictError, NotFoundError

    try:
        found = google.object_metadata(bucket, _object_name(run_id))[0]
    except NotFoundError:
        return
    row = _parse_row(found.get("metadata", {}).get("row", ""), run_id)
    if not isinstance(row, dict) or row.get("state") != "running":
        return
    with suppress(ConflictError):
        publish_row(google, bucket, {**row, **ended_row(run_id, state, at)}, int(found["generation"]))


def _object_name(run_id: str) -> str:
    return f"index/{run_id}.json"


def list_published_rows(google: GoogleClient, bucket: str, left_out: list[LeftOut] | None = None) -> list[RunRow]:
    """Return the rows of a bucket; objects that are no row, or one of another run, go into `left_out`."""
    found: list[RunRow] = []
    for item in google.objects(bucket, "index/", "name,metadata"):
        if "row" not in item.get("metadata", {}):
            continue
        row = _parse_row(item["metadata"]["row"], item["name"])
        if isinstance(row, dict) and _object_name(row["run"]) != item["name"]:
            row = LeftOut(item["name"], f"it is of another run, {row['run']}")
        if isinstance(row, dict):
            found.append(row)
        elif left_out is not None:
            left_out.append(row)
    return found


def _parse_row(text: str | bytes, where: int | str) -> RunRow | LeftOut:
    """Parse a row; anything else, such as a line cut short by a crash, is left out."""
    try:
        row = loads(text)
    except (ValueError, RecursionError):
        return LeftOut(where, "it cannot be read")
    if not has_format(row):
        return LeftOut(where, "it is no row of Slipway's")
    if problem := format_problem(row, "it"):
        return LeftOut(where, problem, is_later=True)
    try:
        row = checked(row, "it")
        problem = row_problem(row)
    except Exception as error:  # whatever somebody else has written there
        problem = f"it cannot be read ({type(error).__name__})"
    return LeftOut(where, problem) if problem else row


def row_problem(row: Any) -> str:
    """Return why this is no row that every reader can show; empty if it is."""
    if problem := type_problem(row, RowKeys) or type_problem(row, Any):
        return problem
    if not ID_PATTERN.fullmatch(row["run"]):
        return "its run is no id of a run"
    try:
        dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return "it has half a character"
    wrong = (key for key, largest in LARGEST.items() if not 0 <= (row.get(key) or 0) <= largest)
    return next((f"its {key} is impossible" for key in wrong), "")


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
        meant: id of the run that the overrides meant then; edited code makes them mean another one.
    """

    overrides: tuple[str, ...] = ()
    run: str = ""
    sweep: str = ""
    sweep_words: tuple[str, ...] = ()
    meant: str = ""


class LastKeys(TypedDict, total=False):
    """Its keys on disk."""

    overrides: list[str]
    run: str
    sweep: str
    sweep_words: list[str]
    meant: str


def save_last_command(command: LastCommand, folder: Path) -> None:
    """Save the last `up` of a folder; a state folder that does not take it is said."""
    file = _last_command_file(folder)
    try:
        replace_file(file, dump({"folder": str(folder), **asdict(command)}))
    except OSError as error:
        _warn(file, error.strerror or str(error))


def load_last_command(folder: Path) -> LastCommand:
    """Return what was last saved for this folder; empty if there was no `up`."""
    file = _last_command_file(folder)
    try:
        known = load(file.read_bytes(), str(file)) if file.is_file() else {}
    except (UnreadableError, OSError) as error:
        _warn(file, str(error))
        return LastCommand()
    if problem := type_problem(known, LastKeys, "it"):
        _warn(file, problem)
        return LastCommand()
    overrides, words = (tuple(known.get(name, ())) for name in ("overrides", "sweep_words"))
    return LastCommand(overrides, known.get("run", ""), known.get("sweep", ""), words, known.get("meant", ""))


def _warn(file: Path, problem: str) -> None:
    why = "the verbs of this folder need the overrides of the run, or --run"
    print(f"warning: {file} cannot be used ({problem}): {why}", file=sys.stderr)


def _last_command_file(folder: Path) -> Path:
    import hashlib

    home = state_home()
    return home / "last" / f"{hashlib.sha256(str(folder).encode()).hexdigest()[:16]}.json"

"""State of the cloud: one SQLite file of JSON documents, safe against kill -9."""

import asyncio
import json
import logging
import sqlite3
import traceback
import weakref
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from controller.localcloud.http.errors import ApiError

Document = dict[str, Any]
ERROR_KIND = "mistake"
"""Internal errors (bugs) of the emulated cloud, by the name of the operation that failed."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS documents (kind TEXT, name TEXT, body TEXT, PRIMARY KEY (kind, name)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS requests (seq INTEGER PRIMARY KEY AUTOINCREMENT, body TEXT);
"""


def database_problem(state: Path, error: sqlite3.DatabaseError) -> str:
    """Say what is wrong with the state of the cloud, and what mends it."""
    what = f"run.state_dir: {state / 'state.db'} cannot be used: {error}"
    if type(error) is not sqlite3.DatabaseError:  # a full or read-only disk, or a bug; damage has no class of its own
        return what
    return f"{what}. It is damaged: `slipway localcloud wipe` deletes this emulated cloud, which ends what runs in it"


class Store:
    """Documents by (kind, name). A write touches one row, so its cost does not grow with the state.

    Use from the event loop's thread only. `database` is public for the only other table, that of objects; `writes`
    counts those of documents, so that who waits for a change reads only after one.
    """

    def __init__(self, path: Path) -> None:
        self.folder, self.writes = path.parent, 0
        # a store that nobody has any more is closed, by whichever thread collects it
        self.database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        weakref.finalize(self, self.database.close)
        # With these two, a killed process loses nothing; only a crash of the whole machine could.
        self.database.execute("PRAGMA journal_mode=WAL")
        self.database.execute("PRAGMA synchronous=OFF")
        self.database.executescript(_SCHEMA)

    def close(self) -> None:
        self.database.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Make all writes in the block visible at once, or none if it raises. Can be nested; must not await.

        The refusal of a fault keeps the writes: they are its count.
        """
        if self.database.in_transaction:
            yield
            return
        self.database.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException as error:
            self.database.execute("COMMIT" if isinstance(error, ApiError) and error.is_counted else "ROLLBACK")
            raise
        self.database.execute("COMMIT")

    def get(self, kind: str, name: str) -> Document | None:
        row = self.database.execute("SELECT body FROM documents WHERE kind=? AND name=?", (kind, name)).fetchone()
        return json.loads(row[0]) if row else None

    def put(self, kind: str, name: str, body: Document) -> None:
        text, self.writes = json.dumps(body, separators=(",", ":")), self.writes + 1
        self.database.execute("INSERT OR REPLACE INTO documents VALUES (?, ?, ?)", (kind, name, text))

    def require(self, kind: str, name: str, message: str) -> Document:
        """Return the document; raise ApiError 404 with this message if there is none."""
        found = self.get(kind, name)
        if found is None:
            raise ApiError(404, message)
        return found

    def delete(self, kind: str, name: str) -> None:
        """Delete the document, if there is one."""
        self.writes += 1
        self.database.execute("DELETE FROM documents WHERE kind=? AND name=?", (kind, name))

    def items(self, kind: str, prefix: str = "") -> list[tuple[str, Document]]:
        """Return (name, document) of a kind for names that start with `prefix`, ordered by name."""
        rows = self.database.execute(
            "SELECT name, body FROM documents WHERE kind=? AND name>=? AND name<? ORDER BY name",
            (kind, prefix, prefix + "\U0010ffff"),
        )
        return [(name, json.loads(body)) for name, body in rows]

    def list_kinds(self) -> list[str]:
        return [kind for (kind,) in self.database.execute("SELECT DISTINCT kind FROM documents ORDER BY kind")]

    def next_number(self, name: str, start: int = 1) -> int:
        """Return the next number of a named sequence; it never repeats, even after a restart."""
        value = (self.get("counter", name) or {"next": start})["next"]
        self.put("counter", name, {"next": value + 1})
        return value

    def record_error(self, name: str, error: BaseException) -> None:
        """Record an internal error and its traceback in the log and in the state."""
        logging.error("%s failed", name, exc_info=error)
        self.put(ERROR_KIND, name, {"traceback": "".join(traceback.format_exception(error))})

    def start_task(self, tasks: set[asyncio.Task[Any]], work: Coroutine[Any, Any, object], name: str) -> None:
        """Start a background task; `tasks` holds it while it runs. What it fails with is recorded."""

        def record(task: asyncio.Task[Any]) -> None:
            tasks.discard(task)
            if not task.cancelled() and (error := task.exception()):
                self.record_error(name, error)

        task = asyncio.get_running_loop().create_task(work, name=name)
        tasks.add(task)
        task.add_done_callback(record)

    def append_log(self, entry: Document) -> None:
        self.database.execute("INSERT INTO requests (body) VALUES (?)", (json.dumps(entry, separators=(",", ":")),))

    def last_log_sequence(self) -> int:
        """Return the sequence number of the newest entry of the request log, or 0 if it is empty."""
        return self.database.execute("SELECT MAX(seq) FROM requests").fetchone()[0] or 0

    def log_entries(self, after: int = 0) -> Iterator[Document]:
        """Yield the request log in order, starting after sequence number `after`."""
        for seq, body in self.database.execute("SELECT seq, body FROM requests WHERE seq>? ORDER BY seq", (after,)):
            yield {"seq": seq, **json.loads(body)}

"""Trackers of a run: beside the program, a process each reads metrics.jsonl and passes its rows on.

A row is all metrics of a step. It is passed on once a later step begins, or the program has ended, so that each step
arrives once, in rising order. The last step, and the row that waits, are stored beside the tracker's files in one
object of the bucket; the next attempt continues from it, on whichever machine. What it repeats is left out.
Neither a slow nor a failing tracker reaches the program: its errors are told once in the log, and counted.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

from .attempts import SecretMask
from .commands.run_inputs import unpack
from .commands.venv import NO_VENV, venv_folder
from .control import read_lines, recorded_notice
from .fs import (
    AgentError,
    agent_root,
    attempt_folder,
    complain,
    dump,
    file_size,
    parse_object,
    read_json,
    remove_tree,
    wait_until,
    write_atomic,
    write_json,
)
from .tracker_kinds import PLACES, kept_files, load_tracker
from .transfers import GrowingObject, TransferError, read_object, upload_file, with_retries
from .worker_processes import send_signal

POLL_SECONDS = 0.2
SAVE_SECONDS = 10.0
"""Seconds between two copies of a tracker's files and state; more if a copy takes over a tenth of that."""
RETRY_SECONDS = 30.0
"""Pause before another try to begin, where a tracker's server, or the bucket, did not answer."""
FINISH_SECONDS = 45.0
"""Seconds that all trackers together get after the program's end: fewer than the supervisor has (control.py)."""
Started = subprocess.Popen[bytes]
PREEMPTED_EXIT_CODE = 75
NOT_METRICS = ("step", "phase", "time")
STATE, END = "state.json", "trackers-end.json"
ERRORS = "tracker_errors"
"""Key of the errors of all trackers in the run's results."""


def start_trackers(attempt: Path, order: dict[str, Any], environment: dict[str, str]) -> dict[str, Started]:
    """Start a process for each tracker of `order`, with the program's Python and variables; return them by name."""
    venv, started = order["venv"], dict[str, Started]()
    (attempt / END).unlink(missing_ok=True)
    for number, tracker in enumerate(order["trackers"]):
        own = {key: order[key] for key in ("run_id", "attempt", "bucket")}
        python = "python3" if venv == NO_VENV else str(venv_folder(venv) / "bin" / "python")
        command = [python, str(Path(sys.argv[0]).resolve()), "track"]
        try:
            with (attempt / f"tracker-{number}.log").open("ab") as log, tempfile.TemporaryFile() as stdin:
                stdin.write(dump({**own, **tracker}))
                stdin.seek(0)
                started[tracker["use"]] = subprocess.Popen(
                    command, stdin=stdin, stdout=log, stderr=log, env=environment, start_new_session=True
                )
        except OSError as error:
            _tell(attempt, tracker["use"], f"cannot start: {error}")
    return started


def end_trackers(attempt: Path, wanted: int, started: dict[str, Started], status: int | None) -> None:
    """Let the trackers pass on the rest, and add the number of their errors to the program's summary.

    Args:
        attempt: folder of the attempt.
        wanted: number of trackers.
        started: as from `start_trackers`.
        status: exit code of the program, or minus its signal; None: a later attempt owns the run's folder, so they are
            killed. A run that may go on keeps its last row for the next attempt.
    """
    try:
        if status is not None and wanted:
            _finish(attempt, wanted, started, status)
    except (OSError, AgentError) as error:  # such as a full disk
        complain(f"cannot end the trackers: {error}")
    finally:
        for process in started.values():
            if process.poll() is None:
                send_signal(os.killpg, process.pid, signal.SIGKILL)


def _finish(attempt: Path, wanted: int, started: dict[str, Started], status: int) -> None:
    goes_on = status < 0 or status == PREEMPTED_EXIT_CODE or recorded_notice(attempt) is not None
    write_json(attempt / END, {"final": status == 0, "goes_on": goes_on})
    wait_until(lambda: not [process for process in started.values() if process.poll() is None], FINISH_SECONDS)
    errors = wanted - len(started)
    for use, process in started.items():
        if (code := process.poll()) != 0:
            how = f"did not end within {FINISH_SECONDS:.0f} s" if code is None else f"ended with code {code}"
            _tell(attempt, use, f"{how}: see {attempt.name}/tracker-*.log on worker 0")
            errors += 1
        errors += (read_json(_errors_file(attempt, use)) or {"errors": 0})["errors"]
    path = attempt.parent / "summary.json"
    if errors:
        with suppress(ValueError):  # the program's own words, which are no JSON, stay as they are
            found = parse_object(path.read_bytes()) if file_size(path) else {}
            write_atomic(path, json.dumps({**found, ERRORS: errors}).encode())


def track(run_id: str, attempt: int, bucket: str | None, **order: Any) -> None:
    """Pass on the metrics of an attempt until it has ended.

    Args:
        run_id: run, and its name in the tracker.
        attempt: number of the attempt.
        bucket: bucket, or folder, of the run; None: nothing is stored.
        order: a `TrackerOrder`.
    """
    folder = attempt_folder(run_id, attempt)
    sys.path += [str(folder.parent / "work" / place) for place in ("modules", ".slipway_modules", "")]
    follower = Follower(folder, bucket, **order)
    signal.signal(signal.SIGTERM, lambda *_: follower.hurry())  # this VM may go away; the end comes from the supervisor
    follower.follow(os.getppid())


class Follower:
    """One tracker: reads metrics.jsonl from its beginning, and passes on what follows the stored step.

    Attributes:
        rows: (step, metrics) of those since the last store, which a tracker that writes late may not have yet, and
            last the row that waits. Of one that keeps rows in memory until it is finished, all since it began; its
            unfinished files are not stored.
    """

    def __init__(
        self, attempt: Path, bucket: str | None, use: str, settings: dict[str, Any], config: dict[str, Any],
        by_phase: bool, earlier: str, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._attempt, self._run, self._bucket, self._use = attempt, attempt.parent, bucket, use
        self._settings, self._config, self._by_phase, self._clock = settings, config, by_phase, clock
        self._home, self._earlier = _folder(self._run, use), earlier
        self._object = f"runs/{self._run.name}/trackers/{self._home.name}.tar"
        self._tracker: Any = None
        self._step, self._errors, self._offset = -1, 0, 0
        self.rows: list[tuple[int, dict[str, float]]] = []
        self._try_at = self._save_at = 0.0
        self._changed = self._hurry = self._is_buffered = False
        self._closed: list[Path] = []
        self._place = f"runs/{self._run.name}/{PLACES.get(use, f'trackers/{self._home.name}')}/".replace("//", "/")
        self._copied: dict[str, tuple[int, int]] = {}
        self._objects: dict[str, GrowingObject] = {}
        self._refused = set[str]()

    def hurry(self) -> None:
        """Store at the next look what has been passed on."""
        self._hurry = True

    def follow(self, supervisor: int) -> None:
        """Follow the file until the supervisor says how the program has ended, or is no more."""
        while True:
            end = read_json(self._attempt / END) or ({} if os.getppid() != supervisor else None)
            if self._tracker is not None or end is not None or self._clock() >= self._try_at:
                self.look()
            if end is not None:
                return self.end(end.get("final", False), end.get("goes_on", True))
            time.sleep(POLL_SECONDS)

    def look(self) -> None:
        """Begin if that is still to be done, pass on new rows, and store the state where it is time."""
        if self._tracker is None and not self._survives(self._begin):
            self._try_at = self._clock() + RETRY_SECONDS
            return
        path = self._run / "metrics.jsonl"
        self._offset = 0 if file_size(path) < self._offset else self._offset  # a resumed program has cut the file
        for offset, found in read_lines(path, self._offset, SecretMask({})):
            self._offset = offset
            if isinstance(found, dict):
                self._add(*self._row_of(found))
        if self._changed and (self._hurry or self._clock() >= self._save_at):
            self.save()

    def end(self, final: bool, goes_on: bool) -> None:
        """Finish. final: the program has done its work; goes_on: a further attempt may need the last row."""
        if self._tracker is None:
            return
        if not goes_on:
            self._pass_on()
        results = self._results() if final else None
        if self._survives(lambda: self._tracker.finish(results)):
            self.rows, self._is_buffered = self.rows[-1:], False
        self.save()

    def _begin(self) -> None:
        stored = self._restore()
        (self._home / "files").mkdir(mode=0o700, parents=True, exist_ok=True)
        self._closed = kept_files(self._use, self._home / "files")
        settings = {**self._settings, "step": stored.get("step", -1)}
        tracker = load_tracker(self._use)(self._run.name, self._config, str(self._home / "files"), settings)
        known = getattr(tracker, "last_step", None)  # what its own store has counts
        self._step = settings["step"] if known is None else known
        self._is_buffered = getattr(tracker, "is_buffered", False)
        if stored.get("errors"):
            self._count(stored["errors"])
        self._tracker = tracker
        for step, row in stored.get("rows", []):
            self._add(step, row)
        for line in self._earlier.splitlines():  # a machine that died may have stored less than it told
            with suppress(ValueError):  # the first is cut
                self._add(*self._row_of(parse_object(line.encode())))

    def _restore(self) -> dict[str, Any]:
        """Return the stored state, after putting the files there that belong to it."""
        if self._bucket:
            archive, fresh = (self._home.with_name(f".{self._home.name}.{word}") for word in ("tar", "new"))
            archive.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            remove_tree(fresh)
            self._objects.clear()
            if read_object(self._bucket, self._object, archive):
                unpack(archive, fresh)
                archive.unlink()
            for name, size in (read_json(fresh / STATE) or {}).get("sizes", {}).items():
                self._restore_file(fresh / "files" / name, name, size)
            remove_tree(self._home)  # what was not stored is passed on again
            if fresh.exists():
                fresh.rename(self._home)
            for name, grown in self._objects.items():  # the tracker may rewrite them before the first store
                grown.has_only_grown(file_size(self._home / "files" / name))
        return read_json(self._home / STATE) or {}

    def _restore_file(self, path: Path, name: str, size: int) -> None:
        if ".." in path.parts:
            raise AgentError(f"{self._object} names a file elsewhere: {name!r}")
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not read_object(str(self._bucket), self._place + name, path) or (found := file_size(path)) < size:
            complain(f"{self._place}{name} is not what was stored")
        else:
            os.truncate(path, size)
            self._object_of(name, arrived=size if size == found else -1)

    def _row_of(self, line: dict[str, Any]) -> tuple[float, dict[str, float]]:
        """Return the step of a line and its finite metrics; no step is -1."""
        step: Any = line.get("step")
        phase = str(line.get("phase", "train"))
        prefix = f"{phase}/" if self._by_phase and phase != "train" else ""
        numbers = {name: value for name, value in line.items() if name not in NOT_METRICS and _is_number(value)}
        named = {name if name.startswith(phase) else f"{prefix}{name}": float(v) for name, v in numbers.items()}
        return (step if _is_number(step) and step == step // 1 else -1), named

    def _add(self, step: float, metrics: dict[str, float]) -> None:
        waits = self.rows[-1][0] if self.rows else -1
        if not metrics or step < max(waits, self._step + 1):
            return
        if step == waits:
            self.rows[-1][1].update(metrics)
        else:
            self._pass_on()
            self.rows.append((int(step), dict(metrics)))
        self._changed = True

    def _pass_on(self) -> None:
        """Pass on the row that waits, if any."""
        if self.rows and self.rows[-1][0] > self._step:
            step, row = self.rows[-1]
            self._survives(lambda: self._tracker.log(step, row))
            self._step, self._changed = step, True

    def _results(self) -> dict[str, Any]:
        path = self._run / "summary.json"
        try:
            return parse_object(path.read_bytes()) if path.is_file() else {}
        except ValueError as error:
            _tell(self._attempt, self._use, f"summary.json {error}: left out")
            return {}

    def _survives(self, act: Callable[[], Any]) -> bool:
        """Return whether it succeeded; count the error if not, and tell the first."""
        try:
            act()
        except (Exception, SystemExit) as error:
            self._count(1)
            complain(f"{type(error).__name__}: {error}")
            if self._errors == 1:
                said = next(iter(str(error).strip().splitlines()), "")
                _tell(self._attempt, self._use, f"{type(error).__name__}: {said[:300]}; the run goes on")
            return False
        return True

    def _count(self, errors: int) -> None:
        self._errors, self._changed = self._errors + errors, True
        write_json(_errors_file(self._attempt, self._use), {"errors": self._errors})

    def save(self) -> None:
        """Store the state with the files that belong to it in one object, and new files as they are, to look at."""
        began = self._clock()
        step = min(self._step, self.rows[0][0] - 1) if self._is_buffered and self.rows else self._step
        try:
            self._upload({"step": step, "rows": self.rows, "errors": self._errors})
            self.rows = self.rows if self._hurry or self._is_buffered else self.rows[-1:]
            self._changed = self._hurry = False
        except (TransferError, OSError, sqlite3.Error) as error:  # the next time counts
            complain(f"cannot store the state: {error}")
        self._save_at = self._clock() + max(SAVE_SECONDS, 10 * (self._clock() - began))

    def _upload(self, state: dict[str, Any]) -> None:
        """Send what is new of files that have only grown, then the state with their sizes and all other files.

        After a kill in between, the former are longer than the state says: `_restore` cuts them.
        """
        files, bucket, sizes, kept = self._home / "files", self._bucket, dict[str, int](), dict[str, tuple[int, int]]()
        found = self._closed if self._is_buffered else kept_files(self._use, files)
        names = [str(path.relative_to(files)) for path in found] if bucket else []
        for name in names:
            size, grown = file_size(files / name), self._object_of(name)
            fits = name not in self._refused and not _is_database(files / name) and grown.has_only_grown(size)
            if fits and self._is_sent(name, partial(grown.send, size)):
                sizes[name] = size
        write_json(self._home / STATE, {**state, "sizes": sizes})
        if not bucket:
            return
        with tempfile.TemporaryDirectory(dir=agent_root()) as draft:
            archive, copies = Path(draft) / "tar", Path(draft) / "files"
            with tarfile.open(archive, "w") as tar:
                tar.add(self._home / STATE, STATE)
                for name in (name for name in names if name not in sizes):
                    kept[name] = ((facts := (files / name).stat()).st_size, facts.st_mtime_ns)
                    _copy(files / name, copies / name)
                    tar.add(copies / name, f"files/{name}")
            with_retries(lambda: upload_file(archive, bucket, self._object))
            for name, facts in kept.items():
                if name not in self._refused and self._copied.get(name) != facts:
                    self._is_sent(name, partial(upload_file, copies / name, bucket, self._place + name))
                    self._copied[name] = facts

    def _is_sent(self, name: str, send: Callable[[], object]) -> bool:
        """Return False for a file that the bucket never takes under its name: only the state's archive holds it."""
        try:
            with_retries(send)
        except TransferError as error:
            if not error.permanent or error.denied:
                raise
            self._refused.add(name)
            complain(f"{name!r} is stored with the state only: {error}")
            return False
        return True

    def _object_of(self, name: str, arrived: int = -1) -> GrowingObject:
        made = GrowingObject(self._home / "files" / name, str(self._bucket), self._place + name, arrived)
        return self._objects.setdefault(name, made)


def _is_database(path: Path) -> bool:
    """Return whether it is one of SQLite's."""
    with path.open("rb") as file:
        return file.read(16).startswith(b"SQLite format 3")


def _copy(path: Path, target: Path) -> None:
    """Copy a file; a database of SQLite as of one moment, whoever writes to it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if not _is_database(path):
        shutil.copyfile(path, target)
        return
    with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(target)) as copy:
        source.backup(copy)


def _folder(run: Path, use: str) -> Path:
    return run / "trackers" / re.sub(r"\W+", ".", use)


def _errors_file(attempt: Path, use: str) -> Path:
    return attempt / f"{_folder(attempt.parent, use).name}.errors.json"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _tell(attempt: Path, use: str, message: str) -> None:
    """Add a line to the program's log."""
    with suppress(OSError), (attempt / "log").open("ab") as log:
        log.write(f"slipway: logging.trackers: {use}: {message}\n".encode())

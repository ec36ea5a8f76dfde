"""`slipway logs`: show the program's output on one worker or several, live from the workers, else from the bucket."""

import json
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from controller.agent.protocol import WATCH, WatchRequest
from controller.cli.main import Command
from controller.cli.verbs.look.exec import LineBuffer
from controller.core.errors import ConfigError
from controller.gcp.errors import NotFoundError
from controller.records.ledger import Launch
from controller.run.session import Session, open_session
from controller.ssh.fleet import Fleet, WorkerError

Writer = Callable[[str], object]


def run(command: Command) -> int:
    flags = command.flags
    with open_session(command.options) as session:
        workers = session.parse_workers(flags.worker)
        launches = session.ledger.launches()
        if not launches:
            raise ConfigError(f"{session.plan.run_id} was never launched; run `slipway up` first")
        attempt = select_attempt(launches, flags.attempt)
        if len(launches) > 1 and not flags.json:
            print(f"(attempt {attempt} of {len(launches)}; --attempt N shows another)", file=sys.stderr)
        with command.options.showing("connecting to the workers"):
            fleet = session.fleet()
        logs = _Logs(session, fleet, attempt, follow=flags.follow)
        if len(workers) == 1:
            logs.show(workers[0], _write_json if flags.json else _write_text)
        else:
            _show_all(logs, workers, as_json=flags.json)
    return 0


def select_attempt(launches: Sequence[Launch], wanted: int | None) -> int:
    """Return the attempt to show, by default the latest. Raises ConfigError if there is no such attempt."""
    known = [launch.attempt for launch in launches]
    if wanted is not None and wanted not in known:
        raise ConfigError(f"--attempt {wanted}: the run has attempts {', '.join(map(str, known))}")
    return known[-1] if wanted is None else wanted


def _write_text(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _write_json(text: str) -> None:
    print(json.dumps({"log": text}), flush=True)


def _show_all(logs: "_Logs", workers: Sequence[int], *, as_json: bool) -> None:
    """Show several logs line by line, each line with its worker; one after the other unless they are followed."""
    lock, width = threading.Lock(), len(str(max(workers)))

    def say(worker: int, line: str) -> None:
        with lock:
            print(json.dumps({"worker": worker, "log": line}) if as_json else f"worker {worker:>{width}}| {line}",
                  flush=True)  # fmt: skip

    def show(worker: int) -> str:
        lines = LineBuffer(partial(say, worker))
        try:
            logs.show(worker, lambda text: lines.write(text.encode()))
        except (ConfigError, WorkerError) as error:
            return str(error)
        finally:
            lines.flush()
        return ""

    with ThreadPoolExecutor(max_workers=len(workers) if logs.follow else 1) as pool:
        problems = [problem for problem in pool.map(show, workers) if problem]
    if problems:
        raise ConfigError(problems)


class _Logs:
    """Logs of one attempt."""

    def __init__(self, session: Session, fleet: Fleet | None, attempt: int, *, follow: bool) -> None:
        self._session, self._fleet, self._attempt, self.follow = session, fleet, attempt, follow

    def show(self, worker: int, write: Writer) -> None:
        """Write the log of a worker. Raises ConfigError if it has none, WorkerError if its stream breaks off."""
        if not self._show_from_worker(worker, write):
            self._show_from_bucket(worker, write)

    def _show_from_worker(self, worker: int, write: Writer) -> bool:
        if self._fleet is None:
            return False
        run_id = self._session.plan.run_id
        payload: WatchRequest = {"run_id": run_id, "attempt": self._attempt, "follow": self.follow}
        told = False
        try:
            for line in self._fleet.stream(worker, WATCH, payload):
                if "log" in line:
                    told = True
                    write(line["log"])
        except WorkerError as error:
            if told or error.kind != "agent":
                raise
        return told

    def _show_from_bucket(self, worker: int, write: Writer) -> None:
        google, ledger = self._session.context.google, self._session.ledger
        try:
            content = google.download(self._session.plan.bucket, ledger.log_object(worker, self._attempt))
        except NotFoundError:
            message = f"no log for worker {worker}, attempt {self._attempt}, on the pod or in the bucket"
            raise ConfigError(message) from None
        write(content.decode(errors="replace"))

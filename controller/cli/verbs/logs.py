"""`slipway logs`: the program's output, live from one worker or several, else from the bucket."""

import sys
import threading
from argparse import Namespace
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from conf.strict_json import dumps
from controller.agent.protocol import WATCH, WatchRequest
from controller.cli.main import Command
from controller.cli.verbs.on_workers import LineBuffer
from controller.core.errors import ConfigError
from controller.gcp.google_errors import NotFoundError
from controller.run.session import Session, open_session
from controller.ssh.fleet import Fleet, WorkerError

TextWriter = Callable[[str], object]


def run_logs(command: Command) -> int:
    """`slipway logs`: show the program's output, live from one worker or several, else from the bucket."""
    flags = command.flags
    with open_session(command.options) as session:
        workers = session.parse_workers(flags.worker)
        launches = session.ledger.launches()
        if not launches:
            raise ConfigError(f"{session.plan.run_id} was never launched; run `slipway up` first")
        known = [launch.attempt for launch in launches]
        if flags.tail is not None and flags.tail < 0:
            raise ConfigError(f"--tail {flags.tail}: use a number of lines, 0 or more")
        attempt = known[-1] if flags.attempt is None else flags.attempt
        if attempt not in known:
            raise ConfigError(f"--attempt {attempt}: the run has attempts {', '.join(map(str, known))}")
        if len(launches) > 1 and not flags.json:
            print(f"(attempt {attempt} of {len(launches)}; --attempt N shows another)", file=sys.stderr)
        with command.options.showing("connecting to the workers"):
            fleet = session.fleet()
        show = partial(_show_log, session, fleet, attempt, flags)
        if len(workers) > 1:
            _show_all(show, workers, as_json=flags.json, at_once=flags.follow)
        elif flags.json:
            show(workers[0], lambda text: print(dumps({"log": text}), flush=True))
        else:
            show(workers[0], lambda text: print(text, end="", flush=True))
    return 0


def _show_all(
    show_log: Callable[[int, TextWriter], None], workers: Sequence[int], *, as_json: bool, at_once: bool
) -> None:
    """Show several logs line by line, each line with its worker; at once, or one after the other."""
    lock, width = threading.Lock(), len(str(max(workers)))

    def say(worker: int, line: str) -> None:
        with lock:
            print(dumps({"worker": worker, "log": line}) if as_json else f"worker {worker:>{width}}| {line}",
                  flush=True)  # fmt: skip

    def show(worker: int) -> str:
        lines = LineBuffer(partial(say, worker))
        try:
            show_log(worker, lambda text: lines.write(text.encode()))
        except (ConfigError, WorkerError) as error:
            return str(error)
        finally:
            lines.flush()
        return ""

    with ThreadPoolExecutor(max_workers=len(workers) if at_once else 1) as pool:
        problems = [problem for problem in pool.map(show, workers) if problem]
    if problems:
        raise ConfigError(problems)


def _show_log(
    session: Session, fleet: Fleet | None, attempt: int, flags: Namespace, worker: int, write: TextWriter
) -> None:
    """Write the log of a worker, or with --tail its last lines and, with --follow, what comes after them.

    Raises:
        ConfigError: it has none.
        WorkerError: its stream breaks off.
    """
    stream = partial(_stream_log, session, fleet, attempt, worker)
    if flags.tail is None:
        stream(write, follow=flags.follow)
        return
    text: list[str] = []
    try:
        end = stream(text.append, follow=False)
    except ConfigError:
        if not flags.follow:
            raise
        end = 0  # it may have none yet
    lines = "".join(text).splitlines(keepends=True)
    write("".join(lines[len(lines) - flags.tail :] if flags.tail < len(lines) else lines))
    if flags.follow and end is not None:
        stream(write, follow=True, offset=end)


def _stream_log(
    session: Session,
    fleet: Fleet | None,
    attempt: int,
    worker: int,
    write: TextWriter,
    *,
    follow: bool,
    offset: int = 0,
) -> int | None:
    """Write a log as the worker tells it, and return its bytes until then; from the bucket, and None, if it cannot."""
    request: WatchRequest = {"run_id": session.plan.run_id, "attempt": attempt, "follow": follow, "log_offset": offset}
    end: int | None = None
    try:
        for line in fleet.stream(worker, WATCH, request) if fleet is not None else ():
            if "log" in line:
                end = line.get("offset", 0)
                write(line["log"])
    except WorkerError as error:
        if end is not None or error.kind != "agent":
            raise
    if end is not None or offset:
        return end
    try:
        content = session.context.google.download(session.plan.bucket, session.ledger.log_object(worker, attempt))
    except NotFoundError:
        message = f"no log for worker {worker}, attempt {attempt}, on the pod or in the bucket"
        raise ConfigError(message) from None
    write(content.decode(errors="replace"))
    return None

"""`slipway logs`: show the program's output on one worker, live from the worker, else from the bucket."""

import json
import sys
from collections.abc import Callable

from controller.agent.protocol import WATCH, WatchRequest
from controller.cli.main import Command
from controller.core.errors import ConfigError
from controller.gcp.errors import NotFoundError
from controller.run.session import Session, open_session
from controller.ssh.fleet import WorkerError


def run(command: Command) -> int:
    with open_session(command.options) as session:
        worker = session.parse_worker(command.flags.worker)
        launches = session.ledger.launches()
        if not launches:
            raise ConfigError(f"{session.plan.run_id} was never launched; run `slipway up` first")
        attempt = launches[-1].attempt
        write = _print_json if command.flags.json else sys.stdout.write
        if not _print_from_worker(session, worker, attempt, write, follow=command.flags.follow):
            _print_from_bucket(session, worker, attempt, write)
    return 0


def _print_json(text: str) -> None:
    print(json.dumps({"log": text}), flush=True)


def _print_from_worker(
    session: Session, worker: int, attempt: int, write: Callable[[str], object], *, follow: bool
) -> bool:
    fleet = session.fleet()
    if fleet is None:
        return False
    payload: WatchRequest = {"run_id": session.plan.run_id, "attempt": attempt, "follow": follow}
    told = False
    try:
        for line in fleet.stream(worker, WATCH, payload):
            if "log" in line:
                told = True
                write(line["log"])
                sys.stdout.flush()
    except WorkerError as error:
        if told or error.kind != "agent":
            raise
    return told


def _print_from_bucket(session: Session, worker: int, attempt: int, write: Callable[[str], object]) -> None:
    try:
        content = session.context.google.download(session.plan.bucket, session.ledger.log_object(worker, attempt))
    except NotFoundError:
        raise ConfigError(f"no log for worker {worker}, attempt {attempt}, on the pod or in the bucket") from None
    write(content.decode(errors="replace"))

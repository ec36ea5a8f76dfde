"""`slipway logs`: what the program prints on one worker: live from the worker, else from the bucket."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from controller.errors import ConfigError
from controller.google import NotFound
from controller.session import Session, session
from controller.ssh import WorkerError

if TYPE_CHECKING:
    from controller.cli import Command


def run(command: Command) -> int:
    worker = command.flags.worker
    with session(command) as now:
        if not 0 <= worker < now.plan.node.workers:
            raise ConfigError(f"--worker {worker}: the pod has workers 0 to {now.plan.node.workers - 1}")
        launches = now.ledger.launches()
        if not launches:
            raise ConfigError(f"{now.plan.run_id} was never launched; `slipway up` does that")
        attempt = launches[-1].attempt
        if not _from_worker(now, worker, attempt, follow=command.flags.follow):
            _from_bucket(now, worker, attempt)
    return 0


def _from_worker(now: Session, worker: int, attempt: int, *, follow: bool) -> bool:
    fleet = now.fleet()
    if fleet is None:
        return False
    payload = {"run_id": now.plan.run_id, "attempt": attempt, "follow": follow}
    told = False
    try:
        for line in fleet.stream(worker, "watch", payload):
            if "log" in line:
                told = True
                sys.stdout.write(line["log"])
                sys.stdout.flush()
    except WorkerError as error:
        if told or error.kind != "agent":
            raise
    return told


def _from_bucket(now: Session, worker: int, attempt: int) -> None:
    try:
        content = now.world.google.download(now.plan.bucket, now.ledger.log_object(worker, attempt))
    except NotFound:
        raise ConfigError(f"no log of worker {worker}, attempt {attempt}, on the pod or in the bucket") from None
    sys.stdout.write(content.decode(errors="replace"))

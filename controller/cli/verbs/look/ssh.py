"""`slipway ssh`: a shell on one worker, or one command in this terminal."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from controller.run.session import session
from controller.ssh.terminal import interact

if TYPE_CHECKING:
    from controller.cli.main import Command


def run(command: Command) -> int:
    with session(command.options) as now:
        worker = now.worker(command.flags.worker)
        return interact(now.workers().link(worker), shlex.join(command.rest) if command.rest else None)

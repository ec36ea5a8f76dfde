"""`slipway ssh`: open a shell on one worker, or run one command in this terminal."""

import shlex

from controller.cli.main import Command
from controller.run.session import open_session
from controller.ssh.terminal import open_shell


def run(command: Command) -> int:
    with open_session(command.options) as session:
        worker = session.parse_worker(command.flags.worker)
        return open_shell(
            session.authorized_fleet().connection(worker), shlex.join(command.remainder) if command.remainder else None
        )

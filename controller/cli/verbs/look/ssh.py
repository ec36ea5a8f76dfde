"""`slipway ssh`: open a shell on one worker, or run one command in this terminal, in the environment of the run."""

import shlex
import sys

from controller.cli.main import Command
from controller.run.session import open_session
from controller.ssh.terminal import open_shell


def run(command: Command) -> int:
    with open_session(command.options) as session:
        worker = session.parse_worker(command.flags.worker)
        on_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        line = shell_command(session.plan.run_id, command.remainder, on_terminal=on_terminal)
        with command.options.showing(f"connecting to worker {worker}"):
            link = session.authorized_fleet().ssh_connection(worker)
        return open_shell(link, line)


def shell_command(run_id: str, words: tuple[str, ...], *, on_terminal: bool) -> str:
    """Return the shell command that enters the run's folder with the environment of its program, once it was launched.

    Args:
        run_id: run whose environment it is; the agent writes it to `shell.sh` at each launch.
        words: command to run there; empty: an interactive shell, or one that reads commands from a pipe.
        on_terminal: whether the shell has a terminal.
    """
    source = f'f="$HOME/.slipway/runs/"{shlex.quote(run_id)}/shell.sh; '
    if words:
        return f'{source}[ -r "$f" ] && . "$f"; {shlex.join(words)}'
    if on_terminal:
        return f'{source}[ -r "$f" ] && exec bash --rcfile "$f" -i; exec "${{SHELL:-/bin/sh}}" -l'
    return f'{source}[ -r "$f" ] && . "$f"; exec "${{SHELL:-/bin/sh}}"'

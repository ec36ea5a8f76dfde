"""Command line: `python -m controller.localcloud serve|start|stop|wipe|env|requests --state DIR`."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from controller.localcloud import lifecycle


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return 0 on success, or 2 with an explanation on stderr if it cannot be carried out."""
    os.umask(0o077)  # the state holds a token, host keys and secrets of workers
    options = _parser().parse_args(arguments)
    state: Path = options.state
    try:
        match options.command:
            case "serve":
                return _serve(options)
            case "start":
                return lifecycle.start(state, [*(sys.argv[1:] if arguments is None else arguments)][1:])
            case "stop":
                lifecycle.stop(state, programs=options.programs)
            case "wipe":
                lifecycle.wipe(state)
            case "env":
                sys.stdout.write(lifecycle.format_exports(state))
            case "requests":
                sys.stdout.write(lifecycle.request_admin(lifecycle.require_endpoint(state), "GET", "requests").decode())
    except lifecycle.NotRunningError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _serve(options: argparse.Namespace) -> int:
    # Only this command needs these, which are slow to import.
    import asyncio
    import logging

    from controller.localcloud.clock import HeldLoop
    from controller.localcloud.cloud import StartError, serve

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("asyncssh").setLevel(logging.ERROR)
    try:
        given = {"operation_seconds": options.operation_seconds, "realism": options.realism}
        with asyncio.Runner(loop_factory=HeldLoop if options.held else None) as runner:
            if isinstance(loop := runner.get_loop(), HeldLoop):
                loop.hold_time()
            runner.run(serve(options.state, options.port, options.idle_exit, **given))
    except StartError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m controller.localcloud", description="Run the emulated cloud.")
    commands = parser.add_subparsers(dest="command", required=True)
    text = {
        "serve": "run the server in the foreground",
        "start": "start the server in the background and return when it is ready",
        "stop": "stop the server; its state is kept",
        "wipe": "stop the server, kill every worker's processes and delete the state",
        "env": "print shell exports for gcloud and the client libraries",
        "requests": "print the request log as JSON lines",
    }
    for name, help_text in text.items():
        command = commands.add_parser(name, help=help_text)
        command.add_argument("--state", type=Path, required=True, help="folder that stores all state")
        if name == "stop":
            command.add_argument("--programs", action="store_true", help="kill every worker's processes too")
        if name in ("serve", "start"):
            command.add_argument("--port", type=int, default=0, help="0: the previous port, or any free one")
            command.add_argument("--operation-seconds", type=float, help="duration of operations (default 0.5)")
            command.add_argument("--realism", choices=["strict", "relaxed"], help="see docs/emulated-cloud.md")
            command.add_argument("--held", action="store_true", help="time passes by POST emulator/clock alone")
            command.add_argument("--idle-exit", type=float, metavar="SECONDS", help="exit when idle and without nodes")
    return parser


if __name__ == "__main__":
    sys.exit(main())

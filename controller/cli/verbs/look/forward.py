"""`slipway forward PORT[:REMOTE]`: reach a port of a worker at 127.0.0.1:PORT until Ctrl-C."""

import json
import sys

from controller.cli.main import Command
from controller.core.errors import ConfigError
from controller.run.session import open_session
from controller.ssh.port_forward import PortForward


def run(command: Command) -> int:
    port, remote = parse_ports(command.flags.port)
    with open_session(command.options) as session:
        worker = session.parse_worker(command.flags.worker)
        with command.options.showing(f"connecting to worker {worker}"):
            link = session.authorized_fleet().ssh_connection(worker)
            link.connection().open()  # fail now if the connection is broken, not at the first page
        forward = PortForward(link, port, remote, lambda message: print(f"warning: {message}", file=sys.stderr))
        if command.flags.json:
            print(json.dumps({"port": forward.port, "worker": worker, "remote": remote}), flush=True)
        else:
            where = f"forwarding http://127.0.0.1:{forward.port} to port {remote} of worker {worker}"
            print(f"{where}; press Ctrl-C to stop", flush=True)
        try:
            forward.serve()
        except KeyboardInterrupt:
            return 0
        finally:
            forward.close()
    return 0


def parse_ports(text: str) -> tuple[int, int]:
    """Parse `8888` or `9999:8888` as (local port, worker's port). Raises ConfigError if it is neither."""
    local, _, remote = text.partition(":")
    try:
        found = int(local), int(remote or local)
    except ValueError:
        found = (-1, -1)
    if not (0 <= found[0] < 1 << 16 and 0 < found[1] < 1 << 16):
        raise ConfigError(
            f"invalid port {text!r}; use 8888, or 9999:8888 for local port 9999 and port 8888 of the worker"
        )
    return found

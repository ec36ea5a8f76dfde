"""Forward a port of this machine to a port of a worker, such as Jupyter's."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from controller.core.errors import ConfigError
from controller.ssh.connect import WorkerError
from controller.ssh.connection import CHUNK

if TYPE_CHECKING:
    from controller.ssh.connection import Connection


class PortForward:
    """Listener on loopback that opens a `fabric.tunnels.Tunnel` over one SSH connection for each client.

    fabric's own listener ends when the worker refuses a connection, as it does until Jupyter is up.
    """

    def __init__(self, link: Connection, port: int, remote: int, note: Callable[[str], object]) -> None:
        """Start to listen.

        Args:
            port: local port; 0: any free one.
            remote: port on the worker's loopback.
            note: called with the reason when a connection cannot be made.

        Raises:
            ConfigError: the port is in use or not permitted.
        """
        self._connection, self._remote, self._note = link, remote, note
        self._finished = threading.Event()
        try:
            self._listener = socket.create_server(("127.0.0.1", port))
        except OSError as error:
            message = f"cannot listen on port {port}: {os.strerror(error.errno or 0)}"
            raise ConfigError(f"{message}; to use another port: `slipway forward OTHER:{remote}`") from None
        self.port: int = self._listener.getsockname()[1]

    def serve(self) -> None:
        """Accept connections until `close`."""
        from fabric.tunnels import Tunnel

        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            try:
                tunnel = Tunnel(self._connection.open_channel(self._remote), connection, self._finished)
            except WorkerError as error:
                self._note(str(error))
                connection.close()
                continue
            tunnel.socket_chunk_size = tunnel.channel_chunk_size = CHUNK
            tunnel.start()

    def close(self) -> None:
        """Stop accepting connections and close the open ones within a second."""
        self._finished.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept
        self._listener.close()

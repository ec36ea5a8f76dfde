"""A port of this machine that leads to a port of a worker, such as Jupyter's."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from typing import TYPE_CHECKING

from controller.core.errors import ConfigError
from controller.ssh.connect import WorkerError
from controller.ssh.connection import CHUNK

if TYPE_CHECKING:
    from collections.abc import Callable

    from paramiko import Channel

    from controller.ssh.connection import Link


class Forward:
    """Listens on loopback only; every connection gets a channel of its own over the one SSH connection."""

    def __init__(self, link: Link, port: int, remote: int, note: Callable[[str], object]) -> None:
        """
        Args:
            port: of this machine; 0: any free one.
            remote: of the worker's loopback.
            note: is told of connections that could not be made.

        Raises:
            ConfigError: the port is in use or not allowed.
        """
        self._link, self._remote, self._note = link, remote, note
        self._open: set[socket.socket] = set()
        try:
            self._listener = socket.create_server(("127.0.0.1", port))
        except OSError as error:
            words = f"port {port} of this machine: {os.strerror(error.errno or 0)}"
            raise ConfigError(f"{words}; another one: `slipway forward OTHER:{remote}`") from None
        self.port: int = self._listener.getsockname()[1]

    def serve(self) -> None:
        """Accept connections until `close`."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._join, args=(connection,), daemon=True).start()

    def close(self) -> None:
        """No more connections; those that are open end."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept
        self._listener.close()
        for connection in list(self._open):
            _end(connection)

    def _join(self, connection: socket.socket) -> None:
        self._open.add(connection)
        try:
            with connection, self._link.channel(self._remote) as channel:
                back = threading.Thread(target=_copy_back, args=(channel, connection), daemon=True)
                back.start()
                with contextlib.suppress(OSError):
                    while data := connection.recv(CHUNK):
                        channel.sendall(data)
                    channel.shutdown_write()
                back.join()
        except WorkerError as error:
            self._note(str(error))
        finally:
            self._open.discard(connection)


def _copy_back(channel: Channel, connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := channel.recv(CHUNK):
            connection.sendall(data)
    _end(connection)


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)

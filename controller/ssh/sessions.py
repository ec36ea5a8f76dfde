"""What has one SSH connection for itself: a shell in this terminal or on a pipe, and the forwarding of a port."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import termios
import threading
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from controller.core.errors import ConfigError
from controller.ssh.connect import WorkerError
from controller.ssh.connection import CHUNK

if TYPE_CHECKING:
    from paramiko import Channel

    from controller.ssh.connection import Connection


def open_shell(link: Connection, command: str | None) -> int:
    """Run a shell or a command on this process's stdin, stdout and stderr and return its exit code.

    It gets a terminal if this process has one; keys such as Ctrl-C then go to the worker.

    Raises:
        WorkerError: the worker is unreachable, or the connection dropped.
    """
    on_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    with link.channel() as channel:
        if on_terminal:
            columns, lines = os.get_terminal_size()
            channel.get_pty(os.environ.get("TERM", "xterm"), columns, lines)
        if command is None:
            channel.invoke_shell()
        else:
            channel.exec_command(command)
        with _raw_mode(channel) if on_terminal else contextlib.nullcontext():
            threading.Thread(target=_forward_stdin, args=(channel,), daemon=True).start()
            errors = threading.Thread(target=_forward_stderr, args=(channel,), daemon=True)
            errors.start()
            for data in link.chunks(channel):
                _write(1, data)
            errors.join()
        return link.exit_code(channel)


def _forward_stdin(channel: Channel) -> None:
    with contextlib.suppress(OSError, EOFError):  # the channel is closed, or the connection lost
        while data := os.read(0, CHUNK):
            channel.sendall(data)
        channel.shutdown_write()


def _forward_stderr(channel: Channel) -> None:
    with contextlib.suppress(OSError, EOFError):  # a lost connection: whoever reads stdout reports it
        while data := channel.recv_stderr(CHUNK):
            _write(2, data)


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


@contextmanager
def _raw_mode(channel: Channel) -> Iterator[None]:
    """Send every key and window size to the worker inside the block, then restore the terminal."""
    before = termios.tcgetattr(sys.stdin)

    def resized(*_: object) -> None:
        columns, lines = os.get_terminal_size()
        channel.resize_pty(columns, lines)

    handler = signal.signal(signal.SIGWINCH, resized)
    try:
        tty.setraw(sys.stdin.fileno(), termios.TCSADRAIN)  # keep what was typed ahead
        yield
    finally:
        signal.signal(signal.SIGWINCH, handler)
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


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

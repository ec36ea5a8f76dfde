"""Run a shell on a worker in this terminal, or with input from a pipe."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import termios
import threading
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

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

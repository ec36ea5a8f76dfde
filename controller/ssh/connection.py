"""SSH connection to one worker, and what has one for itself: the agent's protocol, a shell, a forwarded port."""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext, suppress
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from controller.agent.fs import dump
from controller.core.errors import ConfigError
from controller.ssh.agent_link import AgentBundle, AgentLink, ConnectionParams, WorkerError, late_after

if TYPE_CHECKING:
    from paramiko import Channel, Transport

    from controller.ssh.worker_connection import WorkerConnection

CHUNK = 1 << 16
WINDOW_BYTES = 1 << 18
"""Bytes that a worker may send before we read them; paramiko's 2 MiB would be 128 MiB for 64 workers."""
SIGNAL_EXIT_BASE = 128
"""Exit code returned for a command that a signal ended."""
SPACE_PROBE = "cd ~/.slipway && export LC_ALL=C && head -c 65536 /dev/zero > .space; code=$?; rm -f .space; exit $code"
FULL_DISK_SIGNS = (b"No space left on device", b"Disk quota exceeded", b"File size limit exceeded")
"""What the probe prints if it cannot write; the last one on an emulated worker."""
UPLOAD_SECONDS = 60.0
"""An upload that makes no progress for this long fails."""


class Connection(AgentLink):
    """Connection that opens on demand, stays open and reconnects after a failure. Thread-safe."""

    def __init__(
        self, access: ConnectionParams, worker: int, connect: Callable[[int], WorkerConnection], agent: AgentBundle
    ) -> None:
        super().__init__(worker, access.addresses[worker])
        self._params, self._connect, self._agent = access, connect, agent
        self._current_transport: WorkerConnection | None = None
        self._connecting, self._probing = threading.Lock(), threading.Lock()
        self._closed = False

    def follow(self, shell: str, out: Callable[[bytes], object], err: Callable[[bytes], object]) -> int:
        """Run a shell command, pass its output on as it arrives and return its exit code.

        Raises WorkerError of any kind except agent.
        """
        with self._start_command(shell, b"") as channel:
            aside = threading.Thread(target=_drain_stderr, args=(channel, err), daemon=True)
            aside.start()
            for chunk in self.chunks(channel):
                out(chunk)
            code = self.exit_code(channel)
            aside.join()
            return code

    def close(self) -> None:
        """Close permanently. Pending calls raise WorkerError."""
        self._closed = True
        if self._current_transport is not None:
            self._current_transport.close()

    @property
    def closed(self) -> bool:
        return self._closed

    # The agent

    def _agent_output(self, command: str, payload: Mapping[str, Any], seconds: float) -> Iterator[bytes]:
        """Yield the agent's output; install the agent first if the worker does not have it."""
        for placed in (False, True):
            said = False
            with self._start_command(self._agent.shell(command), dump(payload)) as channel:
                for chunk in self.chunks(channel, seconds):
                    said = True
                    yield chunk
                code = self.exit_code(channel)
                message = channel.recv_stderr(CHUNK).decode(errors="replace") if code else ""
            if said and code in (0, 1):
                return
            if placed or code != 2:  # Python exits with 2 if the file does not exist
                raise self._error("agent", f"`{command}` exited with code {code}", message)
            self._install_agent()

    def _install_agent(self) -> None:
        """Upload the agent under a temporary name and rename it, so that a partial upload is never run."""
        from invoke.exceptions import Failure, ThreadException
        from paramiko import SSHException

        connection, transport = self.connection(), self._transport()
        draft = f".slipway/.{self._agent.name}.{uuid4().hex}"
        try:
            connection.run("mkdir -p -m 700 ~/.slipway", hide=True, timeout=UPLOAD_SECONDS)
            sftp = connection.sftp()
            sftp.get_channel().settimeout(UPLOAD_SECONDS)
            connection.put(BytesIO(self._agent.content), draft)
            sftp.posix_rename(draft, f".slipway/{self._agent.name}")
        except (Failure, ThreadException, SSHException, OSError, EOFError) as error:
            self.probe(transport)
            result = getattr(error, "result", None)  # of the command that failed
            reason = self._full_disk() or str(error) if result is None else result.stderr.strip()[-300:]
            raise self._error("agent", f"cannot install the agent: {reason}", str(error)) from error

    def _full_disk(self) -> str:
        """Return why a small file cannot be written, or "": SFTP has one word for all errors, `Failure`."""
        said: list[bytes] = []
        try:
            self.follow(SPACE_PROBE, lambda _: None, said.append)
        except WorkerError:
            return ""  # the error of the upload counts
        is_full = any(sign in b"".join(said) for sign in FULL_DISK_SIGNS)
        return "No space left on device: ~/.slipway" if is_full else ""

    # The connection

    def connection(self) -> WorkerConnection:
        """Return the underlying `fabric.Connection`, which opens on first use and reopens after a failure."""
        with self._connecting:
            if self._current_transport is None:
                self._current_transport = self._connect(self._number)
            return self._current_transport

    def _transport(self) -> Transport:
        connection = self.connection()
        if not self._closed:
            connection.open()
        if self._closed:
            self.close()
            raise self._error("dropped", "the connection was closed on this side")
        return connection.transport

    def open_channel(self, port: int | None = None) -> Channel:
        """Open a paramiko channel: a session, or a connection to a port on the worker's loopback.

        Raises WorkerError of any kind except agent.
        """
        from paramiko import ChannelException, SSHException

        transport, seconds = self._transport(), self._params.connect_seconds
        try:
            if port is None:
                return transport.open_session(WINDOW_BYTES, timeout=seconds)
            return transport.open_channel("direct-tcpip", ("127.0.0.1", port), ("127.0.0.1", 0), timeout=seconds)
        except ChannelException as error:  # the connection itself is fine
            what = "a session" if port is None else f"port {port} of the worker"
            raise self._error("refused", f"cannot connect to {what}: {error.text}") from error
        except (SSHException, OSError, EOFError) as error:
            transport.close()  # it may be frozen: the next attempt opens a new one
            raise self._error("dropped", f"the connection is dead: {error}") from error

    @contextmanager
    def channel(self) -> Iterator[Channel]:
        """Open a session channel and close it at the end of the block.

        Raises WorkerError of any kind except agent; also for failures of the channel inside the block.
        """
        from paramiko import SSHException

        try:
            with closing(self.open_channel()) as channel:
                try:
                    yield channel
                except GeneratorExit:  # nobody reads on who could hear that the connection is lost
                    with suppress(SSHException, OSError, EOFError):
                        channel.close()
                    raise
        except (SSHException, OSError, EOFError) as error:
            raise self._error("dropped", f"the connection was lost: {error or type(error).__name__}") from error

    @contextmanager
    def _start_command(self, shell: str, stdin: bytes) -> Iterator[Channel]:
        """Start a command, send its stdin and yield its channel."""
        with self.channel() as channel:
            channel.exec_command(shell)
            try:
                channel.sendall(stdin)
                channel.shutdown_write()
            except OSError:
                if not channel.get_transport().is_active():
                    raise  # otherwise the command ended without reading; its exit code tells why
            yield channel

    def chunks(self, channel: Channel, seconds: float = math.inf) -> Iterator[bytes]:
        """Yield the data of a channel until the other side closes it. Raises WorkerError of kind timeout or dropped."""
        end = time.monotonic() + seconds
        message = f"not finished after {seconds:g} s; it may still be running on the worker"
        is_too_late = late_after(end)
        while True:
            if is_too_late(time.monotonic()):
                raise self._error("timeout", message)
            channel.settimeout(min(self._params.silence_seconds, max(0.01, end - time.monotonic())))
            try:
                data = channel.recv(CHUNK)
            except TimeoutError:
                if time.monotonic() >= end:
                    raise self._error("timeout", message) from None
                self.probe(channel.get_transport())
                continue
            if not data:
                return
            yield data

    def exit_code(self, channel: Channel) -> int:
        """Return the exit code of a channel's command, after the end of its output. Raises WorkerError (dropped)."""
        while not channel.status_event.wait(self._params.silence_seconds):
            self.probe(channel.get_transport())
        code = channel.recv_exit_status()
        if code < 0:  # the connection is lost, or a signal ended the command: paramiko does not tell
            self.probe(channel.get_transport())
            return SIGNAL_EXIT_BASE
        return code

    def probe(self, transport: Transport) -> None:
        """Check that the other side still answers; paramiko would wait forever for a frozen host.

        Raises WorkerError (dropped) if not; the connection is closed.
        """
        seconds = self._params.silence_seconds
        with self._probing:  # paramiko keeps one answer per connection
            asking = threading.Thread(target=transport.global_request, args=("keepalive@openssh.com",), daemon=True)
            asking.start()
            asking.join(seconds)
            silent, broken = asking.is_alive(), not transport.is_active()
            if silent or broken:
                transport.close()
                message = f"it has not answered for {2 * seconds:g} s" if silent else "the connection was lost"
                raise self._error("dropped", message)


def _drain_stderr(channel: Channel, write: Callable[[bytes], object]) -> None:
    with suppress(OSError, EOFError):  # a lost connection: whoever reads stdout reports it
        while data := channel.recv_stderr(CHUNK):
            write(data)


def open_shell(link: Connection, command: str | None) -> int:
    """Run a shell or a command on this process's stdin, stdout and stderr and return its exit code.

    It gets a terminal if this process has one; keys such as Ctrl-C then go to the worker. Raises WorkerError if the
    worker is unreachable, or the connection dropped.
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
        with _raw_mode(channel) if on_terminal else nullcontext():
            threading.Thread(target=_forward_stdin, args=(channel,), daemon=True).start()
            errors = threading.Thread(target=_drain_stderr, args=(channel, partial(_write, 2)), daemon=True)
            errors.start()
            for data in link.chunks(channel):
                _write(1, data)
            errors.join()
        return link.exit_code(channel)


def _forward_stdin(channel: Channel) -> None:
    with suppress(OSError, EOFError):  # the channel is closed, or the connection lost
        while data := os.read(0, CHUNK):
            channel.sendall(data)
        channel.shutdown_write()


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
        """Start to listen. Raises ConfigError if the port is in use or not permitted.

        Args:
            port: local port; 0: any free one.
            remote: port on the worker's loopback.
            note: called with the reason when a connection cannot be made.
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
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept
        self._listener.close()

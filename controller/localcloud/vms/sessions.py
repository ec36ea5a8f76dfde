"""SSH session on a worker: authentication, commands, shells, SFTP."""

import asyncio
import contextlib
import fcntl
import os
import pty
import random
import signal
import struct
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Any

import asyncssh
from asyncssh.constants import OPEN_CONNECT_FAILED

_CHUNK = 1 << 16
MAX_SESSIONS = 10
"""`MaxSessions` of one connection, the default of sshd_config(5), which Ubuntu's images leave as it is."""
_DRAIN_SECONDS = 0.5  # for the last output of a program on a terminal


class LoginServer(asyncssh.SSHServer):
    """Admits exactly the keys that the node's metadata lists for a user."""

    def __init__(
        self,
        keys: Callable[[str], list[str]],
        connections: set[asyncssh.SSHServerConnection],
        frozen: Callable[[], bool],
        startups: set[object],
    ) -> None:
        """Create the server of one connection; `startups` holds those of the worker that are not authenticated."""
        self._keys, self._frozen = keys, frozen
        self._connections, self._startups = connections, startups
        self._connection: asyncssh.SSHServerConnection | None = None

    def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
        self._connection = conn
        if is_dropped(len(self._startups), random.random()):  # noqa: S311 - no secret
            conn.abort()
            return
        self._startups.add(self)
        self._connections.add(conn)
        # refuse further sessions beside `MAX_SESSIONS`; forwarded ports do not count
        internals: Any = conn  # asyncssh asks its server object only where there is no process factory
        accept = internals._process_session_open

        def accept_up_to_the_limit(packet: Any) -> Any:
            sessions = [c for c in internals._channels.values() if isinstance(c, asyncssh.SSHServerChannel)]
            if len(sessions) >= MAX_SESSIONS:
                raise asyncssh.ChannelOpenError(OPEN_CONNECT_FAILED, "open failed")
            return accept(packet)

        internals._process_session_open = accept_up_to_the_limit
        freeze(conn, self._frozen())

    def auth_completed(self) -> None:
        self._startups.discard(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._startups.discard(self)
        if self._connection is not None:
            self._connections.discard(self._connection)

    def connection_requested(self, dest_host: str, dest_port: int, orig_host: str, orig_port: int) -> bool:
        return dest_host in ("localhost", "127.0.0.1")  # localhost of the VM, which all VMs share here

    def begin_auth(self, username: str) -> bool:
        return True

    def public_key_auth_supported(self) -> bool:
        return True

    def validate_public_key(self, username: str, key: asyncssh.SSHKey) -> bool:
        offered = key.export_public_key().decode().split()[:2]
        return any(line.split()[:2] == offered for line in self._keys(username))


def is_dropped(startups: int, draw: float) -> bool:
    """Return whether sshd drops a new connection beside so many unauthenticated ones; `draw` is in [0, 1).

    `MaxStartups 10:30:100`, the default of sshd_config(5): 30% from 10 on, rising to all from 100 on.
    """
    start, rate, full = 10, 0.3, 100
    return startups >= start and draw < rate + (1 - rate) * (startups - start) / (full - start)


def freeze(connection: asyncssh.SSHServerConnection, frozen: bool) -> None:
    """Pause or resume reading from a connection; to the client, a frozen one is open but unresponsive."""
    transport: Any = connection._transport  # asyncssh has no public API for this
    if transport is not None and not transport.is_closing():
        (transport.pause_reading if frozen else transport.resume_reading)()


def authorized_keys(ssh_keys: str, user: str) -> list[str]:
    """Return the keys ("ssh-ed25519 AAAA...") of `user` in metadata lines of the form "user:key"."""
    entries = (line.strip().partition(":") for line in ssh_keys.splitlines())
    return [key for name, _, key in entries if name == user]


class HomeFiles(asyncssh.SFTPServer):
    """SFTP server whose relative paths start at the worker's home; on a full disk it fails as OpenSSH's does."""

    def __init__(self, channel: Any, home: Path, disk_is_full: Callable[[], bool] = lambda: False) -> None:
        super().__init__(channel)
        self._home, self._disk_is_full = os.fsencode(home), disk_is_full

    def write(self, file_obj: object, offset: int, data: bytes) -> Any:
        if self._disk_is_full():
            raise asyncssh.SFTPFailure("Failure")
        return super().write(file_obj, offset, data)

    def map_path(self, path: bytes) -> bytes:
        return self._home + b"/" + path if not path.startswith(b"/") else path

    def exit(self) -> None:
        self.channel.exit(0)  # OpenSSH's scp fails without an exit status


async def serve_process(
    process: asyncssh.SSHServerProcess[bytes], variables: dict[str, str], frozen: Callable[[], bool], *, writes: bool
) -> None:
    """Run the client's command in its own process group until it ends; send no output while frozen.

    As with sshd, a program outlives its connection: after a drop, its input and output are closed.
    `writes` is false while the disk is full.
    """
    sent = {os.fsdecode(key): os.fsdecode(value) for key, value in process.env.items()}
    variables |= {key: value for key, value in sent.items() if key == "LANG" or key.startswith("LC_")}
    command = process.command
    arguments = ["/bin/bash", "-c", command] if command else ["/bin/bash", "-l"]
    if not writes:  # no file may grow beyond 0 bytes; a soft limit, so it can be lifted again
        arguments = ["/bin/bash", "-c", 'ulimit -S -f 0; exec "$0" "$@"', *arguments]
    if process.term_type:
        await _run_with_terminal(process, arguments, variables)
    else:
        # Own pipes, since asyncio's cannot be closed before the program ends.
        output, error = os.pipe(), os.pipe()
        try:
            child = await asyncio.create_subprocess_exec(
                *arguments,
                stdin=asyncio.subprocess.PIPE,
                stdout=output[1],
                stderr=error[1],
                env=variables,
                cwd=variables["HOME"],
                start_new_session=True,
            )
        finally:
            os.close(output[1])
            os.close(error[1])
        assert child.stdin is not None
        feeding = asyncio.create_task(
            _forward_input(process, child.stdin.write, child.stdin.drain, child.pid, child.stdin.close)
        )
        try:
            await asyncio.gather(
                _copy_output(output[0], process.stdout, frozen), _copy_output(error[0], process.stderr, frozen)
            )
            code = await child.wait()
        finally:
            feeding.cancel()
        _report_exit(process, code)


async def _copy_output(pipe: int, target: asyncssh.SSHWriter[bytes], frozen: Callable[[], bool]) -> None:
    """Forward a program's output until it ends; if the client disconnects, the program gets a broken pipe."""
    loop = asyncio.get_running_loop()
    source = asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(source), os.fdopen(pipe, "rb", 0))
    try:
        with contextlib.suppress(asyncssh.Error, OSError):  # the client has disconnected
            while data := await source.read(_CHUNK):
                while frozen():
                    await asyncio.sleep(0.05)
                target.write(data)
                await target.drain()
    finally:
        transport.close()


async def _forward_input(
    process: asyncssh.SSHServerProcess[bytes],
    write: Callable[[bytes], Any],
    drain: Callable[[], Any],
    pid: int,
    close: Callable[[], None],
    resize: Callable[[tuple[int, int]], None] | None = None,
) -> None:
    """Forward the client's input, signals and window sizes until end of file or a disconnect."""
    while True:
        try:
            data = await process.stdin.read(_CHUNK)
            if not data:
                break
            write(data)
            await drain()
        except asyncssh.SignalReceived as received:
            os.killpg(pid, getattr(signal, f"SIG{received.signal}", signal.SIGTERM))
        except asyncssh.BreakReceived:
            os.killpg(pid, signal.SIGINT)
        except asyncssh.TerminalSizeChanged as changed:
            if resize:
                resize((changed.width, changed.height))
        except (asyncssh.Error, OSError):
            break  # the connection dropped, or the program no longer reads
    close()


async def _run_with_terminal(
    process: asyncssh.SSHServerProcess[bytes], arguments: list[str], variables: dict[str, str]
) -> None:
    """Run the command on a pseudo-terminal; the session leader opens it, so it becomes the controlling terminal."""
    master, slave = pty.openpty()
    loop = asyncio.get_running_loop()
    drained = loop.create_future()
    tasks: list[asyncio.Task[Any]] = []
    try:
        _resize(master, process.term_size[:2])
        variables["TERM"] = process.term_type or "dumb"
        wrapper = ["/bin/bash", "-c", 'exec <>"$0" >&0 2>&0 "$@"', os.ttyname(slave), *arguments]
        child = await asyncio.create_subprocess_exec(
            *wrapper, env=variables, cwd=variables["HOME"], start_new_session=True, stdin=asyncio.subprocess.DEVNULL
        )
        loop.add_reader(master, _read_terminal, master, process, drained)
        ended, closed = asyncio.create_task(child.wait()), asyncio.create_task(process.channel.wait_closed())
        feeding = _forward_input(
            process,
            lambda data: os.write(master, data),
            process.stdout.drain,
            child.pid,
            lambda: None,
            lambda size: _resize(master, size),
        )
        tasks += [ended, closed, asyncio.create_task(feeding)]
        await asyncio.wait({ended, closed}, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            os.close(slave)  # the last one: once drained, reading the terminal fails
            slave = -1
            await asyncio.wait({drained}, timeout=_DRAIN_SECONDS)
            _report_exit(process, ended.result())
        else:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGHUP)  # as on the loss of a terminal
    finally:
        for task in tasks:
            task.cancel()
        loop.remove_reader(master)
        os.close(master)
        if slave >= 0:
            os.close(slave)


def _read_terminal(master: int, process: asyncssh.SSHServerProcess[bytes], drained: asyncio.Future[None]) -> None:
    try:
        process.stdout.write(os.read(master, _CHUNK))
    except OSError:  # the terminal's other side is closed, or the client has disconnected
        asyncio.get_running_loop().remove_reader(master)
        if not drained.done():
            drained.set_result(None)


def _resize(master: int, size: tuple[int, ...]) -> None:
    columns, rows = size
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def _report_exit(process: asyncssh.SSHServerProcess[bytes], code: int) -> None:
    if process.is_closing():
        return
    if code < 0:
        process.exit_with_signal(signal.Signals(-code).name.removeprefix("SIG"))
    else:
        process.exit(code)

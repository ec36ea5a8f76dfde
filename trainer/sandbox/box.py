"""A box: what an environment or a model executes runs in it under limits, and sees nothing else of this machine.

Linux alone has what it needs (trainer/sandbox/init.py). Where the kernel refuses it there is no box, and an error that
says so; nothing ever runs outside of one instead.
"""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from trainer.sandbox.init import HOME

CAUSES = ("timeout", "memory", "processes", "output")
"""Limits that end a box, by name; output: its files, and what commands print."""
PROGRAM = Path(__file__).with_name("init.py")
SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/alternatives", "/etc/ca-certificates"),
    *("/etc/ld.so.cache", "/etc/localtime", "/etc/nsswitch.conf", "/etc/pki/tls", "/etc/ssl/certs"),
    *("/etc/hosts", "/etc/resolv.conf"),
)
"""What can be read in a box, with Python and its modules."""
LOOPBACK = "127.0.0.1"
LOOK_SECONDS, START_SECONDS = 0.05, 60.0
PIECE_BYTES = 1 << 16
NO_BOX = "this machine has no box for programs"
HELP = "its kernel must give ordinary users namespaces (Ubuntu 24.04: kernel.apparmor_restrict_unprivileged_userns=0)"
ENDED = "the box has ended"

Answer = tuple[dict[str, Any], list[int]]
"""What the first process says, and descriptors."""
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class RefusedError(Exception):
    """There is no box, or no more. The message says why, and what helps."""


class Limits(NamedTuple):
    """Limits of a box. memory, disk and processes are of all its processes together.

    cpu: seconds of a command, with what it starts; wall: seconds of a command; memory and disk: bytes; output: bytes
    of what a command prints that are returned.
    """

    cpu: float
    wall: float
    memory: int
    disk: int
    output: int
    processes: int


class Ended(NamedTuple):
    """How a command ended. code: its exit code, negative for a signal; cause: one of CAUSES, or empty."""

    code: int
    cause: str
    stdout: bytes
    stderr: bytes


class Box:
    """One box, whose files are in memory. Start and stop it; a limit ends it too, with everything in it."""

    def __init__(self, limits: Limits, *, has_network: bool = False, on_limit: Callable[[str], object] = bool) -> None:
        """has_network: whether its network is this machine's, and not one with nothing but 127.0.0.1 in it.

        on_limit: is told the limit that ends it.
        """
        self.limits, self.has_network, self._on_limit = limits, has_network, on_limit
        self.cause = ""
        """The limit that ended it."""
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._answers = dict[int, asyncio.Future[Answer]]()
        self._count = 0
        self._servers = dict[int, asyncio.Server]()

    async def start(self) -> None:
        """Raises RefusedError if the kernel has none for us."""
        self._control, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        settings = {"limits": self.limits._asdict(), "readable": readable_paths(), "has_network": self.has_network}
        with control:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(PROGRAM), json.dumps(settings | {"control": control.fileno()})],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={},
                pass_fds=[control.fileno()],
                start_new_session=True,
            )
        self._control.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._answers[0] = self._loop.create_future()
        self._loop.add_reader(self._control, self._receive)
        try:
            await asyncio.wait_for(self._answers[0], START_SECONDS)
        except BaseException:
            self.stop()
            raise

    async def run(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        *,
        is_idle: Callable[[], bool] = bool,
    ) -> Ended:
        """Run a command to its end; what it leaves running stays until the box ends. Raises RefusedError if it has.

        is_idle: whether it waits for this machine, which its seconds do not count.
        """
        answer = self.begin(argv, env, stdin)
        number = self._count
        since = self._loop.time()
        try:
            while not (await asyncio.wait({answer}, timeout=LOOK_SECONDS))[0]:
                since = self._loop.time() if is_idle() else since
                if self._loop.time() - since > self.limits.wall:
                    self._end("timeout")
            said, files = answer.result()
        except RefusedError:
            if not self.cause:
                raise
            return Ended(-signal.SIGKILL, self.cause, b"", b"")
        except asyncio.CancelledError:
            if self._control is not None:
                self._control.send(json.dumps({"do": "kill", "id": number}).encode())
            raise
        texts = [os.pread(file, self.limits.output, 0) for file in files]
        for file in files:
            os.close(file)
        return Ended(said["code"], "", *texts)

    def begin(
        self, argv: Sequence[str], env: Mapping[str, str] | None = None, stdin: bytes = b""
    ) -> "asyncio.Future[Answer]":
        """Start a command, which goes on until the box ends."""
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
        own = {"PATH": path, "HOME": HOME, "TMPDIR": "/tmp", "LANG": "C.UTF-8"}  # noqa: S108
        files = [os.memfd_create("box") for _ in range(2)]
        try:
            how = {"argv": list(argv), "env": own | dict(env or {})}
            for file, data in zip(files, (json.dumps(how).encode(), stdin), strict=True):
                with open(file, "wb", closefd=False) as writer:
                    writer.write(data)
                os.lseek(file, 0, os.SEEK_SET)
            return self._send("run", files)
        finally:
            for file in files:
                os.close(file)

    async def forward(self, port: int) -> None:
        """Make a port of this machine's 127.0.0.1 the same port of the box's."""
        if self.has_network or port in self._servers:
            return
        listener = await self._socket()
        listener.bind((LOOPBACK, port))
        self._servers[port] = await _serve(listener, lambda: asyncio.open_connection(LOOPBACK, port))

    async def expose(self, port: int) -> int:
        """Return a port of this machine's 127.0.0.1 that is a port of the box's."""
        if self.has_network:
            return port

        async def dial() -> Streams:
            made = await self._socket()
            try:
                await self._loop.sock_connect(made, (LOOPBACK, port))
            except OSError:
                made.close()
                raise
            return await asyncio.open_connection(sock=made)

        server = await _serve(socket.create_server((LOOPBACK, 0)), dial)
        exposed = server.sockets[0].getsockname()[1]
        self._servers[exposed] = server
        return exposed

    def stop(self) -> None:
        """End everything in the box; there need be no event loop any more."""
        for server in self._servers.values():
            server.close()
        self._servers.clear()
        if self._control is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._control)
            self._control.close()
            self._control = None
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    async def _socket(self) -> socket.socket:
        """Return a socket of the box's network."""
        _, (descriptor,) = await self._send("socket", [])
        made = socket.socket(fileno=descriptor)
        made.setblocking(False)
        return made

    def _send(self, what: str, files: Sequence[int]) -> "asyncio.Future[Answer]":
        if self._control is None or self.cause:
            raise RefusedError(f"{ENDED}{self.cause and f' at its limit of {self.cause}'}")
        self._count += 1
        answer = self._answers[self._count] = self._loop.create_future()
        with suppress(BrokenPipeError):  # the reader of its socket tells why
            socket.send_fds(self._control, [json.dumps({"do": what, "id": self._count}).encode()], files)
        return answer

    def _receive(self) -> None:
        assert self._control is not None
        packet, descriptors, _, _ = socket.recv_fds(self._control, PIECE_BYTES, 2)
        said = json.loads(packet or "{}")
        if "id" in said:
            answer = self._answers.pop(said["id"])
            if not answer.done():
                answer.set_result((said, descriptors))
            else:
                for descriptor in descriptors:
                    os.close(descriptor)
        else:
            refused = f"{NO_BOX}: {said['refused']}; {HELP}" if "refused" in said else ""
            self._end(said.get("killed", ""), refused)

    def _end(self, cause: str, refused: str = "") -> None:
        """Kill everything in the box, and say so to whoever waits. cause: the limit that it is over."""
        if cause and not self.cause:
            self.cause = cause
            self._on_limit(cause)
        self.stop()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(RefusedError(refused or ENDED))
                answer.exception()  # perhaps nobody waits for it
        self._answers.clear()


async def _serve(listener: socket.socket, dial: Callable[[], Coroutine[Any, Any, Streams]]) -> asyncio.Server:
    """Carry bytes between whoever connects to a listener and what is dialled."""

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            other_reader, other_writer = await dial()
        except (OSError, RefusedError):
            writer.close()  # as refused as the other side
            return
        try:
            await asyncio.gather(_copy(reader, other_writer), _copy(other_reader, writer))
        finally:
            writer.close()
            other_writer.close()

    return await asyncio.start_server(carry, sock=listener)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while piece := await reader.read(PIECE_BYTES):
            writer.write(piece)
            await writer.drain()
        writer.write_eof()


def readable_paths() -> list[str]:
    """Return what can be read in a box, without what has the user's home, temporary files or the run's folder in it."""
    code = PROGRAM.parents[2].resolve()
    hidden = {Path(folder).resolve() for folder in (Path.home(), tempfile.gettempdir(), Path.cwd())} - {code}
    wanted = [Path(path).absolute() for path in (*SYSTEM, sys.prefix, sys.base_prefix, *filter(None, sys.path))]
    found = list[Path]()
    for path in sorted({*wanted, *(path.resolve() for path in wanted)}):
        is_private = any(private.is_relative_to(path.resolve()) for private in hidden)
        if path.exists() and not is_private and not any(map(path.is_relative_to, found)):
            found.append(path)
    return [str(path) for path in found]


@cache
def why_not() -> str:
    """Return why this machine has no box, or an empty text."""

    async def attempt() -> None:
        box = Box(Limits(60.0, 60.0, 1 << 30, 1 << 24, 1 << 16, 16))
        try:
            await box.start()
        finally:
            box.stop()

    try:
        asyncio.run(attempt())
    except RefusedError as error:
        return str(error)
    return ""

"""A box: what an environment or a model executes runs in it under limits, and sees nothing else of this machine.

Linux alone has what it needs, for ordinary users too: namespaces of users. Where the kernel refuses one, there is no
box, and an error that says so. Nothing in a box reaches a network, but for ports of this machine that are forwarded by
name (trainer/sandbox/network.py).
"""

import asyncio
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, Any, NamedTuple

from trainer.sandbox.init import HOME

CAUSES = ("timeout", "memory", "processes", "output")
"""Limits at which everything in a box is killed, by name."""
PROGRAM = Path(__file__).with_name("init.py")
SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/alternatives", "/etc/ca-certificates"),
    *("/etc/ld.so.cache", "/etc/localtime", "/etc/nsswitch.conf", "/etc/pki/tls", "/etc/ssl/certs"),
)
"""What can be read in a box, with Python and its modules."""
PREFIX = "slipway-box-"
LOOK_SECONDS = 0.05
READ_BYTES = 1 << 16
START_SECONDS = 60.0


NO_BOX = "this machine has no box for programs"
HELP = "its kernel must give ordinary users namespaces (Ubuntu 24.04: kernel.apparmor_restrict_unprivileged_userns=0)"


class RefusedError(Exception):
    """There can be no box on this machine. The message says why, and what helps."""


class Limits(NamedTuple):
    """Limits of a box. memory, disk and processes are of all its processes together.

    cpu: seconds of a command, with what it starts; wall: seconds of a command; output: bytes that it prints.
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
    """One box. Its folder `home` is empty at first; start and stop it."""

    def __init__(self, limits: Limits, killed: Counter[str] | None = None) -> None:
        """killed: counts what is killed, by cause."""
        self.limits, self.killed = limits, Counter[str]() if killed is None else killed
        self.folder: Path | None = None
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._answers = dict[int, "asyncio.Future[Answer]"]()
        self._count = 0

    @property
    def home(self) -> Path:
        """The folder of its commands, which they know as HOME. Never follow a link in it."""
        assert self.folder is not None
        return self.folder / "home"

    @property
    def temporary(self) -> Path:
        """Its /tmp."""
        assert self.folder is not None
        return self.folder / "tmp"

    async def start(self) -> None:
        """Raises RefusedError if the kernel has none for us."""
        _remove_abandoned()
        self.folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-")).resolve()
        for path in (self.home, self.temporary):
            path.mkdir()
        mine, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        limits = {"memory": self.limits.memory, "disk": self.limits.disk, "processes": self.limits.processes}
        settings = {"limits": limits, "readable": readable_paths(), "parent": os.getpid()}
        settings |= {"home": str(self.home), "temporary": str(self.temporary)}
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
        mine.setblocking(False)
        self._control, loop = mine, asyncio.get_running_loop()
        ready = self._answers[0] = loop.create_future()
        loop.add_reader(mine, self._receive)
        try:
            await asyncio.wait_for(ready, START_SECONDS)
        except BaseException:
            await self.stop()
            raise

    async def run(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        *,
        is_idle: Callable[[], bool] = bool,
    ) -> Ended:
        """Run a command to its end; what it leaves running stays until the box stops.

        is_idle: whether it waits for this machine, which its seconds do not count.
        """
        loop = asyncio.get_running_loop()
        with (
            tempfile.TemporaryFile(dir=self.folder) as given,
            tempfile.TemporaryFile(dir=self.folder) as stdout,
            tempfile.TemporaryFile(dir=self.folder) as stderr,
        ):
            given.write(stdin)
            given.seek(0)
            answer = self._begin(argv, env, self.limits.cpu, given, stdout, stderr)
            try:
                since = loop.time()
                while not answer.done():
                    await asyncio.wait({answer}, timeout=LOOK_SECONDS)
                    since = loop.time() if is_idle() else since
                    if self._prints_too_much(stdout, stderr):
                        self._kill("output")
                        break
                    if loop.time() - since > self.limits.wall:
                        self._kill("timeout")
                        break
                ended, _ = await answer
            except asyncio.CancelledError:
                self._kill("cancelled")
                raise
            texts = (os.pread(file.fileno(), self.limits.output, 0) for file in (stdout, stderr))
            cause = ended["cause"]
            if not cause and self._prints_too_much(stdout, stderr):  # and ended before it was killed
                cause = "output"
                self.killed[cause] += 1
            return Ended(ended["code"], cause, *texts)

    def begin(self, argv: Sequence[str], env: Mapping[str, str], log: str) -> None:
        """Start a command that goes on until the box stops. log: path in the box for what it prints."""
        with open(os.devnull, "r+b") as nothing:  # noqa: PTH123
            words = ["sh", "-c", 'exec "$@" >"$0" 2>&1', log, *argv]
            self._begin(words, env, math.inf, nothing, nothing, nothing)

    async def listener(self, port: int) -> socket.socket:
        """Return a socket that listens on a port of the box's own 127.0.0.1; 0: any."""
        return await self._ask("listen", port)

    async def dial(self, port: int) -> socket.socket:
        """Return a connection to a port of the box's own 127.0.0.1. Raises ConnectionError if nothing listens."""
        return await self._ask("dial", port)

    async def stop(self) -> None:
        """End everything in the box, and remove its folder."""
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control)
        await asyncio.to_thread(self.abandon)

    def abandon(self) -> None:
        """End everything in the box, and remove its folder, where there is no event loop any more."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _begin(
        self, argv: Sequence[str], env: Mapping[str, str] | None, cpu: float, *files: IO[bytes]
    ) -> "asyncio.Future[Answer]":
        own = {"PATH": search_path(), "HOME": HOME, "TMPDIR": "/tmp", "LANG": "C.UTF-8"}  # noqa: S108
        how = {"argv": list(argv), "env": own | dict(env or {}), "cpu": cpu}
        with tempfile.TemporaryFile(dir=self.folder) as payload:
            payload.write(json.dumps(how).encode())
            payload.seek(0)
            return self._send({"do": "run"}, [payload, *files])

    async def _ask(self, what: str, port: int) -> socket.socket:
        answer, descriptors = await asyncio.wait_for(self._send({"do": what, "port": port}, []), START_SECONDS)
        if not descriptors:
            raise ConnectionError(f"port {port} of the box: {answer['error']}")
        return socket.socket(fileno=descriptors[0])

    def _prints_too_much(self, *files: IO[bytes]) -> bool:
        return any(os.fstat(file.fileno()).st_size > self.limits.output for file in files)

    def _kill(self, cause: str) -> None:
        if self._control is not None:
            self._control.send(json.dumps({"do": "kill", "cause": cause}).encode())

    def _send(self, request: dict[str, Any], files: Sequence[IO[bytes]]) -> "asyncio.Future[Answer]":
        if self._control is None:
            raise RefusedError("the box has ended")
        self._count += 1
        answer = self._answers[self._count] = asyncio.get_running_loop().create_future()
        packet = json.dumps(request | {"id": self._count}).encode()
        socket.send_fds(self._control, [packet], [file.fileno() for file in files])
        return answer

    def _receive(self) -> None:
        assert self._control is not None
        packet, descriptors, _, _ = socket.recv_fds(self._control, READ_BYTES, 1)
        said = json.loads(packet or '{"refused": "its first process has died"}')
        if "killed" in said:
            self.killed.update({said["killed"]} & {*CAUSES})
        elif "refused" in said:
            asyncio.get_running_loop().remove_reader(self._control)
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(RefusedError(f"{NO_BOX}: {said['refused']}; {HELP}"))
        else:
            answer = self._answers.pop(said["id"])
            if not answer.done():
                answer.set_result((said, descriptors))


Answer = tuple[dict[str, Any], list[int]]
"""What the first process says, and descriptors."""


def _remove_abandoned() -> None:
    """Remove the folders of boxes whose process was killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        number = folder.name.removeprefix(PREFIX).partition("-")[0]
        if number.isdigit() and not Path("/proc", number).exists():
            shutil.rmtree(folder, ignore_errors=True)  # as far as it is ours, and another process is not faster


def search_path() -> str:
    """Return the folders of programs, this Python's first."""
    return os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))


def readable_paths() -> list[str]:
    """Return what can be read in a box, without what has the user's home or the folder of temporary files in it."""
    hidden = (Path.home().resolve(), Path(tempfile.gettempdir()).resolve())
    wanted = [Path(path) for path in (*SYSTEM, sys.prefix, sys.base_prefix, *filter(None, sys.path))]
    found = list[Path]()
    for path in sorted({path.absolute() for path in wanted}):
        is_private = any(private.is_relative_to(path.resolve()) for private in hidden)
        if path.exists() and not is_private and not any(map(path.is_relative_to, found)):
            found.append(path)
    return [str(path) for path in found]


@cache
def why_not() -> str:
    """Return why this machine has no box, or an empty text."""

    async def attempt() -> str:
        box = Box(Limits(60.0, 60.0, 1 << 30, 1 << 24, 1 << 16, 16))
        try:
            await box.start()
            ended = await box.run(["true"])
        except RefusedError as error:
            return str(error)
        finally:
            await box.stop()
        return "" if ended.code == 0 else f"{NO_BOX}: the command true ends with {ended.code}"

    return asyncio.run(attempt())

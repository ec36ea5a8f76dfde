"""The SSH connection to one worker, and what it takes to speak with the agent there."""

from __future__ import annotations

import json
import math
import shlex
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from controller.ssh.agent_bundle import Bundle
from controller.ssh.connect import Access, Dialer, Kind, WorkerError

if TYPE_CHECKING:
    from paramiko import Channel, Transport

SECONDS = {
    "install_venv": 1800.0,
    "run_setup": 3600.0,
    "install_code": 600.0,
    "probe_devices": 300.0,
    "start": 120.0,
    "stop": 600.0,
}
"""How long a command may take; the others have 60 s. A worker that is gone is noticed much earlier."""
CHUNK = 1 << 16
LARGEST_ANSWER = 64 << 20
BY_SIGNAL = 128
"""Stands for the exit code of what a signal has ended."""
PLACE = """
import hashlib, os, sys
name, sha256 = sys.argv[1:]
content = sys.stdin.buffer.read()
if hashlib.sha256(content).hexdigest() != sha256:
    sys.exit("the agent arrived incomplete")
folder = os.path.expanduser("~/.slipway")
os.makedirs(folder, mode=0o700, exist_ok=True)
draft = os.path.join(folder, f".{name}.{os.getpid()}")
with open(draft, "wb") as file:
    file.write(content)
os.replace(draft, os.path.join(folder, name))
"""
"""Run on a worker to place a file there whole: what breaks off in transit does not become the agent."""


@dataclass(frozen=True)
class Ran:
    """What a shell command printed, stderr included, and its exit code."""

    exit_code: int
    output: str


class Link:
    """One connection, made when it is needed, kept, and made anew when it has broken. Threads may share it."""

    def __init__(self, access: Access, worker: int, dialer: Dialer, agent: Bundle) -> None:
        self._access, self._worker, self._dialer, self._agent = access, worker, dialer, agent
        self._connection: Transport | None = None
        self._connecting, self._probing = threading.Lock(), threading.Lock()
        self._closed = False

    def call(self, command: str, payload: dict[str, Any]) -> dict[str, Any]:
        """Run an agent command to its end.

        Raises:
            WorkerError: of any kind.
        """
        output = bytearray()
        for chunk in self._agent_says(command, payload, SECONDS.get(command, 60.0)):
            output += self._bounded(command, chunk, len(output))
        return self._parse(command, output)

    def stream(self, command: str, payload: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Run an agent command that answers line by line, for as long as it likes.

        Raises:
            WorkerError: of any kind, also after some lines.
        """
        rest = b""
        for chunk in self._agent_says(command, payload, math.inf):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                yield self._parse(command, line)
            self._bounded(command, b"", len(rest))

    def run(self, shell: str, stdin: bytes = b"", seconds: float = math.inf) -> Ran:
        """Run a command of the user's shell, as it is.

        Raises:
            WorkerError: of any kind but agent.
        """
        with self._running(shell, stdin, combine=True) as channel:
            output = b"".join(self.chunks(channel, seconds))
            return Ran(self.exit_code(channel), output.decode(errors="replace"))

    def follow(self, shell: str, out: Callable[[bytes], object], err: Callable[[bytes], object]) -> int:
        """Run a command of the user's shell and pass on what it prints as it comes; its exit code.

        Raises:
            WorkerError: of any kind but agent.
        """
        with self._running(shell, b"") as channel:
            aside = threading.Thread(target=_drain_stderr, args=(channel, err), daemon=True)
            aside.start()
            for chunk in self.chunks(channel):
                out(chunk)
            code = self.exit_code(channel)
            aside.join()
            return code

    def close(self) -> None:
        """For good. Who is waiting for an answer gets a WorkerError."""
        self._closed = True
        if self._connection is not None:
            self._connection.close()

    @property
    def closed(self) -> bool:
        return self._closed

    # The agent

    def _agent_says(self, command: str, payload: dict[str, Any], seconds: float) -> Iterator[bytes]:
        """What the agent prints. It is placed on the worker first, if it turns out not to be there."""
        for placed in (False, True):
            said = False
            shell = f"python3 ~/.slipway/{self._agent.name} {command}"
            with self._running(shell, json.dumps(payload).encode()) as channel:
                for chunk in self.chunks(channel, seconds):
                    said = True
                    yield chunk
                code = self.exit_code(channel)
                words = channel.recv_stderr(CHUNK).decode(errors="replace") if code else ""
            if said and code in (0, 1):
                return
            if placed or code != 2:  # with which Python says that there is no such file
                raise self._error("agent", f"`{command}` ended with exit code {code}", words)
            self._place_agent()

    def _place_agent(self) -> None:
        shell = f"umask 077; exec python3 -c {shlex.quote(PLACE)} {self._agent.name} {self._agent.sha256}"
        ran = self.run(shell, self._agent.content, seconds=60)
        if ran.exit_code:
            raise self._error("agent", f"the agent could not be placed: {ran.output.strip()[-300:]}", ran.output)

    def _bounded(self, command: str, chunk: bytes, before: int) -> bytes:
        """The chunk, unless a worker that says no end of it would fill our memory."""
        if before + len(chunk) > LARGEST_ANSWER:
            raise self._error("agent", f"`{command}` answered more than {LARGEST_ANSWER >> 20} MiB")
        return chunk

    def _parse(self, command: str, line: bytes | bytearray) -> dict[str, Any]:
        try:
            answer = dict(json.loads(line))
        except (ValueError, TypeError, RecursionError):
            raise self._error("agent", f"`{command}` did not answer in JSON", line.decode(errors="replace")) from None
        if "error" in answer and "detail" in answer:
            raise self._error("agent", answer["error"], answer["detail"])
        return answer

    # The connection

    def _error(self, kind: Kind, words: str, detail: str = "") -> WorkerError:
        return WorkerError(self._worker, self._access.addresses[self._worker], kind, words, detail)

    def _transport(self) -> Transport:
        with self._connecting:
            transport = self._connection
            if not self._closed and (transport is None or not transport.is_active()):
                transport = self._connection = self._dialer.connect(self._worker)
            if self._closed or transport is None:
                self.close()
                raise self._error("dropped", "the connection was closed on this side")
            return transport

    @contextmanager
    def channel(self, port: int | None = None) -> Iterator[Channel]:
        """A channel as paramiko has it: for a session, or to a port that something there listens on.

        Raises:
            WorkerError: of any kind but agent, also for what goes wrong on the channel inside the block.
        """
        from paramiko import ChannelException, SSHException

        transport, seconds = self._transport(), self._access.connect_seconds
        try:
            if port is None:
                channel = transport.open_session(timeout=seconds)
            else:
                ends = ("127.0.0.1", port), ("127.0.0.1", 0)
                channel = transport.open_channel("direct-tcpip", *ends, timeout=seconds)
        except ChannelException as error:  # the connection itself is fine
            what = "a session" if port is None else f"port {port} there"
            raise self._error("refused", f"no way to {what}: {error.text}") from error
        except (SSHException, OSError, EOFError) as error:
            transport.close()  # it may be frozen; the next try shall have a new one
            raise self._error("dropped", f"the connection is dead: {error}") from error
        try:
            yield channel
        except (SSHException, OSError, EOFError) as error:
            raise self._error("dropped", f"the connection broke off: {error or type(error).__name__}") from error
        finally:
            channel.close()

    @contextmanager
    def _running(self, shell: str, stdin: bytes, combine: bool = False) -> Iterator[Channel]:
        """A command that has been started and given its stdin."""
        with self.channel() as channel:
            channel.set_combine_stderr(combine)
            channel.exec_command(shell)
            try:
                channel.sendall(stdin)
                channel.shutdown_write()
            except OSError:
                if not channel.get_transport().is_active():
                    raise  # else the command has ended without reading: its exit code says why
            yield channel

    def chunks(self, channel: Channel, seconds: float = math.inf) -> Iterator[bytes]:
        """What comes over a channel until the other side has said all; a connection that is dead is noticed.

        Raises:
            WorkerError: timeout or dropped.
        """
        end = time.monotonic() + seconds
        while True:
            channel.settimeout(min(self._access.silence_seconds, max(0.01, end - time.monotonic())))
            try:
                data = channel.recv(CHUNK)
            except TimeoutError:
                if time.monotonic() >= end:
                    words = f"no end after {seconds:g} s; it may still go on there"
                    raise self._error("timeout", words) from None
                self.probe(channel.get_transport())
                continue
            if not data:
                return
            yield data

    def exit_code(self, channel: Channel) -> int:
        """Of the command of a channel, which has said all.

        Raises:
            WorkerError: dropped.
        """
        while not channel.status_event.wait(self._access.silence_seconds):
            self.probe(channel.get_transport())
        code = channel.recv_exit_status()
        if code < 0:  # the connection has gone, or a signal ended the command: paramiko does not say
            self.probe(channel.get_transport())
            return BY_SIGNAL
        return code

    def probe(self, transport: Transport) -> None:
        """Find out whether the other side still answers: a frozen one does not, and paramiko would wait for ever.

        Raises:
            WorkerError: dropped; the connection is closed.
        """
        seconds = self._access.silence_seconds
        with self._probing:  # paramiko keeps one answer per connection
            asking = threading.Thread(target=transport.global_request, args=("keepalive@openssh.com",), daemon=True)
            asking.start()
            asking.join(seconds)
            silent, broken = asking.is_alive(), not transport.is_active()
            if silent or broken:
                transport.close()
                words = f"it has not answered for {2 * seconds:g} s" if silent else "the connection broke off"
                raise self._error("dropped", words)


def _drain_stderr(channel: Channel, write: Callable[[bytes], object]) -> None:
    while data := channel.recv_stderr(CHUNK):
        write(data)

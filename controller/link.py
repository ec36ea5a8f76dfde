"""The SSH connection to one worker, and what it takes to speak with the agent there.

The only file that imports fabric and paramiko, and only when a connection is made, for that takes 0.2 s.
"""

from __future__ import annotations

import json
import logging
import math
import shlex
import threading
import time
from base64 import b64decode
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from controller.bundle import Bundle
from controller.errors import SlipwayError
from controller.keys import HostKeys

if TYPE_CHECKING:
    from fabric import Connection
    from paramiko import Channel, PKey, Transport

Kind = Literal["refused", "timeout", "auth", "host_key", "dropped", "agent"]
SECONDS = {"install_venv": 1800.0, "install_code": 600.0, "probe_devices": 300.0, "start": 120.0, "stop": 600.0}
"""How long a command may take; the others have 60 s. A worker that is gone is noticed much earlier."""
CHUNK = 1 << 16
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


class WorkerError(SlipwayError):
    """One worker could not be reached, or could not do what it was asked: a value wherever several are asked.

    `kind`: refused (nothing listens, or not yet), timeout, auth (it does not know our key), host_key (it is not who
    it should be), dropped (the connection broke off), agent (the command failed there; `detail` says more).
    """

    def __init__(self, worker: int, address: str, kind: Kind, words: str, detail: str = "") -> None:
        super().__init__(f"worker {worker} ({address}): {words}")
        self.worker, self.address, self.kind, self.words, self.detail = worker, address, kind, words, detail


@dataclass(frozen=True)
class Ran:
    """What a shell command printed, stderr included, and its exit code."""

    exit_code: int
    output: str


@dataclass(frozen=True)
class Access:
    """How the workers of a pod are reached.

    Attributes:
        pod: its name, for messages.
        user: who we are there.
        key: file of the private key.
        addresses: of the workers, in their order.
        host_keys: reads the keys that Google vouches for now, per worker: lines of `TYPE KEY`.
        ssh_config: an OpenSSH config whose HostName and Port count; by default no file does, not even the user's.
        connect_seconds: for a connection to be made.
        warm_up_seconds: how long a fresh worker may refuse.
        silence_seconds: after this long without a word we ask whether the other side lives, and wait as long again.
    """

    pod: str
    user: str
    key: Path
    addresses: Sequence[str]
    host_keys: Callable[[], Sequence[str]]
    ssh_config: Path | None = None
    connect_seconds: float = 15.0
    warm_up_seconds: float = 300.0
    silence_seconds: float = 15.0


class Link:
    """One connection, made when it is needed, kept, and made anew when it has broken. Threads may share it."""

    def __init__(self, access: Access, worker: int, host_keys: HostKeys, agent: Bundle) -> None:
        self._access, self._worker, self._host_keys, self._agent = access, worker, host_keys, agent
        self._connection: Connection | None = None
        self._connecting, self._probing = threading.Lock(), threading.Lock()
        self._closed = False

    def call(self, command: str, payload: dict[str, Any]) -> dict[str, Any]:
        """Run an agent command to its end.

        Raises:
            WorkerError: of any kind.
        """
        output = b"".join(self._agent_says(command, payload, SECONDS.get(command, 60.0)))
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

    def run(self, shell: str, stdin: bytes = b"", seconds: float = math.inf) -> Ran:
        """Run a command of the user's shell, as it is.

        Raises:
            WorkerError: of any kind but agent.
        """
        with self._channel(shell, stdin, combine=True) as channel:
            output = b"".join(self._chunks(channel, seconds))
            return Ran(self._exit_code(channel), output.decode(errors="replace"))

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
            with self._channel(shell, json.dumps(payload).encode()) as channel:
                for chunk in self._chunks(channel, seconds):
                    said = True
                    yield chunk
                code = self._exit_code(channel)
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

    def _parse(self, command: str, line: bytes) -> dict[str, Any]:
        try:
            answer = json.loads(line)
        except ValueError:
            raise self._error("agent", f"`{command}` did not answer in JSON", line.decode(errors="replace")) from None
        if "error" in answer and "detail" in answer:
            raise self._error("agent", answer["error"], answer["detail"])
        return answer

    # The connection

    def _error(self, kind: Kind, words: str, detail: str = "") -> WorkerError:
        return WorkerError(self._worker, self._access.addresses[self._worker], kind, words, detail)

    def _transport(self) -> Transport:
        with self._connecting:
            transport = self._connection.transport if self._connection else None
            if not self._closed and (transport is None or not transport.is_active()):
                self._connection = self._connect()
                transport = self._connection.transport
            if self._closed or transport is None:
                self.close()
                raise self._error("dropped", "the connection was closed on this side")
            return transport

    def _connect(self) -> Connection:
        """Connect with the host keys that are known, and if they do not match with those that are published now."""
        lines = self._host_keys.of(self._worker)
        try:
            return self._open(lines)
        except WorkerError as error:
            now = self._host_keys.of(self._worker, refused=lines) if error.kind == "host_key" else lines
            if now == lines:
                raise
        return self._open(now)

    def _open(self, host_key_lines: str) -> Connection:
        import paramiko
        from fabric import Config, Connection

        if not host_key_lines:
            raise self._error("refused", "it has not published its SSH host keys yet")
        _keep_quiet()
        access, address = self._access, self._access.addresses[self._worker]
        config = paramiko.SSHConfig.from_path(str(access.ssh_config)) if access.ssh_config else paramiko.SSHConfig()
        seconds = access.connect_seconds
        limits = {"timeout": seconds, "banner_timeout": seconds, "auth_timeout": seconds, "channel_timeout": seconds}
        own = {"pkey": _private_key(access.key), "look_for_keys": False, "allow_agent": False}
        defaults = Config(ssh_config=config, lazy=True)
        connection = Connection(address, user=access.user, config=defaults, connect_kwargs={**own, **limits})
        client: Any = connection.client
        client.set_missing_host_key_policy(paramiko.RejectPolicy())
        name = str(connection.host) if connection.port == 22 else f"[{connection.host}]:{connection.port}"
        for kind, key in _host_keys(host_key_lines):
            client.get_host_keys().add(name, kind, key)
        with self._told_apart():
            connection.open()
        return connection

    @contextmanager
    def _told_apart(self) -> Iterator[None]:
        """Failures to connect, by what can be done about them."""
        from paramiko import AuthenticationException, BadHostKeyException, SSHException

        try:
            yield
        except BadHostKeyException as error:
            words = (
                f"its SSH host key ({error.key.get_name()} {error.key.fingerprint}) is not the one that worker "
                f"{self._worker} of {self._access.pod} has published ({error.expected_key.fingerprint}). If its VM was "
                "just replaced, run `up` again in a minute; else something else answers there: take the pod down"
            )
            raise self._error("host_key", words) from error
        except AuthenticationException as error:
            words = f"it does not let {self._access.user} in with our key (yet?): {error}"
            raise self._error("auth", words) from error
        except TimeoutError as error:
            words = f"no connection within {self._access.connect_seconds:g} s; is there a firewall rule for tcp:22?"
            raise self._error("timeout", words) from error
        except (OSError, SSHException, EOFError) as error:
            raise self._error("refused", f"no SSH: {error or type(error).__name__}") from error

    @contextmanager
    def _channel(self, shell: str, stdin: bytes, combine: bool = False) -> Iterator[Channel]:
        """A command that has been started and given its stdin."""
        from paramiko import SSHException

        transport = self._transport()
        try:
            channel = transport.open_session(timeout=self._access.connect_seconds)
        except (SSHException, OSError, EOFError) as error:
            transport.close()  # it may be frozen; the next try shall have a new one
            raise self._error("dropped", f"the connection is dead: {error}") from error
        try:
            channel.set_combine_stderr(combine)
            channel.exec_command(shell)
            try:
                channel.sendall(stdin)
                channel.shutdown_write()
            except OSError:
                if not transport.is_active():
                    raise  # else the command has ended without reading: its exit code says why
            yield channel
        except (SSHException, OSError, EOFError) as error:
            raise self._error("dropped", f"the connection broke off: {error or type(error).__name__}") from error
        finally:
            channel.close()

    def _chunks(self, channel: Channel, seconds: float) -> Iterator[bytes]:
        end = time.monotonic() + seconds
        while True:
            channel.settimeout(min(self._access.silence_seconds, max(0.01, end - time.monotonic())))
            try:
                data = channel.recv(CHUNK)
            except TimeoutError:
                if time.monotonic() >= end:
                    words = f"no end after {seconds:g} s; it may still go on there"
                    raise self._error("timeout", words) from None
                self._probe(channel.get_transport())
                continue
            if not data:
                return
            yield data

    def _exit_code(self, channel: Channel) -> int:
        while not channel.status_event.wait(self._access.silence_seconds):
            self._probe(channel.get_transport())
        code = channel.recv_exit_status()
        if code < 0:
            raise self._error("dropped", "the connection broke off")
        return code

    def _probe(self, transport: Transport) -> None:
        """Find out whether the other side still answers: a frozen one does not, and paramiko would wait for ever.

        Raises:
            WorkerError: dropped; the connection is closed.
        """
        seconds = self._access.silence_seconds
        with self._probing:  # paramiko keeps one answer per connection
            asking = threading.Thread(target=transport.global_request, args=("keepalive@openssh.com",), daemon=True)
            asking.start()
            asking.join(seconds)
            if asking.is_alive() or not transport.is_active():
                transport.close()
                raise self._error("dropped", f"it has not answered for {2 * seconds:g} s")


def _private_key(path: Path) -> PKey:
    from paramiko import Ed25519Key

    return Ed25519Key.from_private_key_file(str(path))


def _host_keys(lines: str) -> list[tuple[str, PKey]]:
    """Ed25519 first: paramiko asks the server for the kind of key that comes first."""
    from paramiko import PKey

    keys = [line.split()[:2] for line in lines.splitlines()]
    known = [(kind, text) for kind, text in keys if kind.startswith(("ssh-ed25519", "ecdsa-", "ssh-rsa"))]
    known.sort(key=lambda pair: pair[0] != "ssh-ed25519")
    return [(kind, PKey.from_type_string(kind, b64decode(text))) for kind, text in known]


def _keep_quiet() -> None:
    """paramiko logs with tracebacks what it also raises; without a handler that would reach the terminal."""
    logger = logging.getLogger("paramiko")
    if not logger.handlers:
        logger.addHandler(logging.NullHandler())

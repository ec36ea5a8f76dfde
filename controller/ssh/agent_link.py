"""The agent on a worker: its package in one zip file, and its protocol, over whatever carries its input and output."""

from __future__ import annotations

import hashlib
import io
import math
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

import controller.agent
from conf.strict_json import loads
from controller.agent import protocol
from controller.agent.fs import format_problem
from controller.core.errors import SlipwayError
from controller.core.json_documents import type_problem

ConnectionFailure = Literal["refused", "timeout", "auth", "denied", "host_key", "dropped", "agent"]


class WorkerError(SlipwayError):
    """A worker is unreachable or failed a command. Calls to several workers return it as a value.

    `kind`: refused (nothing listens, or not yet), timeout, auth (the worker rejects our key), denied (Google or a
    gateway denies access), host_key (the host key does not match), dropped (the connection was lost), agent (the
    command failed there; see `detail`).
    """

    def __init__(self, worker: int, address: str, kind: ConnectionFailure, message: str, detail: str = "") -> None:
        super().__init__(f"worker {worker} ({address}): {message}")
        self.worker, self.address, self.kind, self.message, self.detail = worker, address, kind, message, detail


@dataclass(frozen=True)
class ConnectionParams:
    """Parameters of the SSH connections to the workers of a pod.

    Attributes:
        pod: name of the pod, for messages.
        user: user name on the workers.
        key: file of the private key.
        addresses: addresses of the workers, in worker order.
        host_keys: reads the keys that Google publishes now, per worker: lines of `TYPE KEY`.
        ssh_config: OpenSSH config to read instead of ~/.ssh/config and /etc/ssh/ssh_config.
        tunnel: opens a socket-like tunnel to port 22 of a worker, given a timeout in seconds; None: connect to the
            worker's address.
        route: name of this route, for messages.
        known_hosts_file: file that stores the host keys of this incarnation; None: they are not stored.
        incarnation: uid of the pod; stored host keys of another incarnation are dropped.
        trust_on_first_use: accept the first host key that a worker shows; by default only one that Google publishes.
        follow_host_keys: accept a changed host key that Google publishes, whether a repair was seen or not.
        auth_hint: permissions that the user may lack if a worker rejects the key.
        connect_seconds: timeout of a connection attempt.
        warm_up_seconds: how long a new worker may refuse connections.
        silence_seconds: probe a connection after this long without data, and drop it after as long again.
    """

    pod: str
    user: str
    key: Path
    addresses: Sequence[str]
    host_keys: Callable[[], Sequence[str]]
    ssh_config: Path | None = None
    tunnel: Callable[[int, float], Any] | None = None
    route: str = "its address"
    known_hosts_file: Path | None = None
    incarnation: str = ""
    trust_on_first_use: bool = False
    follow_host_keys: bool = False
    auth_hint: str = ""
    connect_seconds: float = 15.0
    warm_up_seconds: float = 300.0
    silence_seconds: float = 15.0


COMMAND_TIMEOUTS = {
    "install_venv": 1800.0,
    "run_setup": 3600.0,
    "install_code": 600.0,
    "probe_devices": 300.0,
    "check_health": 300.0,
    "start": 120.0,
    "stop": 600.0,
}
"""Timeouts of commands in seconds; the others have 60. A dead worker is detected much earlier."""
MAX_ANSWER_BYTES = 64 << 20
MAX_LINE_BYTES = 16 << 20
"""Bytes of a line of a stream; a line of metrics.jsonl has up to 1 MiB, which JSON makes 6 at most."""
MAX_WORDS = 20_000
"""Characters of an error of the agent that are kept, and of its details, which end in what matters."""
LATE_SECONDS = 5.0
"""After the time limit of a command, what has arrived by then is read for so long: we may have been stopped."""


@dataclass(frozen=True)
class AgentBundle:
    """Zip file of the agent. `name` is its file name on a worker and contains the hash of `content`."""

    name: str
    content: bytes

    def shell(self, command: str) -> str:
        """Return the shell command that runs a command of the agent; exit code 2 means that the agent is missing.

        Python starts faster from what the zip file has unpacked. `sh`, because the user's shell is unknown.
        """
        folder = f"~/.slipway/{self.name.removesuffix('.pyz')}"
        unpacked = f'test -e "$a/__main__.py" && exec python3 "$a/__main__.py" {command}'
        return f"sh -c 'a={folder}; {unpacked}; exec python3 \"$a.pyz\" {command}'"

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()


def build_bundle() -> AgentBundle:
    """Pack the agent of this installation. The same files give the same bytes on every host."""
    package = Path(controller.agent.__file__).parent
    files = {f"slipway_agent/{p.relative_to(package).as_posix()}": p.read_bytes() for p in package.rglob("*.py")}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in sorted({**files, "__main__.py": files["slipway_agent/__main__.py"]}.items()):
            archive.writestr(zipfile.ZipInfo(name), content)
    content = buffer.getvalue()
    return AgentBundle(f"agent-{hashlib.sha256(content).hexdigest()[:12]}.pyz", content)


class AgentLink(ABC):
    """Calls the agent of one worker. Subclasses start its process and pass on what it says. Thread-safe."""

    def __init__(self, worker: int, address: str) -> None:
        self._number, self._address = worker, address

    def call(self, command: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Run an agent command to completion and return its answer. Raises WorkerError of any kind."""
        output = bytearray()
        payload = {**payload, "worker": self._number}
        for chunk in self._agent_output(command, payload, COMMAND_TIMEOUTS.get(command, 60.0)):
            output += self._bounded(command, chunk, len(output))
        return self._parse(command, output)

    def stream(self, command: str, payload: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Run an agent command that answers line by line, without a time limit.

        Raises WorkerError of any kind, possibly after some lines.
        """
        begun: list[bytes] = []  # joined once, so that the time grows with the length of a line and not faster
        size = 0
        for chunk in self._agent_output(command, {**payload, "worker": self._number}, math.inf):
            *lines, rest = chunk.split(b"\n")
            for line in lines:
                yield self._parse(command, b"".join((*begun, line)))
                begun, size = [], 0
            begun.append(rest)
            size += len(rest)
            if size > MAX_LINE_BYTES:
                raise self._error("agent", f"`{command}` sent a line of more than {MAX_LINE_BYTES >> 20} MiB")

    @abstractmethod
    def follow(self, shell: str, out: Callable[[bytes], object], err: Callable[[bytes], object]) -> int:
        """Run a shell command, pass its output on as it arrives and return its exit code.

        Raises WorkerError of any kind except agent.
        """

    @abstractmethod
    def close(self) -> None:
        """Close permanently. Pending calls raise WorkerError."""

    @property
    @abstractmethod
    def closed(self) -> bool: ...

    @abstractmethod
    def _agent_output(self, command: str, payload: Mapping[str, Any], seconds: float) -> Iterator[bytes]:
        """Yield the agent's output, for at most so many seconds. Raises WorkerError of any kind."""

    def _bounded(self, command: str, chunk: bytes, before: int) -> bytes:
        """Return the chunk, or raise WorkerError if the whole answer would exceed MAX_ANSWER_BYTES."""
        if before + len(chunk) > MAX_ANSWER_BYTES:
            raise self._error("agent", f"`{command}` answered more than {MAX_ANSWER_BYTES >> 20} MiB")
        return chunk

    def _parse(self, command: str, line: bytes | bytearray) -> dict[str, Any]:
        """Return an answer. Raises WorkerError if it is none: programs can replace the agent on their workers."""
        try:
            body = dict(loads(line))
        except (ValueError, TypeError, RecursionError):
            said = line[:MAX_WORDS].decode(errors="replace")
            raise self._error("agent", f"`{command}` did not return JSON", said) from None
        if problem := format_problem(body, f"the answer to `{command}`"):
            raise self._error("agent", problem)
        answer = {key: value for key, value in body.items() if key != "format"}
        if "error" in answer and "detail" in answer:
            words, detail = str(answer["error"])[:MAX_WORDS], str(answer["detail"])[-MAX_WORDS:]
            raise self._error("agent", _encodable(words), _encodable(detail))
        if problem := type_problem(answer, answer_types().get(command, dict), "the answer"):
            raise self._error("agent", f"`{command}` answered with something else than Slipway's agent does: {problem}")
        return {key: _encodable(value) for key, value in answer.items()} if b"\\u" in line else answer

    def _error(self, kind: ConnectionFailure, message: str, detail: str = "") -> WorkerError:
        return WorkerError(self._number, self._address, kind, message, detail)


def late_after(end: float) -> Callable[[float], bool]:
    """Return a function that says whether a command that goes on talking has had its time, and LATE_SECONDS more."""
    first_late: list[float] = []

    def is_too_late(now: float) -> bool:
        if now >= end and not first_late:
            first_late.append(now)
        return bool(first_late) and now - first_late[0] > LATE_SECONDS

    return is_too_late


@cache
def answer_types() -> Mapping[str, Any]:
    """Return the type of each command's answer, or of a line of it."""
    commands = [value for value in vars(protocol).values() if isinstance(value, protocol.Command)]
    return {str(command): get_args(vars(command)["__orig_class__"])[1] for command in commands}


def _encodable(value: Any) -> Any:
    """Return JSON without halves of surrogate pairs, which JSON can write and no file can hold."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {_encodable(key): _encodable(inner) for key, inner in value.items()}
    return [_encodable(inner) for inner in value] if isinstance(value, list) else value

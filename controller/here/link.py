"""The agent of `cloud=here`: the same commands as on a pod's workers, each a process of this machine."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, Full, Queue
from typing import IO, Any

from controller.agent.formats import dump
from controller.core.errors import ConfigError
from controller.ssh.agent_link import AgentBundle, AgentLink, late_after

CHUNK = 1 << 16
QUEUED_CHUNKS = 16
"""Chunks of a command's output that wait to be processed; a command that prints faster waits, as it does over SSH."""
HERE = "this machine"
"""Stands where messages name a worker's address."""


class LocalLink(AgentLink):
    """Runs each command of the agent in a process group of its own, which Ctrl-C in a terminal does not reach."""

    def __init__(self, root: Path, python: Sequence[str], environment: Mapping[str, str], agent: AgentBundle) -> None:
        """Prepare the link; the agent is written on first use.

        Args:
            root: the agent's folder.
            python: command of the interpreter that runs the agent.
            environment: variables of the agent and, through it, of programs.
            agent: the agent's code.
        """
        super().__init__(0, HERE)
        self._root, self._python, self._environment, self._agent = root, [*python], dict(environment), agent
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._closed = False

    def follow(self, shell: str, out: Callable[[bytes], object], err: Callable[[bytes], object]) -> int:
        with self._process(["/bin/sh", "-c", shell]) as process:
            _close_stdin(process)
            readers = [_start_reader(process.stdout, out), _start_reader(process.stderr, err)]
            for reader in readers:
                reader.join()
            code = process.wait()
        return code if code >= 0 else 128 - code

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for process in self._running:
                _kill(process)

    @property
    def closed(self) -> bool:
        return self._closed

    def _agent_output(self, command: str, payload: Mapping[str, Any], seconds: float) -> Iterator[bytes]:
        archive = self._install_agent()
        unpacked = archive.with_suffix("") / "__main__.py"  # Python starts faster from there
        program = unpacked if unpacked.exists() else archive
        with self._process([*self._python, str(program), command]) as process:
            assert process.stdin is not None
            chunks: Queue[bytes | None] = Queue(QUEUED_CHUNKS)
            said: list[bytes] = []

            def put(chunk: bytes | None) -> None:
                """Wait for room; drop the chunk if the command was ended, since nobody takes it any more."""
                waiting = True
                while waiting and process in self._running:
                    with suppress(Full):
                        chunks.put(chunk, timeout=1.0)
                        waiting = False

            _start_reader(process.stdout, put, lambda: put(None))
            errors = _start_reader(process.stderr, said.append)
            with suppress(BrokenPipeError):  # it ended without reading; its exit code tells why
                process.stdin.write(dump(payload))
                process.stdin.close()
            told = False
            for chunk in self._timed(chunks, command, seconds):
                told = True
                yield chunk
            code = process.wait()
            if self._closed:
                raise self._error("dropped", "the connection was closed on this side")
            if not told or code not in (0, 1):
                errors.join()
                message = b"".join(said).decode(errors="replace")
                raise self._error("agent", f"`{command}` exited with code {code}", message)

    def _timed(self, chunks: "Queue[bytes | None]", command: str, seconds: float) -> Iterator[bytes]:
        end = time.monotonic() + seconds
        message, is_too_late = f"`{command}` has not finished after {seconds:g} s", late_after(end)
        while True:
            if is_too_late(time.monotonic()):
                raise self._error("timeout", message)
            try:
                chunk = chunks.get(timeout=min(3600.0, max(0.01, end - time.monotonic())))
            except Empty:
                if time.monotonic() >= end:
                    raise self._error("timeout", message) from None
                continue
            if chunk is None:
                return
            yield chunk

    @contextmanager
    def _process(self, command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
        """Start a process, and end it with the block."""
        pipe = subprocess.PIPE
        with self._lock:
            if self._closed:
                raise self._error("dropped", "the connection was closed on this side")
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=pipe,
                cwd=self._root, env=self._environment, start_new_session=True,
            )  # fmt: skip
            self._running.add(process)
        try:
            yield process
        finally:
            with self._lock:
                self._running.discard(process)
                _kill(process)
            process.wait()
            _close_stdin(process)

    def _install_agent(self) -> Path:
        archive = self._root / self._agent.name
        if not archive.is_file():
            draft = self._root / f".{self._agent.name}.{os.getpid()}-{threading.get_ident()}"
            try:
                self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
                draft.write_bytes(self._agent.content)
                draft.replace(archive)
            except OSError as error:
                raise ConfigError(f"run.state_dir: cannot write {archive}: {error.strerror}") from None
        return archive


def _start_reader(
    pipe: IO[bytes] | None, write: Callable[[bytes], object], end: Callable[[], object] = lambda: None
) -> threading.Thread:
    """Pass on what arrives in a pipe, in a thread; at its end close it and call `end`."""
    assert pipe is not None

    def read() -> None:
        with pipe:
            while data := os.read(pipe.fileno(), CHUNK):
                write(data)
        end()

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread


def _close_stdin(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.close()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process that has not ended; not its group, as `start` leaves a program there that must go on."""
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)

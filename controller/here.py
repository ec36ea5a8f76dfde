"""`cloud=here`: this machine is the one worker, with the devices of one pod.

The agent's commands are the same as on a pod's workers, each a process of this machine.
"""

import hashlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import distributions
from pathlib import Path
from queue import Empty, Full, Queue
from typing import IO, Any

from conf.schema.cloud import HereCloud
from conf.strict_json import dumps
from controller.agent.fs import dump
from controller.config.this_machine import JAX_NAMES, Devices, find_devices
from controller.core.errors import ConfigError
from controller.ssh.agent_link import AgentBundle, AgentLink, ConnectionParams, build_bundle, late_after
from controller.ssh.fleet import Fleet

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


PROBES = ("devices.json", "health.json")
"""What the agent remembers of the devices until the next boot."""
COMPUTE_ENGINE = Path("/sys/class/dmi/id/product_name")
PLATFORMS = {"cpu": "cpu", "gpu": "cuda,cpu", "tpu": "tpu,cpu"}
"""JAX_PLATFORMS by backend: JAX fails without the first one, where it would fall back to the CPU by itself."""


def open_fleet(cloud: HereCloud, state: Path) -> Fleet:
    """Return the connection to this machine's agent for the devices of `cloud`, a resolved one."""
    root = state / "here" / cloud.pod_name
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    environment = agent_environment(cloud, root, os.environ, find_devices())
    write_python(root / "bin", sys.executable)
    _forget_old_probes(root, environment)
    params = ConnectionParams(cloud.pod_name, "", Path(), [HERE], lambda: ())
    return Fleet(params, links=[LocalLink(root, [sys.executable], environment, build_bundle())])


def agent_environment(cloud: HereCloud, root: Path, environment: Mapping[str, str], found: Devices) -> dict[str, str]:
    """Return the variables of the agent and of programs: the user's own, the devices, and where the agent lives."""
    indices, backend = cloud.indices, cloud.backend
    made = dict(environment)
    if made.get("MPLBACKEND", "").startswith("module://"):
        del made["MPLBACKEND"]  # of a notebook's kernel
    made |= {
        "SLIPWAY_AGENT_ROOT": str(root),
        "SLIPWAY_ONE_PROCESS": "1",
        "PATH": os.pathsep.join([str(root / "bin"), str(Path(sys.executable).parent), made.get("PATH", os.defpath)]),
    }
    if JAX_NAMES.get(found.told) != backend:
        made["JAX_PLATFORMS"] = PLATFORMS[backend]
    if backend == "cpu":
        made["JAX_NUM_CPU_DEVICES"] = str(len(indices))
    elif len(indices) < found.count(backend) or indices != tuple(range(len(indices))):
        made |= _some_devices(backend, indices, found)
    if backend != "tpu":
        made["SLIPWAY_SYSFS"] = str(root / "no-sysfs")  # huge pages are a matter of TPU VMs
    if not _is_google_vm():
        made["SLIPWAY_NO_METADATA"] = "1"
    if backend != "cpu":
        locks = [root.parent / "locks" / f"{backend}-{index}" for index in indices]
        made["SLIPWAY_DEVICE_LOCKS"] = os.pathsep.join(map(str, locks))
    return made


def _some_devices(backend: str, indices: tuple[int, ...], found: Devices) -> dict[str, str]:
    """Return variables that show a program only some of the devices.

    For TPUs: https://docs.cloud.google.com/tpu/docs/jax-quickstart-tpu-vm, one process per chip.
    """
    if backend == "gpu":
        names = found.visible or tuple(map(str, range(max(indices) + 1)))
        return {"CUDA_VISIBLE_DEVICES": ",".join(names[i] if i < len(names) else str(i) for i in indices)}
    bounds = {"TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1", "TPU_PROCESS_BOUNDS": "1,1,1"} if len(indices) == 1 else {}
    return {"TPU_VISIBLE_CHIPS": ",".join(map(str, indices)), **bounds}


def write_python(folder: Path, python: str) -> None:
    """Write `python` and `python3` that run this interpreter; a link would not be in its virtual environment."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    text = f'#!/bin/sh\nexec {shlex.quote(python)} "$@"\n'
    for name in ("python", "python3"):
        file = folder / name
        if not file.is_file() or file.read_text() != text:
            draft = folder / f".{name}.{os.getpid()}"
            draft.write_text(text)
            draft.chmod(0o700)
            draft.replace(file)


def _forget_old_probes(root: Path, environment: Mapping[str, str]) -> None:
    """Have the devices probed again after JAX or the variables that it reads have changed."""
    versions = {
        name: each.version
        for each in distributions()
        if (name := each.metadata["Name"].lower()).startswith("jax") or name.startswith("libtpu")
    }
    told = {key: environment[key] for key in sorted(environment) if key.startswith(("JAX_", "CUDA_", "TPU_", "XLA_"))}
    facts = dumps([sys.executable, sorted(versions.items()), told])
    mark, digest = root / "probed", hashlib.sha256(facts.encode()).hexdigest()
    if mark.is_file() and mark.read_text() == digest:
        return
    for name in PROBES:
        (root / name).unlink(missing_ok=True)
    mark.write_text(digest)


def _is_google_vm() -> bool:
    try:
        return "Google" in COMPUTE_ENGINE.read_text()
    except OSError:
        return False

"""A worker that is a folder: the agent runs there as it does on a pod, as a process of its own."""

import compileall
import hashlib
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from controller.agent.fs import checked, dump, tree_hash
from controller.agent.worker_processes import is_alive
from controller.core.json_documents import type_problem
from controller.ssh.agent_link import answer_types, build_bundle
from tests.agents import find_program
from tests.controller.localcloud.harness import wait_for as wait_for
from tests.emulators import Emulators
from tests.fakes.loopback import FakeBucket
from tests.golden import golden

GOLDEN = golden("agent")


def place_agent(folder: Path, unpacked: Path | None) -> Path:
    """Put the agent into a worker's folder, with its modules and bytecode if they are given; return its zip file."""
    packed = build_bundle()
    folder.mkdir(mode=0o700, parents=True)
    archive = folder / packed.name
    archive.write_bytes(packed.content)
    if unpacked is not None:
        shutil.copytree(unpacked, archive.with_suffix(""), copy_function=os.link)
    return archive


class ForkedCommand:
    """A command of the agent, forked from the server of `tests/agents.py`: as much of `Popen` as is used here."""

    def __init__(self, server: str, argv: list[str], environment: dict[str, str], request: bytes) -> None:
        self.returncode: int | None = None
        self._client = socket.socket(socket.AF_UNIX)
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `communicate`)
        ours, theirs = socket.socketpair()
        for each in (self._client, ours):
            each.settimeout(300)
        self._client.connect(server)
        with tempfile.TemporaryFile() as stdin, theirs, ours:
            stdin.write(request)
            stdin.seek(0)
            order = json.dumps({"argv": argv, "environment": environment}).encode() + b"\n"
            socket.send_fds(self._client, [order], [each.fileno() for each in (stdin, theirs, self._stderr)])
            self.pid = int.from_bytes(self._client.recv(4))
            self.stdout: io.BufferedReader | None = ours.makefile("rb")

    def communicate(self) -> tuple[bytes, bytes]:
        with self._client, self._stderr:
            out = self.stdout.read() if self.stdout else b""
            if self.stdout:
                self.stdout.close()
            self.returncode = int.from_bytes(self._client.recv(4), signed=True)
            self._stderr.seek(0)
            return out, self._stderr.read()

    def kill(self) -> None:
        os.killpg(self.pid, signal.SIGKILL)


@dataclass
class AgentWorker:
    home: Path
    bucket: FakeBucket
    unpacked: Path
    """The agent as its first command leaves it."""
    forker: str
    """The socket of the server that forks its commands, except those whose Python starts with other modules."""
    boot_id: str = "boot-1"
    extra_environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.agent = place_agent(self.root, self.unpacked)

    @property
    def root(self) -> Path:
        return self.home / ".slipway"

    @property
    def environment(self) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        own = {
            "HOME": str(self.home),
            "PATH": path,
            "SLIPWAY_STORAGE_ROOT": self.bucket.url,
            "SLIPWAY_BOOT_ID": self.boot_id,
            "SLIPWAY_BOOT_TIME": "1",  # long ago
            "GCE_METADATA_HOST": "127.0.0.1:1",  # where nobody answers
            "SLIPWAY_SYSFS": str(self.home / "no-sysfs"),  # keeps the tests off this machine's kernel settings
        }
        return own | self.extra_environment

    def start_command(self, command: str, **payload: Any) -> ForkedCommand | subprocess.Popen[bytes]:
        """Start a command, and be there when it ends or not."""
        program = str(find_program(self.agent.with_suffix("")))
        if "PYTHONPATH" not in self.environment:
            return ForkedCommand(self.forker, [program, command], self.environment, dump(payload))
        return self.start_process(command, **payload)

    def start_process(self, command: str, **payload: Any) -> subprocess.Popen[bytes]:
        """The same in a process with the limits of this one."""
        process = subprocess.Popen(
            [sys.executable, str(find_program(self.agent.with_suffix(""))), command],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=self.environment, start_new_session=True,
        )  # fmt: skip
        assert process.stdin
        process.stdin.write(dump(payload))
        process.stdin.close()
        process.stdin = None
        return process

    def finish_command(self, process: ForkedCommand | subprocess.Popen[bytes]) -> tuple[int, list[dict[str, Any]]]:
        out, err = process.communicate()
        assert err == b"", err.decode()
        assert process.returncode is not None
        return process.returncode, [checked(json.loads(line), "answer") for line in out.splitlines()]

    def run_command(self, command: str, **payload: Any) -> tuple[int, list[dict[str, Any]]]:
        return self.finish_command(self.start_command(command, **payload))

    def call(self, command: str, **payload: Any) -> dict[str, Any]:
        code, lines = self.run_command(command, **payload)
        assert code == 0, lines
        if command != "fetch_asset":
            answer = GOLDEN[command]["answer"]
            assert set(lines[-1]) == set(answer if isinstance(answer, dict) else GOLDEN[answer]["answer"]) - {"format"}
            assert type_problem(lines[-1], answer_types()[command]) == ""
        return lines[-1]

    def call_error(self, command: str, **payload: Any) -> dict[str, str]:
        """What it says when it cannot do it."""
        code, lines = self.run_command(command, **payload)
        assert code == 1, lines
        return lines[-1]

    def watch(self, **payload: Any) -> list[dict[str, Any]]:
        code, lines = self.run_command("watch", **payload)
        assert code == 0, lines
        assert [problem for line in lines if (problem := type_problem(line, answer_types()["watch"]))] == []
        return lines

    def upload_code(self, files: dict[str, str | bytes]) -> dict[str, str]:
        """Put a code archive into the bucket, and give what `install_code` is to be asked."""
        content = make_archive(files)
        sha256 = hashlib.sha256(content).hexdigest()
        self.bucket.objects[f"code/{sha256}.tar.gz"] = content
        source = self.home / "source" / sha256
        for name, text in files.items():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return {"bucket": "b", "object": f"code/{sha256}.tar.gz", "sha256": sha256, "tree": tree_hash(source)}


def make_archive(files: dict[str, str | bytes], *members: tarfile.TarInfo) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, text in files.items():
            content = text if isinstance(text, bytes) else text.encode()
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        for member in members:
            tar.addfile(member)
    return buffer.getvalue()


@pytest.fixture
def bucket() -> Iterator[FakeBucket]:
    with FakeBucket.serving() as made:
        yield made


@pytest.fixture(scope="session")
def unpacked_agent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The agent's modules and their bytecode: to compile them takes longer than most commands."""
    folder = tmp_path_factory.mktemp("agent")
    with zipfile.ZipFile(io.BytesIO(build_bundle().content)) as archive:
        archive.extractall(folder)
    assert compileall.compile_dir(folder, quiet=1)
    return folder


@pytest.fixture
def worker(tmp_path: Path, bucket: FakeBucket, unpacked_agent: Path, emulators: Emulators) -> Iterator[AgentWorker]:
    made = AgentWorker(tmp_path / "home", bucket, unpacked_agent, emulators.agents)
    yield made
    end_programs(made.home)


@dataclass
class ProgramRun:
    """A run whose program is one Python file, on a worker where everything is installed."""

    worker: AgentWorker
    code: str
    run_id: str = "run-1"

    def start(self, script: str, *arguments: str, attempt: int = 1, **payload: Any) -> dict[str, Any]:
        return self.worker.call("start", **self.start_payload(script, *arguments, attempt=attempt, **payload))

    def start_payload(self, script: str, *arguments: str, attempt: int = 1, **payload: Any) -> dict[str, Any]:
        given = {"run_id": self.run_id, "attempt": attempt, "argv": ["python", "-c", script, *arguments]}
        return {**given, "code": self.code, "venv": "image", **payload}

    def state(self, attempt: int | None = None) -> dict[str, Any]:
        return self.worker.call("state", run_id=self.run_id, attempt=attempt)

    def wait_ended(self, attempt: int | None = None) -> dict[str, Any]:
        """Its state once it has ended and its supervisor has gone."""
        folder = self.folder / f"attempt-{attempt or 1}"
        wait_for(lambda: (folder / "exit.json").exists())
        wait_for(lambda: not is_alive(json.loads((folder / "pid.json").read_bytes())["supervisor"]))
        return self.state(attempt)

    @property
    def folder(self) -> Path:
        return self.worker.root / "runs" / self.run_id


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory, unpacked_agent: Path, emulators: Emulators) -> tuple[Path, str]:
    """Where the agent has installed code and a venv of the image's packages, and the code's hash."""
    home = tmp_path_factory.mktemp("installed") / "home"
    with FakeBucket.serving() as bucket:
        worker = AgentWorker(home, bucket, unpacked_agent, emulators.agents)
        order = worker.upload_code({"package/module.py": "x = 1\n"})
        worker.call("install_code", **order)
        worker.call("install_venv", packages="image", fingerprint="image", python="3")
    return worker.root, order["tree"]


@pytest.fixture
def run(worker: AgentWorker, installed: tuple[Path, str]) -> ProgramRun:
    for name in ("code", "venv"):
        shutil.copytree(installed[0] / name, worker.root / name, symlinks=True)
    return ProgramRun(worker, installed[1])


def end_programs(home: Path) -> None:
    """Kill the supervisors and programs of a worker whose home is this folder."""
    for path in home.glob(".slipway/runs/*/attempt-*/pid.json"):
        record = json.loads(path.read_bytes())
        for who in ("supervisor", "program"):
            if is_alive(record[who]):
                os.kill(record[who]["pid"], signal.SIGKILL)

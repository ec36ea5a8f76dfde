"""SSH servers in this process that stand for the workers of a pod: real shells, a home each, and ways to fail."""

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncssh

from controller.localcloud.vms.sessions import HomeFiles
from controller.ssh.fleet import ConnectionParams
from controller.ssh.login import private_key, public_key_line
from tests.controller.agent.conftest import end_programs

USER = "slipway"


@dataclass
class SshWorker:
    """One server; `commands` are the shell commands that it was sent, `forwarded` the ports it led to."""

    home: Path
    authorized: str
    key: asyncssh.SSHKey = field(default_factory=lambda: asyncssh.generate_private_key("ssh-ed25519"))
    port: int = 0
    commands: list[str] = field(default_factory=list)
    connections: list[asyncssh.SSHServerConnection] = field(default_factory=list)
    forwarded: list[int] = field(default_factory=list)
    programs: list[asyncio.subprocess.Process] = field(default_factory=list)
    server: asyncssh.SSHAcceptor | None = None
    path: str = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

    @property
    def host_key_line(self) -> str:
        return self.key.export_public_key().decode().strip()

    @property
    def environment(self) -> dict[str, str]:
        return {"HOME": str(self.home), "PATH": self.path, "LANG": "C.UTF-8"}

    async def listen(self) -> None:
        self.server = await asyncssh.listen(
            "127.0.0.1",
            self.port,
            server_factory=lambda: _Server(self),
            server_host_keys=[self.key],
            authorized_client_keys=asyncssh.import_authorized_keys(self.authorized),
            process_factory=self._execute,
            sftp_factory=lambda channel: HomeFiles(channel, self.home),
            encoding=None,
        )
        self.port = self.server.get_port()

    async def drop_connections(self) -> None:
        """Refuse new connections and drop the old ones; what runs goes on."""
        if self.server:
            loop = asyncio.get_running_loop()
            for listener in self.server.sockets:  # asyncio leaks what is accepted while a server closes
                loop.remove_reader(listener.fileno())
            for _ in range(5):
                await asyncio.sleep(0)
            self.server.close()
            self.server = None
        for connection in self.connections:
            connection.abort()
        self.connections.clear()

    async def _execute(self, process: asyncssh.SSHServerProcess[bytes]) -> None:
        self.commands.append(process.command or "")
        pipe = asyncio.subprocess.PIPE
        program = await asyncio.create_subprocess_exec(
            "/bin/sh", "-c", process.command or "true", stdin=pipe, stdout=pipe, stderr=pipe,
            env=self.environment, cwd=self.home, start_new_session=True,
        )  # fmt: skip
        self.programs.append(program)
        assert program.stdin
        assert program.stdout
        assert program.stderr
        feeding = asyncio.ensure_future(_copy_stream(process.stdin, program.stdin))
        await asyncio.gather(_copy_stream(program.stdout, process.stdout), _copy_stream(program.stderr, process.stderr))
        code = await program.wait()
        feeding.cancel()
        process.exit(code)


class _Server(asyncssh.SSHServer):
    def __init__(self, worker: SshWorker) -> None:
        self._worker = worker

    def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
        self._worker.connections.append(conn)

    def begin_auth(self, username: str) -> bool:
        connection: Any = self._worker.connections[-1]
        connection._next_service = b"ssh-userauth"  # paramiko asks again with its second key, and sshd allows that
        return True

    def connection_requested(self, dest_host: str, dest_port: int, orig_host: str, orig_port: int) -> bool:
        self._worker.forwarded.append(dest_port)
        return True


async def _copy_stream(source: asyncio.StreamReader | asyncssh.SSHReader[bytes], sink) -> None:
    try:
        while data := await source.read(1 << 16):
            sink.write(data)
            await sink.drain()
        if isinstance(sink, asyncio.StreamWriter):
            sink.close()
    except (BrokenPipeError, ConnectionError, asyncssh.Error):
        return  # either side may end first


class SshPod:
    """Some workers, their own event loop in a thread, and the `ConnectionParams` that leads to them."""

    def __init__(self, folder: Path, workers: int) -> None:
        self.folder, self.keys = folder, folder / "keys"
        self.workers = []
        for index in range(workers):
            (home := folder / f"worker-{index}").mkdir(parents=True)
            self.workers.append(SshWorker(home, public_key_line(self.keys, USER)))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        for worker in self.workers:
            self.run_coroutine(worker.listen())

    def run_coroutine(self, coroutine) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(20)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Connections stay open, and nobody answers any more."""
        release = threading.Event()
        self._loop.call_soon_threadsafe(release.wait)
        try:
            yield
        finally:
            release.set()

    def access(self, **changed) -> ConnectionParams:
        config = self.folder / "ssh_config"
        blocks = [f"Host 10.0.0.{i}\n  HostName 127.0.0.1\n  Port {w.port}\n" for i, w in enumerate(self.workers)]
        config.write_text("".join(blocks))
        plain = {
            "pod": "pod-a",
            "user": USER,
            "key": private_key(self.keys),
            "addresses": [f"10.0.0.{i}" for i in range(len(self.workers))],
            "host_keys": lambda: [w.host_key_line for w in self.workers],
            "ssh_config": config,
            "connect_seconds": 10.0,
            "warm_up_seconds": 10.0,
            "silence_seconds": 5.0,
        }
        return ConnectionParams(**{**plain, **changed})

    def close(self) -> None:
        for worker in self.workers:
            self.run_coroutine(worker.drop_connections())
            end_programs(worker.home)
        self.run_coroutine(self._finish())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _finish(self) -> None:
        for program in [program for worker in self.workers for program in worker.programs]:
            if program.returncode is None:
                with contextlib.suppress(ProcessLookupError):  # it ended just now
                    os.killpg(program.pid, signal.SIGKILL)
                await program.wait()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

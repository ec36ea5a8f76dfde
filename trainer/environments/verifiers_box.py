"""The runtime `subprocess` of verifiers 0.4 as a box: what a harness, a task or a tool server executes runs in one.

The containers of that library (docker, podman, apptainer) and its remote sandboxes stay what they are.
"""

import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from conf.schema.training.loop_parts import Sandbox
from trainer.sandbox.box import LOOPBACK, Box, Ended, Limits, RefusedError
from trainer.sandbox.init import HOME


@dataclass
class EpisodeBoxes:
    """What happened in the boxes of an episode.

    waits: whether the policy is being asked; cause: the last limit that ended one; killed: how many limits did;
    exit_code: commands that ended with another one than 0.
    """

    waits: bool = False
    cause: str = ""
    killed: int = 0
    exit_code: int = 0

    def reach(self, cause: str) -> None:
        self.cause, self.killed = cause, self.killed + 1

    def metrics(self) -> dict[str, float]:
        return {"sandbox_killed": self.killed, "sandbox_exit_code": self.exit_code}


EPISODE: ContextVar[EpisodeBoxes] = ContextVar("episode")
"""The episode that a task of the event loop belongs to; none for a server that episodes share."""


def use_boxes(sandbox: Sandbox, output_mib: float) -> None:
    """Make the library's runtime `subprocess` a box from now on. output_mib: of what a command prints."""
    import verifiers.v1.runtimes as runtimes  # pyright: ignore[reportMissingImports]

    memory, disk, output = sandbox.memory_gib * 2**30, sandbox.disk_mib * 2**20, output_mib * 2**20
    limits = Limits(sandbox.cpu_seconds, sandbox.wall_seconds, int(memory), int(disk), int(output), sandbox.processes)
    box, choose = _runtime_class(limits, has_network=sandbox.network == "host"), runtimes._runtime_cls
    runtimes._runtime_cls = lambda config: box if config.type == "subprocess" else choose(config)


def _runtime_class(limits: Limits, *, has_network: bool) -> type:
    from verifiers.v1.errors import SandboxError  # pyright: ignore[reportMissingImports]
    from verifiers.v1.runtimes import ProgramResult, Runtime, SubprocessRuntime  # pyright: ignore[reportMissingImports]

    class BoxRuntime(SubprocessRuntime):
        """A runtime whose programs run in a box; files are read and written by programs in it too."""

        open_process = Runtime.open_process  # which says that there is none

        def __init__(self, config: Any, name: str | None = None) -> None:
            super().__init__(config, name)
            self._episode, self._ports = EPISODE.get(EpisodeBoxes()), set[int]()
            self._box = Box(limits, has_network=has_network, on_limit=self._episode.reach)

        async def start(self) -> None:
            try:
                await self._box.start()
            except RefusedError as error:
                raise SandboxError(str(error)) from None
            self.info.id = HOME

        async def run(self, argv: list[str], env: dict[str, str]) -> ProgramResult:
            ended = await self._run(argv, env)
            self._episode.exit_code += bool(ended.code and not ended.cause)
            told = f"\nkilled: {ended.cause} (loop.environment.sandbox)" if ended.cause else ""
            texts = [text.decode(errors="replace") for text in (ended.stdout, ended.stderr)]
            return ProgramResult(exit_code=ended.code, stdout=texts[0], stderr=texts[1] + told)

        async def run_background(self, argv: list[str], env: dict[str, str], log: str) -> None:
            await self._forward_ports()
            self._box.begin(["sh", "-c", 'exec "$@" >"$0" 2>&1', log, *argv], self._variables(env))

        async def write(self, path: str, data: bytes) -> None:
            words = ["sh", "-c", 'mkdir -p -- "$(dirname -- "$1")" && cat >"$1"', "sh", path]
            self._check(await self._run(words, {}, data), "write", path)

        async def _read(self, path: str, max_bytes: int | None = None) -> bytes:
            most = limits.output if max_bytes is None else max_bytes
            return self._check(await self._run(["head", "-c", str(most), "--", path], {}), "read", path).stdout

        async def prepare_uv_script(self, script: Any, env: Any = None, *, activate: bool = True) -> list[str]:
            """A script is run by this Python, with the packages that the worker has: nothing is downloaded."""
            data = script.encode() if isinstance(script, str) else script
            path = f"/tmp/scripts/{hashlib.sha256(data).hexdigest()}.py"  # noqa: S108 - of the box
            await self.write(path, data)
            return [sys.executable, path]

        def host_url(self, url: str) -> str:
            """The same URL: its port is forwarded before the next program starts."""
            parts = urlsplit(url)
            if parts.hostname in (LOOPBACK, "localhost") and parts.port is not None:
                self._ports.add(parts.port)
            return url

        async def expose(self, port: int) -> str:
            return f"http://{LOOPBACK}:{await self._box.expose(port)}"

        def cleanup(self) -> None:
            self._box.stop()

        async def teardown(self) -> None:
            self.cleanup()

        async def _run(self, argv: Sequence[str], env: Mapping[str, str], stdin: bytes = b"") -> Ended:
            try:
                await self._forward_ports()
                return await self._box.run(argv, self._variables(env), stdin, is_idle=lambda: self._episode.waits)
            except RefusedError as error:
                raise SandboxError(str(error)) from None

        def _variables(self, env: Mapping[str, str]) -> dict[str, str]:
            return {"PYTHONPATH": os.environ.get("PYTHONPATH", ""), **self.process_env(dict(env))}

        async def _forward_ports(self) -> None:
            for port in [*self._ports]:
                await self._box.forward(port)

        def _check(self, ended: Ended, what: str, path: str) -> Ended:
            if ended.code:
                raise SandboxError(f"{what} {path!r}: {ended.cause or ended.stderr.decode(errors='replace').strip()}")
            return ended

    return BoxRuntime

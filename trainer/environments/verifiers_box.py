"""The runtime `subprocess` of verifiers 0.4 as a box: what a harness, a task or a tool server executes runs in one.

A container of that library (docker, podman, apptainer) and its remote sandboxes stay what they are.
"""

import hashlib
import os
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any
from urllib.parse import urlsplit

from conf.schema.training.loop_parts import Sandbox
from trainer.environments.failure import FailureError
from trainer.sandbox.box import CAUSES, Box, Ended, Limits, RefusedError
from trainer.sandbox.init import HOME
from trainer.sandbox.network import BoxNetwork

EXIT_CODE, REFUSED = "exit_code", "refused"
COUNTED = (*CAUSES, EXIT_CODE, REFUSED)
"""What is counted of an episode's boxes: limits, commands with another exit code than 0, refused connections."""
SCRIPTS = "/tmp/scripts"  # noqa: S108 - of a box
METADATA = re.compile(r"^# /// script\s*$(?P<toml>(?:\n#(?: .*)?$)*?)\n# ///\s*$", re.MULTILINE)
"""PEP 723."""
LOOPBACK = ("127.0.0.1", "localhost")


@dataclass
class EpisodeBoxes:
    """What happened in the boxes of an episode. waits: whether the policy is being asked."""

    counted: Counter[str] = field(default_factory=Counter)
    waits: bool = False

    def metrics(self) -> dict[str, float]:
        return {f"sandbox_{name}": self.counted[name] for name in COUNTED}

    def failure(self) -> FailureError | None:
        """Return the limit that ended something, if one did."""
        for cause in CAUSES:
            if self.counted[cause]:
                return FailureError(cause, f"a program in a box reached its limit of loop.environment.sandbox: {cause}")
        return None


EPISODE: ContextVar[EpisodeBoxes] = ContextVar("episode")
"""The episode that a task of the event loop belongs to; none for a server that episodes share."""


def limits_of(sandbox: Sandbox, output_mib: float) -> Limits:
    return Limits(
        sandbox.cpu_seconds,
        sandbox.wall_seconds,
        int(sandbox.memory_gib * 2**30),
        int(sandbox.disk_mib * 2**20),
        int(output_mib * 2**20),
        sandbox.processes,
    )


def use_boxes(limits: Limits, hosts: Sequence[str]) -> None:
    """Make the library's runtime `subprocess` a box from now on. hosts: what HTTPS clients in it may reach."""
    import verifiers.v1.runtimes as runtimes  # pyright: ignore[reportMissingImports]

    box, choose = _runtime_class(limits, hosts), runtimes._runtime_cls
    runtimes._runtime_cls = lambda config: box if config.type == "subprocess" else choose(config)


def _runtime_class(limits: Limits, hosts: Sequence[str]) -> type:
    from verifiers.v1.errors import SandboxError  # pyright: ignore[reportMissingImports]
    from verifiers.v1.runtimes import ProgramResult, Runtime, SubprocessRuntime  # pyright: ignore[reportMissingImports]

    class BoxRuntime(SubprocessRuntime):
        """A runtime whose programs run in a box; files are read and written by programs in it too."""

        scripts_dir = SCRIPTS
        open_process = Runtime.open_process  # which says that there is none

        def __init__(self, config: Any, name: str | None = None) -> None:
            super().__init__(config, name)
            self._uv_interpreters, self._uv_script_locks = {}, {}
            self._episode = EPISODE.get(EpisodeBoxes())
            self._box = Box(limits, self._episode.counted)
            self._network, self._variables = BoxNetwork(self._box, hosts, self._refuse), dict[str, str]()
            self._ports = set[int]()

        async def start(self) -> None:
            try:
                await self._box.start()
            except RefusedError as error:
                self._refuse()
                raise SandboxError(str(error)) from None
            self.info.id = HOME
            self._variables = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
            if hosts:
                self._variables |= await self._network.open_proxy()

        async def run(self, argv: list[str], env: dict[str, str]) -> ProgramResult:
            ended = await self._run(argv, self.process_env(env))
            self._episode.counted[EXIT_CODE] += bool(ended.code and not ended.cause)
            told = f"\nkilled: {ended.cause} (loop.environment.sandbox)" if ended.cause else ""
            return ProgramResult(
                exit_code=ended.code,
                stdout=ended.stdout.decode(errors="replace"),
                stderr=ended.stderr.decode(errors="replace") + told,
            )

        async def run_background(self, argv: list[str], env: dict[str, str], log: str) -> None:
            await self._forward_ports()
            self._box.begin(argv, self._variables | self.process_env(env), log)

        async def write(self, path: str, data: bytes) -> None:
            words = ["sh", "-c", 'mkdir -p -- "$(dirname -- "$1")" && cat >"$1"', "sh", path]
            self._check(await self._run(words, {}, data), "write", path)

        async def _read(self, path: str, max_bytes: int | None = None) -> bytes:
            most = limits.output + 1 if max_bytes is None else max_bytes
            return self._check(await self._run(["head", "-c", str(most), "--", path], {}), "read", path).stdout

        async def prepare_uv_script(self, script: Any, env: Any = None, *, activate: bool = True) -> list[str]:
            """A script whose packages this Python has is run by it: nothing is downloaded."""
            text = script if isinstance(script, str) else script.decode()
            if not _has_packages(text):
                return await super().prepare_uv_script(script, env, activate=activate)
            path = f"{SCRIPTS}/{hashlib.sha256(text.encode()).hexdigest()}.py"
            if path not in self._uv_interpreters:
                await self.write(path, text.encode())
                self._uv_interpreters[path] = sys.executable
            return [sys.executable, path]

        def host_url(self, url: str) -> str:
            """The same URL: its port is forwarded before the next program starts."""
            parts = urlsplit(url)
            if parts.hostname in LOOPBACK and parts.port is not None:
                self._ports.add(parts.port)
            return url

        async def expose(self, port: int) -> str:
            return f"http://127.0.0.1:{await self._network.expose(port)}"

        async def teardown(self) -> None:
            self._network.close()
            await self._box.stop()

        def cleanup(self) -> None:
            self._box.abandon()

        async def _run(self, argv: Sequence[str], env: Mapping[str, str], stdin: bytes = b"") -> Ended:
            await self._forward_ports()
            variables = self._variables | dict(env)
            try:
                return await self._box.run(argv, variables, stdin, is_idle=lambda: self._episode.waits)
            except RefusedError as error:
                raise SandboxError(str(error)) from None

        async def _forward_ports(self) -> None:
            for port in [*self._ports]:
                await self._network.forward(port)

        def _refuse(self) -> None:
            self._episode.counted[REFUSED] += 1

        def _check(self, ended: Ended, what: str, path: str) -> Ended:
            if ended.code:
                raise SandboxError(f"{what} {path!r}: {ended.cause or ended.stderr.decode(errors='replace').strip()}")
            return ended

    return BoxRuntime


def _has_packages(script: str) -> bool:
    """Return whether this Python is one that a script wants, with the packages that it wants."""
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    found = METADATA.search(script)
    if found is None:
        return True
    wanted = tomllib.loads("".join(f"{line[2:]}\n" for line in found["toml"].splitlines()))
    if not SpecifierSet(wanted.get("requires-python", "")).contains(sys.version.split()[0]):
        return False
    for requirement in map(Requirement, wanted.get("dependencies", [])):
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            return False
        if not requirement.specifier.contains(version, prereleases=True):
            return False
    return True

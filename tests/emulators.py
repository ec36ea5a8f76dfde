"""Emulated clouds forked from a process that has imported one already: an import takes most of the time of a start.

`python -m tests.emulators`: an order in JSON per line on stdin, the process id of the server per line on stdout.
"""

import copy
import gc
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import psutil

from controller import emulator
from controller.localcloud import lifecycle
from tests import agents as agents_module
from tests.agents import ForkedAgents
from tests.paths import ROOT
from tests.virtual_time import VARIABLE, SharedTime, live_in

START_SECONDS = 300.0
run_in_a_process = emulator.run_emulator_verb


class Emulators:
    """Starts, stops and wipes emulated clouds without a new interpreter for each.

    `agents` is the socket of the process that forks the agents of their workers.
    """

    agents: str

    def __enter__(self) -> "Emulators":
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._forker = subprocess.Popen([sys.executable, "-m", "tests.emulators"], env=environment, **pipes)
        self._folder = tempfile.TemporaryDirectory(prefix="slipway-")
        self.agents = str(Path(self._folder.name, "agents"))
        bare = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        python = str(Path(sys.executable).with_name("python3"))  # as on a worker
        argv = [python, str(Path(agents_module.__file__)), self.agents]
        self._agent_forker = subprocess.Popen(argv, cwd=self._folder.name, env=bare, **pipes)
        assert self._agent_forker.stdout is not None
        self._agent_forker.stdout.readline()  # it listens
        return self

    def __exit__(self, *_: object) -> None:
        self._forker.communicate()
        self._agent_forker.communicate()
        self._folder.cleanup()

    def with_real_agents(self) -> "Emulators":
        """The same; but their workers start every agent as a VM does, and nothing of it is forked."""
        other = copy.copy(self)
        other.agents = ""
        return other

    def start(self, state: Path, *flags: str) -> tuple[int, str]:
        """Return 0 as soon as the server answers, otherwise 2 and what it logged."""
        if lifecycle.find_endpoint(state):
            return 0, ""
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        log = state / "server.log"
        before = log.stat().st_size if log.exists() else 0
        pid = self._fork(state, flags)
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            runs = psutil.pid_exists(pid)
            if lifecycle.find_endpoint(state):
                return 0, ""
            if not runs:
                break
            time.sleep(0.01)
        return 2, log.read_bytes()[before:].decode(errors="replace")

    def run_emulator_verb(self, arguments: Sequence[str], folder: Path, *, show: bool = False) -> tuple[int, str]:
        """Stand in for `controller.emulator.run_emulator_verb`."""
        match arguments[0]:
            case "start":
                return self.start(folder, *arguments[1:])
            case "stop":
                lifecycle.stop(folder, programs="--programs" in arguments)
            case "wipe":
                lifecycle.wipe(folder)
            case _:
                return run_in_a_process(arguments, folder, show=show)
        return 0, ""

    def _fork(self, state: Path, flags: Sequence[str]) -> int:
        assert self._forker.stdin is not None
        assert self._forker.stdout is not None
        order = {
            "state": str(state.absolute()),
            "flags": [*flags],
            "environment": {**os.environ},
            "agents": self.agents,
        }
        self._forker.stdin.write(json.dumps(order) + "\n")
        self._forker.stdin.flush()
        return json.loads(self._forker.stdout.readline())


def main() -> None:
    """Fork a server for every order."""
    preload()
    signal.signal(signal.SIGCHLD, reap)
    for line in sys.stdin:
        order = json.loads(line)
        if pid := os.fork():
            print(pid, flush=True)
            continue
        code = 1
        try:
            code = serve(**order)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)


def preload() -> None:
    """Import and read what every server needs, so that the forks have it."""
    from conf.schema.cloud import permissions_of_role, predefined_roles
    from controller.localcloud import cloud
    from controller.localcloud.http.discovery import load_discovery

    load_discovery()
    cloud.load_catalog()
    for role in predefined_roles():
        permissions_of_role(role)
    gc.freeze()  # the forks share it


def reap(*_: object) -> None:
    """Wait for the servers that have ended: no zombie is left, and their time counts as that of the tests."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def serve(state: str, flags: Sequence[str], environment: Mapping[str, str], agents: str) -> int:
    """Be the server that `python -m controller.localcloud start` would have started, in a forked process."""
    from controller.localcloud.__main__ import main as localcloud
    from controller.localcloud.vms import workers

    # JAX programs of the workers spend most of their time compiling, as the tests do.
    flags_of_tests = {name: environment[name] for name in ("XLA_FLAGS",) if name in environment}
    as_on_a_worker = workers.worker_environment
    workers.worker_environment = lambda *at, **named: {**flags_of_tests, **as_on_a_worker(*at, **named)}
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    random.seed()
    os.setsid()
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(environment)
    if VARIABLE in environment:
        live_in(SharedTime(Path(environment[VARIABLE])))
    log = os.open(Path(state, "server.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for standard, file in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
        os.dup2(file, standard)
    with forked_agents(agents) if agents else nullcontext():
        return localcloud(["serve", f"--state={state}", *flags])


@contextmanager
def forked_agents(path: str) -> Iterator[None]:
    """Fork the agents of this server's workers, and leave none."""
    forked = ForkedAgents(path)
    forked.install()
    try:
        yield
    finally:
        forked.kill("")


if __name__ == "__main__":
    main()

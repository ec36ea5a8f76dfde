"""Commands of the agent, forked from a process that has imported the standard library already.

An emulated worker runs `python3 ~/.slipway/agent-HASH/__main__.py COMMAND` thirty times for one run, and the start of
Python takes most of the time of each. `python agents.py SOCKET` serves the emulated clouds of the tests: it forks, and
the child runs the very archive that was uploaded to the worker, in the environment of the session. Everything else that
a session runs starts as on a user's machine, as do those commands of the agent that last.
"""

import array
import asyncio
import json
import os
import re
import runpy
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

COMMAND = re.compile(
    r"sh -c 'a=~/(\.slipway/agent-[0-9a-f]+); .* exec python3 \"\$a\.pyz\" "
    "(observe|install_code|write_config|probe_peers|state|set_watchdog|watchdog_state|start)'"
)
"""Commands that end at once. A process that lasts must be seen with its own name and environment in /proc."""
HIGHEST_FILE = 256


def serve(path: str) -> None:
    """Fork a child for every order, until standard input ends."""
    preload()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    print("ready", flush=True)
    children: dict[int, socket.socket] = {}
    wakeup, wake = socket.socketpair()
    wakeup.setblocking(False)
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # a signal without a handler wakes nobody
    while True:
        ready, _, _ = select.select([listener, wakeup, sys.stdin], [], [])
        if sys.stdin in ready:
            return
        if wakeup in ready:
            wakeup.recv(4096)
            reap(children)
        if listener in ready:
            client, _ = listener.accept()
            pid = begin(client)
            children[pid] = client
            reap(children)


def preload() -> None:
    """Import what the agent's modules import."""
    import concurrent.futures
    import fcntl
    import gc
    import hashlib
    import platform
    import shutil
    import subprocess
    import tarfile
    import tempfile
    import urllib.request
    import zipfile

    assert all((concurrent.futures, fcntl, hashlib, platform, shutil, subprocess, tarfile, tempfile, urllib, zipfile))
    gc.freeze()


def begin(client: socket.socket) -> int:
    """Fork the child of one order: {argv, environment} in JSON, with its stdin, stdout and stderr. Return its pid."""
    files = array.array("i")
    order, ancillary, _, _ = client.recvmsg(1 << 20, socket.CMSG_SPACE(3 * files.itemsize))
    for _, _, data in ancillary:
        files.frombytes(data)
    while not order.endswith(b"\n"):
        order += client.recv(1 << 20)
    if pid := os.fork():
        for file in files:
            os.close(file)
        client.sendall(pid.to_bytes(4))
        return pid
    code = 1
    try:
        code = be_agent(json.loads(order), files)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def be_agent(order: Mapping[str, Any], files: Sequence[int]) -> int:
    """Be the process that a session would have started."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for standard, file in enumerate(files):
        os.dup2(file, standard)
    os.closerange(3, HIGHEST_FILE)
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(os.environ["HOME"])
    os.umask(0o077)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode) for number, mode in enumerate("rww"))
    sys.argv = order["argv"]
    program = Path(sys.argv[0])
    sys.path[0] = str(program.parent if program.suffix == ".py" else program)
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    return 0


def find_program(agent: Path) -> Path | None:
    """The file that the shell of a session would start."""
    return next((file for file in (agent / "__main__.py", agent.with_suffix(".pyz")) if file.is_file()), None)


def reap(children: dict[int, socket.socket]) -> None:
    """Tell the exit codes of the children that have ended."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            client = children.pop(ended[0])
            with suppress(OSError), client:
                client.sendall(os.waitstatus_to_exitcode(ended[1]).to_bytes(4, signed=True))


class ForkedProcess:
    """What `asyncio.create_subprocess_exec` would have returned for a command of the agent."""

    def __init__(self, pid: int, stdin: asyncio.StreamWriter, client: socket.socket) -> None:
        self.pid, self.stdin, self._client = pid, stdin, client
        self.ended: Callable[[], object] = lambda: None

    async def wait(self) -> int:
        code = await asyncio.get_running_loop().sock_recv(self._client, 4)
        self._client.close()
        self.ended()
        return int.from_bytes(code, signed=True) if len(code) == 4 else -signal.SIGKILL


class ForkedAgents:
    """Lets the sessions of this process's emulated cloud fork the agent's short commands from the server at `path`."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._markers: dict[int, str] = {}
        """Of the processes that run; /proc shows the environment of the process that they were forked from."""

    def install(self) -> None:
        """Take the place of `create_subprocess_exec`; what kills the processes of a worker finds these as well."""
        from controller.localcloud.vms import hosts, workers
        from controller.localcloud.vms.processes import MARKER

        from_scratch: Any = asyncio.create_subprocess_exec
        kill_marked = workers.kill_marked

        async def create_subprocess_exec(*arguments: str, **options: Any) -> Any:
            command = COMMAND.fullmatch(arguments[-1]) if arguments[:2] == ("/bin/bash", "-c") else None
            agent = Path(options["cwd"], command[1]) if command else None
            program = find_program(agent) if agent else None
            if command is None or program is None:  # without it, Python says so
                return await from_scratch(*arguments, **options)
            return await self._fork([str(program), command[2]], options, options["env"].get(MARKER, ""))

        def kill_both(prefix: str) -> int:
            return self.kill(prefix) + kill_marked(prefix)

        asyncio.create_subprocess_exec = create_subprocess_exec  # pyright: ignore[reportAttributeAccessIssue]
        for module in (hosts, workers):
            module.kill_marked = kill_both

    def kill(self, prefix: str) -> int:
        """Kill the processes whose marker starts with `prefix`, and wait until they are gone. Return how many."""
        import psutil

        from controller.localcloud.vms.processes import wait_ended

        struck = [pid for pid, marker in [*self._markers.items()] if marker.startswith(prefix)]
        for pid in struck:
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if self._path in process.cmdline():  # otherwise it has ended, and its number is another's
                    process.kill()
                    wait_ended(process, 10)
        return len(struck)

    async def _fork(self, argv: Sequence[str], options: Mapping[str, Any], marker: str) -> ForkedProcess:
        loop = asyncio.get_running_loop()
        client = socket.socket(socket.AF_UNIX)
        client.setblocking(False)
        await loop.sock_connect(client, self._path)
        order = {"argv": argv, "environment": dict(options["env"])}
        reading, writing = os.pipe()
        try:
            files = [reading, options["stdout"], options["stderr"]]
            socket.send_fds(client, [json.dumps(order).encode() + b"\n"], files)
        finally:
            os.close(reading)
        pipe = os.fdopen(writing, "wb", 0)
        transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, pipe)
        pid = int.from_bytes(await loop.sock_recv(client, 4))
        self._markers[pid] = marker
        process = ForkedProcess(pid, asyncio.StreamWriter(transport, protocol, None, loop), client)
        process.ended = lambda: self._markers.pop(pid, None)
        return process


if __name__ == "__main__":
    serve(sys.argv[1])

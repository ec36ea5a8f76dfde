"""Laptops: state folders of their own, and the `slipway`s that are started there, each a process that may be killed.

They are forked from a process that has imported everything; their clock and their patience are those of
`tests.scenarios.chaos.hurried`.
"""

import contextlib
import errno
import multiprocessing
import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.paths import ROOT

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["controller.cli.main", "controller.cli.verbs.up", "controller.cli.verbs.down", "controller.connect",
     "controller.ssh.fleet", "controller.ssh.worker_connection", "googleapiclient.discovery", "googleapiclient.http",
     "google_auth_httplib2", "google.oauth2.credentials", "rich.console", "hydra", "tenacity",
     "tests.scenarios.chaos.hurried", "tests.fakes.disks"]
)  # fmt: skip
FILL = signal.SIGUSR2
"""From this signal on nothing more can be written to the state folder."""


@dataclass
class Slipway:
    """A `slipway` that runs, or has ended."""

    words: tuple[str, ...]
    file: Path
    """What it says. Before the file is there, FILL would end it."""
    process: Any
    killed: bool = False

    @property
    def alive(self) -> bool:
        return self.process.is_alive()

    @property
    def code(self) -> int | None:
        return self.process.exitcode

    @property
    def said(self) -> str:
        return self.file.read_text(errors="replace") if self.file.exists() else ""

    def signal(self, number: int) -> None:
        self.killed |= number == signal.SIGKILL
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, number)


@dataclass
class Laptop:
    """A machine of a user: a state folder, and the repository to stand in, which all of them have."""

    home: Path
    repository: Path
    started: list[Slipway] = field(default_factory=list)

    def start(self, *words: str, jump: int = 0) -> Slipway:
        """`jump`: its clock jumps once, at a moment drawn from this, if it is not 0."""
        file = self.home.with_name(f"{self.home.name}-{len(self.started)}.txt")
        arguments = (words, str(self.home), str(self.repository), str(file), jump)
        made = Slipway(words, file, FORKS.Process(target=be_slipway, args=arguments))
        made.process.start()
        self.started.append(made)
        return made


def be_slipway(words: tuple[str, ...], home: str, repository: str, file: str, jump: int) -> None:
    """Be the process that the command line would have started."""
    from controller.cli import main
    from tests.fakes.disks import refusing_writes
    from tests.scenarios.chaos.hurried import use_fast_clock

    full = contextlib.ExitStack()
    signal.signal(FILL, lambda *_: full.enter_context(refusing_writes(Path(home), errno.ENOSPC)))
    said = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(said, 1)
    os.dup2(said, 2)
    os.environ |= {"SLIPWAY_HOME": home, "PYTHONPATH": str(ROOT)}
    os.chdir(repository)
    with use_fast_clock(jump):
        code = main.run(words)
    sys.stdout.flush()
    sys.exit(code)

"""A reader of the pages: types their commands one after another in one folder, on an emulated cloud of their own.

What is typed is what the page says, but for these: the emulated cloud stands in for Google Cloud, training is small,
questions are answered with yes, and a placeholder is what the reader has. A verb that waits for Ctrl-C gets it.
"""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import pytest

from controller import emulator
from controller.cli import main
from controller.cli.flags import flags
from controller.records.index import RECALLING_VERBS
from tests.docs.commands import Step, meant_by
from tests.emulators import Emulators

SMALL = ("scale=tiny", "logging.log_interval=1", "tpu.accelerator_type=v5litepod-4", "env.packages=image")
OWN_SCALE = ("plan", "fit", "rehearse")
"""Verbs that train nothing, or something small by themselves."""
ON_A_CLOUD = ("up", "run", "plan", "status", "logs", "down", "capacity", "init", "witness")
"""Verbs that go to Google Cloud unless the words, or a run on record, say otherwise."""
LOCAL = {"+experiment=quickstart", "+experiment=sums"}
"""Experiments of the emulated cloud."""
ON_THIS_MACHINE = {"cloud=gcp": "cloud=local", "env.packages=lock": "env.packages=image"}
ON_A_TERMINAL = {"tensorboard": "TensorBoard 2", "forward": "press Ctrl-C", "ssh": "", "chat": ""}
"""Verbs that are typed in another terminal, and the line after which they wait for Ctrl-C."""
TENSORBOARDS = ("slipway tensorboard", "slipway tensorboard --sweep quickstart")
PORTS = {**{words: f"{words} --port 0" for words in TENSORBOARDS}, "6007": "0", "8888": "0:8888", "6006:6007": "0:6007"}
"""Any port that is free."""
ENDS = {"fit": 0 if find_spec("libtpu") else 2}
"""Exit codes other than 0: without the TPU compiler `fit` says how to install it."""
PROGRAM = 'import os\nprint("hello from attempt", os.environ["SLIPWAY_ATTEMPT"], flush=True)\n'
PATIENT = f'{PROGRAM}import time\ntime.sleep(3600 if os.environ["SLIPWAY_ATTEMPT"] == "1" else 0)\n'
"""The reader's program; one that is rehearsed goes on until it is preempted."""


@dataclass
class Reader:
    """Types commands, and remembers what each said.

    Attributes:
        folder: where the reader stands; `train.py` is the reader's own program.
        stands_for: what the reader has in place of a command or a word of a page, such as the id of a run.
    """

    folder: Path
    home: Path
    capsys: pytest.CaptureFixture[str]
    stands_for: dict[str, str] = field(default_factory=lambda: {**PORTS})
    typed: list[list[str]] = field(default_factory=list)
    said: dict[str, str] = field(default_factory=dict)

    def does(self, step: Step) -> None:
        """Write the file of a step, or type its command, which must end as it should."""
        if step.file:
            file = self.folder / step.file
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(step.words)
            return
        if not step.words.startswith("cd ") and self.as_typed(step.words) not in self.typed:  # the reader is there
            self.types(step.words)

    def types(self, words: str) -> str:
        typed = self.as_typed(words)
        verb = main.parse(typed).verb
        (self.folder / "train.py").write_text(PATIENT if verb == "rehearse" else PROGRAM)
        if verb in ON_A_TERMINAL or "--web" in typed:
            code, out = self._elsewhere(typed, ON_A_TERMINAL.get(verb, "Ctrl-C ends it"))
        else:
            self.capsys.readouterr()
            code, out = main.run(typed), "".join(self.capsys.readouterr())
        assert code == ENDS.get(verb, 0), f"{words}\n(slipway {shlex.join(typed)})\nexit code {code}\n{out}"
        self.typed.append(typed)
        self.said[words] = out
        return out

    def as_typed(self, words: str) -> list[str]:
        """Return the arguments of `slipway` for a command of a page."""
        given = [
            self.stands_for.get(word, word) for word in shlex.split(self.stands_for.get(words, meant_by(words)))[1:]
        ]
        command = main.parse(given)
        verb, overrides = command.verb, command.overrides
        taken = {name for flag in flags(verb) for name in flag.names}
        on_record = any(getattr(command.flags, name, "") for name in ("run", "sweep")) or verb in RECALLING_VERBS
        added: list[str] = []
        if any(word.startswith("+experiment=") for word in overrides) and verb not in OWN_SCALE:
            added += SMALL
        if verb in ON_A_CLOUD and (overrides or not on_record):
            is_local = LOCAL & {*overrides} or any(word.startswith("cloud=") for word in overrides)
            added += [] if is_local else ["cloud=local"]
        if "--yes" in taken and "--yes" not in given and verb != "init":  # which would create the bucket as well
            added.append("--yes")
        at = given.index("--") if command.remainder else len(given)
        for said, meant in ON_THIS_MACHINE.items():
            given = [word.replace(said, meant) for word in given]
        return [*given[:at], *added, *given[at:]]

    def _elsewhere(self, typed: list[str], waits: str) -> tuple[int, str]:
        """Type a command in another terminal; if it waits for Ctrl-C, send it once it does what it says."""
        listening = "signal.signal(signal.SIGINT, signal.default_int_handler)"  # a shell may have ignored it
        script = f"import signal, sys; from controller.cli.main import run; {listening}; sys.exit(run(sys.argv[1:]))"
        argv = [sys.executable, "-u", "-c", script, *typed]
        running = subprocess.Popen(
            argv, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert running.stdout is not None
        out = ""
        try:
            for line in running.stdout:
                out += line
                if waits and waits in line and (port := re.search(r":(\d+)/?", line)):
                    ask(int(port[1]))
                    running.send_signal(signal.SIGINT)
                    break
            out += running.communicate(timeout=300)[0]
        finally:
            running.kill()
        return running.returncode, out

    def finished(self, name: str) -> list[dict[str, object]]:
        """Return the finished runs of that name."""
        self.capsys.readouterr()
        assert main.run(["runs", "--json", "--where", "state=finished"]) == 0
        return [row for row in json.loads(self.capsys.readouterr().out) if row["name"] == name]


def as_a_user(state: Path) -> dict[str, str]:
    """Return the environment of a user: not one virtual device of the tests, and a state folder of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    return {**kept, "SLIPWAY_HOME": str(state), "JAX_PLATFORMS": "cpu"}


def ask(port: int) -> None:
    """Ask a server of this machine something, and wait until it has answered or closed the connection."""
    with socket.create_connection(("localhost", port)) as connection, suppress(ConnectionError):
        connection.sendall(b"HEAD / HTTP/1.0\r\n\r\n")
        connection.recv(1)


@pytest.fixture
def reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, emulators: Emulators, capsys: pytest.CaptureFixture[str]
) -> Iterator[Reader]:
    """A reader in an empty folder with an empty cloud, which is wiped at the end."""
    home, folder = tmp_path / "home", tmp_path / "my-repository"
    folder.mkdir()
    monkeypatch.setattr(emulator, "run_emulator_verb", emulators.run_emulator_verb)
    monkeypatch.chdir(folder)
    for name, value in {"SLIPWAY_HOME": home, "HOME": tmp_path, "SHELL": "/bin/bash", "BROWSER": "true"}.items():
        monkeypatch.setenv(name, str(value))
    yield Reader(folder, home, capsys)
    status, words = emulator.run_emulator_verb(["wipe"], emulator.state_folder(str(home)))
    assert status == 0, words

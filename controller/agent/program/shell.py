"""Shell file with a run's environment, for people who log in with `slipway ssh`."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from ..fs import write_atomic

SHELL_FILE = "shell.sh"


def write_shell_file(run: Path, environment: dict[str, str], secrets: set[str]) -> None:
    """Write `shell.sh` into the run's folder: it sets the program's variables, except secrets, and enters its folder.

    Bash reads it as the rcfile of an interactive shell; any POSIX shell can source it.
    """
    changed = {
        name: value
        for name, value in sorted(environment.items())
        if name not in secrets and os.environ.get(name) != value
    }
    worker = environment.get("SLIPWAY_WORKER", "").strip("'")
    lines = [
        "[ -r ~/.bashrc ] && . ~/.bashrc",
        *(f"export {name}={shlex.quote(value)}" for name, value in changed.items()),
        rf"PS1='worker {worker}:\w\$ '",
        f"cd {shlex.quote(str(run / 'work'))}",
    ]
    write_atomic(run / SHELL_FILE, "".join(f"{line}\n" for line in lines).encode())

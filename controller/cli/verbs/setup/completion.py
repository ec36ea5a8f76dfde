"""`slipway completion`: for shells, which ask what may stand next, and for editors."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from controller.cli.completion.answers import answers
from controller.cli.completion.shells import SHELLS, install, shell_of, uninstall
from controller.cli.flags import ASKED

if TYPE_CHECKING:
    from controller.cli.main import Command


def run(command: Command) -> int:
    action, state = command.flags.action, Path(os.environ.get("SLIPWAY_HOME") or "~/.slipway").expanduser()
    if action == ASKED:
        found = answers(os.environ.get("COMP_LINE", ""), Path.cwd())
        print(
            json.dumps(found) if command.flags.json else "\n".join(f"{word}\t{about}" for word, about in found.items())
        )
        return 0
    if action == "vscode":
        from controller.config.editor_schemas import FOLDER, settings

        print(json.dumps(settings(FOLDER), indent=1))
        return 0
    if action in SHELLS:
        print(SHELLS[action].script, end="")
        return 0
    act = install if action == "install" else uninstall
    done = act(shell_of(command.flags.shell), state)
    print(json.dumps({"done": done}) if command.flags.json else "\n".join(done))
    return 0

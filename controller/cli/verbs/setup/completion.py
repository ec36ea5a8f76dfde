"""`slipway completion`: print completions for shells, and settings for editors."""

import json
import os
from pathlib import Path

from controller.cli.completion.answers import complete
from controller.cli.completion.shells import SHELLS, install, resolve_shell, uninstall
from controller.cli.flags import COMPLETION_QUERY
from controller.cli.main import Command


def run(command: Command) -> int:
    action, state = command.flags.action, Path(os.environ.get("SLIPWAY_HOME") or "~/.slipway").expanduser()
    if action == COMPLETION_QUERY:
        found = complete(os.environ.get("COMP_LINE", ""), Path.cwd())
        print(
            json.dumps(found) if command.flags.json else "\n".join(f"{word}\t{about}" for word, about in found.items())
        )
        return 0
    if action == "vscode":
        from controller.config.editor_schemas import FOLDER, editor_settings

        print(json.dumps(editor_settings(FOLDER), indent=1))
        return 0
    if action in SHELLS:
        print(SHELLS[action].script, end="")
        return 0
    act = install if action == "install" else uninstall
    done = act(resolve_shell(command.flags.shell), state)
    print(json.dumps({"done": done}) if command.flags.json else "\n".join(done))
    return 0

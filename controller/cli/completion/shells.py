"""Completion scripts for bash, zsh and fish, and their installation."""

import os
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from controller.cli.flags import COMPLETION_QUERY
from controller.core.errors import ConfigError

COMPLETION_COMMAND = f"completion {COMPLETION_QUERY}"
MARKER = "# slipway completion"

BASH = f"""\
# Tab completion of slipway. https://www.gnu.org/software/bash/manual/html_node/Programmable-Completion.html
_slipway() {{
    local line="${{COMP_LINE:0:COMP_POINT}}" answer
    local typed="${{line##*[[:space:]]}}"
    local kept="${{typed%"$2"}}"   # readline ends a word at = and : as well, and replaces what follows only
    COMPREPLY=()
    while IFS=$'\\t' read -r answer _; do
        [[ "$answer" == "$typed"* ]] && COMPREPLY+=("${{answer#"$kept"}}")
    done < <(COMP_LINE="$line" "$1" {COMPLETION_COMMAND} 2>/dev/null)
    if [[ ${{#COMPREPLY[@]}} -eq 1 && "${{COMPREPLY[0]}}" == *[=.] ]]; then
        compopt -o nospace 2>/dev/null   # bash 3.2, of macOS, has none
    fi
}}
complete -o default -o nosort -F _slipway slipway 2>/dev/null || complete -o default -F _slipway slipway
"""
ZSH = f"""\
# Tab completion of slipway. https://zsh.sourceforge.io/Doc/Release/Completion-System.html
(( $+functions[compdef] )) || {{ autoload -Uz compinit && compinit; }}
_slipway() {{
    local -a whole open about_whole about_open
    local answer about
    while IFS=$'\\t' read -r answer about; do
        if [[ "$answer" == *[=.] ]]; then
            open+=("$answer"); about_open+=("$answer${{about:+  -- $about}}")
        else
            whole+=("$answer"); about_whole+=("$answer${{about:+  -- $about}}")
        fi
    done < <(COMP_LINE="${{(j: :)words[1,CURRENT-1]}} $PREFIX" "${{words[1]}}" {COMPLETION_COMMAND} 2>/dev/null)
    (( $#open + $#whole )) || {{ _default; return; }}
    (( $#open )) && compadd -Q -S '' -l -d about_open -a open
    (( $#whole )) && compadd -Q -l -d about_whole -a whole
    return 0
}}
compdef _slipway slipway
"""
FISH = f"""\
# Tab completion of slipway. https://fishshell.com/docs/current/completions.html
function __slipway_answers
    set -lx COMP_LINE (commandline --current-process --cut-at-cursor)
    set -l program (commandline --current-process --tokenize)[1]
    $program {COMPLETION_COMMAND} 2>/dev/null
end
complete --command slipway --no-files --keep-order --arguments '(__slipway_answers)'
complete --command slipway --condition 'string match -qr -- "--plan [^ ]*\\$" (commandline -pc)' --force-files
"""


@dataclass(frozen=True)
class Shell:
    """A shell. `file` holds the script; `start` is the startup file that loads it, None if the shell finds it."""

    script: str
    file: Callable[[Path], Path]
    startup_file: Callable[[], Path] | None


def _home(*parts: str) -> Path:
    return Path.home().joinpath(*parts)


SHELLS = {
    "bash": Shell(BASH, lambda state: state / "completion" / "slipway.bash", lambda: _home(".bashrc")),
    "zsh": Shell(
        ZSH,
        lambda state: state / "completion" / "slipway.zsh",
        lambda: Path(os.environ.get("ZDOTDIR") or Path.home()) / ".zshrc",
    ),
    "fish": Shell(
        FISH,
        lambda state: Path(os.environ.get("XDG_CONFIG_HOME") or _home(".config")) / "fish/completions/slipway.fish",
        None,
    ),
}


def resolve_shell(name: str | None) -> str:
    """Return the named shell, by default the user's own. Raises ConfigError if the shell is not supported."""
    found = name or Path(os.environ.get("SHELL", "")).name
    if found not in SHELLS:
        said = f"$SHELL is {found!r}" if found else "$SHELL is not set"
        message = f"unknown shell {name!r}" if name else f"{said}; name a shell: slipway completion install bash"
        raise ConfigError(f"completion: {message}; shells: {', '.join(SHELLS)}")
    return found


def install(name: str, state: Path) -> list[str]:
    """Write the script and the line that loads it; returns messages about what was done. Idempotent."""
    shell = SHELLS[name]
    file = shell.file(state)
    done = [_write_if_changed(file, shell.script)]
    if shell.startup_file is not None:
        start = shell.startup_file()
        line = f"[ -f {shlex.quote(str(file))} ] && . {shlex.quote(str(file))}  {MARKER}"
        done.append(_write_if_changed(start, _without_source_line(start) + f"{line}\n"))
    done.append(f"open a new {name}, or load it now: . {shlex.quote(str(file))}")
    return done


def uninstall(name: str, state: Path) -> list[str]:
    shell = SHELLS[name]
    file = shell.file(state)
    done = [f"deleted {file}" if file.is_file() else f"{file} does not exist"]
    file.unlink(missing_ok=True)
    if shell.startup_file is not None and (start := shell.startup_file()).is_file():
        done.append(_write_if_changed(start, _without_source_line(start)))
    return done


def _without_source_line(start: Path) -> str:
    """Return a startup file's text without our line, ending in a newline."""
    text = start.read_text() if start.is_file() else ""
    text = re.sub(rf"^.*{re.escape(MARKER)}$\n?", "", text, flags=re.MULTILINE)
    return text if not text or text.endswith("\n") else f"{text}\n"


def _write_if_changed(file: Path, text: str) -> str:
    if file.is_file() and file.read_text() == text:
        return f"{file} is up to date"
    file.parent.mkdir(parents=True, exist_ok=True)
    there = file.exists()
    file.write_text(text)
    return f"{'changed' if there else 'wrote'} {file}"

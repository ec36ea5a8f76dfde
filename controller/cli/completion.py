"""Tab completion: the answers, the scripts for bash, zsh and fish with their installation, and `slipway completion`."""

import os
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from conf.strict_json import dumps
from controller.cli.flags import COMPLETION_QUERY, HELP, VERBS, Flag, flags
from controller.cli.main import Command
from controller.core.errors import ConfigError
from controller.core.this_process import state_home

TAIL_BYTES = 400_000
"""Bytes read from the end of the table of runs, enough for some thousand runs."""
RUN_PATTERN = re.compile(rb'"run": ?"([\w.-]+)"')
SWEEP_PATTERN = re.compile(rb'"sweep": ?"([\w.-]+)"')
Completions = dict[str, str]
"""Replacements for the word under the cursor, each with a short description."""
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


def complete(line: str, folder: Path) -> Completions:
    """Complete a line up to the cursor; the first word is the program's name."""
    arguments = _split_line(line)[1:]
    if not arguments or "--" in arguments[:-1]:
        return {}
    *before, word = arguments
    verb = before[0] if before and before[0] in VERBS else "up"
    flag = _pending_flag(flags(verb), before)
    if flag is not None:
        found = _flag_values(flag)
    elif word.startswith("-"):
        found = {name: flag.help for flag in (*flags(verb), HELP) for name in flag.names if name.startswith("--")}
        found = {name: about for name, about in found.items() if name not in before or name == "--where"}
    else:
        found = {} if before else {name: each.help for name, each in VERBS.items()}
        found |= _complete_positional(verb, before)
        if VERBS[verb].config and (before or word):
            from controller.cli.hydra_completion import complete_override

            found |= dict.fromkeys(complete_override(word, before, folder), "")
        elif not before:
            found["+experiment="] = "short for `up +experiment=`"
    return {each: about for each, about in found.items() if each.startswith(word)}


def _split_line(line: str) -> list[str]:
    """Split a line as a shell does. The last word is under the cursor, may be empty, and may have an open quote."""
    for closing in ("", "'", '"'):
        try:
            arguments = shlex.split(f"{line}{closing}")
        except ValueError:
            continue
        return [*arguments, ""] if not closing and line[-1:].isspace() else arguments
    return []


def _pending_flag(known: Iterable[Flag], before: Sequence[str]) -> Flag | None:
    """Return the flag whose value is under the cursor."""
    for flag in known:
        count = 0 if flag.argparse_options.get("action") == "store_true" else flag.argparse_options.get("nargs") or 1
        for back in range(1, (count if isinstance(count, int) else 0) + 1):
            if flag.names[0].startswith("-") and len(before) >= back and before[-back] in flag.names:
                return flag
    return None


def _complete_positional(verb: str, before: Sequence[str]) -> Completions:
    """Complete a verb's positional argument, unless it is there already."""
    found: Completions = {}
    for flag in VERBS[verb].flags:
        if not flag.names[0].startswith("-") and before:
            choices = [each for each in flag.argparse_options.get("choices", ()) if each != COMPLETION_QUERY]
            found |= dict.fromkeys(choices, "") if len(before) == 1 else {}
            found |= (
                {name: each.help for name, each in VERBS.items()} if flag.completion == "verb" else _flag_values(flag)
            )
    return found


def _flag_values(flag: Flag) -> Completions:
    if flag.completion == "run":
        return _recent_ids(RUN_PATTERN)
    if flag.completion == "sweep":
        return _recent_ids(SWEEP_PATTERN)
    return {}


def _recent_ids(pattern: re.Pattern[bytes]) -> Completions:
    """Return the runs or sweeps that this machine knows, the newest first."""
    home = state_home()
    file = home / "runs" / "index.jsonl"
    found: Completions = {}
    if file.is_file():
        with file.open("rb") as rows:
            rows.seek(max(0, file.stat().st_size - TAIL_BYTES))
            found = dict.fromkeys((each.decode() for each in reversed(pattern.findall(rows.read()))), "")
    return found | dict.fromkeys((each.stem for each in home.glob("sweeps/*.json") if pattern is SWEEP_PATTERN), "")


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


def run_completion(command: Command) -> int:
    """`slipway completion`: print completions for shells, and settings for editors."""
    action, state = command.flags.action, state_home()
    if action == COMPLETION_QUERY:
        found = complete(os.environ.get("COMP_LINE", ""), Path.cwd())
        print(dumps(found) if command.flags.json else "\n".join(f"{word}\t{about}" for word, about in found.items()))
        return 0
    if action == "vscode":
        from controller.config.editor_schemas import FOLDER, editor_settings

        print(dumps(editor_settings(FOLDER), indent=1))
        return 0
    if action in SHELLS:
        print(SHELLS[action].script, end="")
        return 0
    act = install if action == "install" else uninstall
    done = act(resolve_shell(command.flags.shell), state)
    print(dumps({"done": done}) if command.flags.json else "\n".join(done))
    return 0

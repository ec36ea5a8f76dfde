"""Complete a command line: verbs, flags, runs and sweeps, and then Hydra's groups, choices and keys."""

import os
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from controller.cli.flags import COMPLETION_QUERY, HELP, VERBS, Flag, flags

TAIL_BYTES = 400_000
"""Bytes read from the end of the table of runs, enough for some thousand runs."""
RUN_PATTERN = re.compile(rb'"run": ?"([\w.-]+)"')
SWEEP_PATTERN = re.compile(rb'"sweep": ?"([\w.-]+)"')

Completions = dict[str, str]
"""Replacements for the word under the cursor, each with a short description."""


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
            from controller.cli.completion.hydra import complete_override

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
    home = Path(os.environ.get("SLIPWAY_HOME") or "~/.slipway").expanduser()
    file = home / "runs" / "index.jsonl"
    found: Completions = {}
    if file.is_file():
        with file.open("rb") as rows:
            rows.seek(max(0, file.stat().st_size - TAIL_BYTES))
            found = dict.fromkeys((each.decode() for each in reversed(pattern.findall(rows.read()))), "")
    return found | dict.fromkeys((each.stem for each in home.glob("sweeps/*.json") if pattern is SWEEP_PATTERN), "")

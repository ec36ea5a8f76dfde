"""Reference pages of the site, from the verbs and from the schema of the config."""

from __future__ import annotations

from functools import cache
from itertools import groupby
from typing import Any

from conf.strict_json import dumps
from controller.cli.flags import GROUPS, VERBS, Flag, Verb
from controller.cli.keys import Key, all_keys
from controller.config.origins import values_of_files

MOST_VALUES = 3
"""Different values of a key that its row lists."""

COMMANDS_HEAD = """# Commands

<!-- Made from controller/cli/flags.py when the site is built. -->

`slipway [VERB] [--flags] [+experiment=NAME] [group=choice …] [key.path=value …]`. The default verb is `up`.
`slipway VERB --help` prints the same on a terminal. How overrides work: [configuration](../configuration.md).
"""
KEYS_HEAD = """# Config keys

<!-- Made from conf/schema/ when the site is built. -->

Every key that a YAML file or an override may set, with its type, its bounds, what it does and what the files of its
group set. `slipway help KEY` prints the same, `slipway plan --config` what your run has and from which file. A section
with several kinds has a table for each.
"""


def commands_page() -> str:
    """Return the page of all verbs and their flags."""
    parts = [COMMANDS_HEAD]
    for group, title in GROUPS.items():
        parts.append(f"\n## {title.capitalize()}\n")
        parts += [_verb(name, verb) for name, verb in VERBS.items() if verb.group == group]
    return "\n".join(parts)


def _verb(name: str, verb: Verb) -> str:
    lines = [f"### slipway {name}", "", f"{verb.help[:1].upper()}{verb.help[1:]}. More: [{verb.page}](../{verb.page})."]
    lines += ["", "| flag | |", "|---|---|", *map(_flag, verb.flags)] if verb.flags else []
    lines += ["", "```", *(_example(name, words) for words in verb.examples), "```", ""]
    return "\n".join(lines)


def _flag(flag: Flag) -> str:
    value = flag.argparse_options.get("metavar", "")
    names = ", ".join(
        f"`{f'{name} {value}'.strip() if name.startswith('-') else value or name}`" for name in flag.names
    )
    return f"| {names} | {_cell(flag.help)} |"


def _example(name: str, words: str) -> str:
    return f"slipway {words}" if name == "up" else f"slipway {name} {words}".rstrip()


def keys_page() -> str:
    """Return the page of all config keys."""
    parts = [KEYS_HEAD]
    for section, keys in groupby(all_keys(), key=lambda key: key.path.partition(".")[0]):
        parts.append(f"\n## {section}\n")
        for (kind, about), found in groupby(keys, key=lambda key: (key.kind, key.about)):
            parts += [f"### {section}: {kind}", ""] if kind else []
            parts += [_cell(about), "", "| key | type | set in `conf/` | |", "|---|---|---|---|"]
            parts += [f"| `{key.path}` | {_cell(key.type)} | {_values(key)} | {_cell(key.help)} |" for key in found]
            parts.append("")
    return "\n".join(parts)


def _values(key: Key) -> str:
    """Return what the bundled files of the section set, by value."""
    section, kind = key.path.partition(".")[0], key.kind.removeprefix("kind=")
    found: dict[str, list[str]] = {}
    for file, values in _bundled():
        is_its = file.startswith(f"conf/{section}/") or file == "conf/config.yaml"
        if is_its and key.path in values and (not key.kind or values.get(f"{section}.kind") in (kind, None)):
            found.setdefault(dumps(values[key.path]), []).append(file.removeprefix("conf/"))
    if not found or len(found) > MOST_VALUES:
        return ""
    listed = [f"`{value}`" + (f" ({', '.join(files[:3])})" if len(found) > 1 else "") for value, files in found.items()]
    return _cell(", ".join(listed))


@cache
def _bundled() -> list[tuple[str, dict[str, Any]]]:
    return [(name, dict(values)) for name, values in values_of_files(None)]


def _cell(text: str) -> str:
    """Return text that one cell of a Markdown table can hold."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")

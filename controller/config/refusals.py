"""Why a config cannot be composed, in one line: the override or the file that is wrong, and what to write instead."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from controller.core.errors import ConfigError

MOST_SHOWN = 20
"""Values of a sweep that a message lists."""


@contextmanager
def explained(
    overrides: Sequence[str], extra_dir: Path | None, groups: Callable[[Path | None], Mapping[str, Sequence[str]]]
) -> Iterator[None]:
    """Raise ConfigError with the reason where Hydra, OmegaConf or YAML refuses something inside the block.

    They raise exceptions of many kinds, and bare ValueErrors, for what a user wrote.

    Args:
        overrides: as they were typed.
        extra_dir: folder of the user's own YAML.
        groups: returns the names of the files by group.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(_explain(error, overrides, extra_dir, groups(extra_dir))) from error


SECRET = re.compile(r"[+~]*(env|env\.secrets|notify|notify\.webhook)(\.[^.]*)?")
"""Keys below which somebody may have typed a secret: no message shows what."""


def several_values(key: str, value: str) -> str:
    if SECRET.fullmatch(key) and not key.startswith("env.vars"):
        return _hidden(key, "has several values, which are not shown")
    return f"{key}: {value!r} is several values; for a sweep add -m, for a list write '{key}=[{value}]'"


def unparsable(key: str, value: str, error: Exception) -> str:
    """Return why Hydra's grammar refuses a value: what a function of it says, or else how to quote the value."""
    if SECRET.fullmatch(key) and not key.startswith("env.vars"):
        return _hidden(key, "its value, which is not shown, cannot be parsed")
    reason = " ".join(str(error).split())
    if "while evaluating" in reason or "Unknown function" in reason:
        nested = re.search(r"Sweep is incompatible|nesting choices", reason)
        return f"{key}: {reason}{'; list the values in its place' if nested else ''}"
    return f"{key}: {value!r} cannot be parsed; {_quoting_hint(key, value)}"


def _hidden(key: str, problem: str) -> str:
    from conf.schema.problems import NAMED_SOURCES  # verbs that need no config import no schema

    return f"{key}: {problem}; {NAMED_SOURCES}"


def require_lone_functions(key: str, value: Any) -> None:
    """Raise ConfigError, with the cure, if a range, choice, interval or glob is in a list or beside other values."""
    from hydra.core.override_parser.types import ChoiceSweep, Glob, IntervalSweep, RangeSweep

    def inner(value: Any) -> Iterator[Any]:
        below = {ChoiceSweep: lambda: value.list, list: lambda: value, dict: lambda: value.values()}
        for child in below.get(type(value), tuple)():
            if isinstance(child, ChoiceSweep | Glob | IntervalSweep | RangeSweep):
                yield child
            else:
                yield from inner(child)

    def flat(value: Any) -> Iterator[Any]:
        for child in value.list if isinstance(value, ChoiceSweep) else range_values(key, value):
            yield from flat(child) if isinstance(child, ChoiceSweep | RangeSweep) else (child,)

    if not (found := [*inner(value)]):
        return
    names = {ChoiceSweep: "choice", Glob: "glob", IntervalSweep: "interval", RangeSweep: "range"}
    name = names[type(found[0])]
    cure = "list the values"
    if isinstance(found[0], IntervalSweep):
        cure = "an interval is for sweep.search, and the only value of its key"
    elif isinstance(value, ChoiceSweep) and all(isinstance(one, ChoiceSweep | RangeSweep) for one in found):
        values = [*flat(value)]
        if len(values) <= MOST_SHOWN and not any(isinstance(one, list | dict) for one in values):
            cure = f"list the values: '{key}={','.join(map(str, values))}'"
    raise ConfigError(f"{key}: {name}(…) cannot stand inside a list or beside other values; {cure}")


def range_values(key: str, sweep: Any, most: int = 10_000) -> list[Any]:
    """Return the values of Hydra's range. Raises ConfigError if it has none, or too many for a sweep."""
    start, stop, step = float(sweep.start), float(sweep.stop), float(sweep.step)
    if not step or not abs(start) + abs(stop) + abs(step) < float("inf"):
        raise ConfigError(f"{key}: range({sweep.start},{sweep.stop},{sweep.step}) has no end; its step cannot be 0")
    if not 0 < (stop - start) / step <= most:
        count = "no values" if (stop - start) / step <= 0 else f"more than {most} values"
        raise ConfigError(f"{key}: range({sweep.start},{sweep.stop},{sweep.step}) has {count}")
    return [*sweep.range()]


def _quoting_hint(key: str, value: str) -> str:
    """Say how a value must be written that Hydra's grammar does not accept."""
    if value.startswith("{") and re.search(r"[\"'][^\"']*[\"']\s*:", value):
        return f"write keys without quotes, and a colon in a key as \\:, as in '{key}={{module\\:name: 0.1}}'"
    if letters := [sign for sign in value if not sign.isascii()]:
        return f"quote a value with the character {letters[0]}: '{key}=\"{value}\"'"
    return f"quote values with commas, brackets or spaces: '{key}=\"…\"'"


def _explain(
    error: Exception, overrides: Sequence[str], extra_dir: Path | None, choices: Mapping[str, Sequence[str]]
) -> str:
    """Name the wrong file, or the wrong override and its choices, or return the library's message."""
    from yaml import YAMLError

    if isinstance(error, YAMLError):  # in a user's file, such as a tag that creates an object
        return " ".join(f"cannot compose the config: {error}".split())
    if isinstance(error, OSError) and error.filename:
        return f"cannot compose the config: {error.filename}: {error.strerror}"
    for override in overrides:
        if said := _wrong_choice(override, extra_dir, choices):
            return said
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        if refused := _parse_error(override):
            return unparsable(key, value, refused)
        if f"'{override}'" in str(error) and "Ambiguous value" in str(error):
            return several_values(key, value)
    return _reason(error, overrides, extra_dir)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]


def _wrong_choice(override: str, extra_dir: Path | None, choices: Mapping[str, Sequence[str]]) -> str:
    """Return what is wrong with an override that chooses a file of a group; empty if nothing is."""
    from conf.schema.problems import find_keys
    from controller.config.own_files import wrong_name

    key, equals, value = override.lstrip("+~").partition("=")
    group, at, _ = key.partition("@")
    if "." in group or not equals:
        return ""
    if group not in choices:
        if meant := find_keys(key):
            return f"{key}: unknown group; did you mean {' or '.join(f'{path}={value}' for path in meant)}?"
        near = difflib.get_close_matches(key, choices, n=1)
        hint = f"did you mean {near[0]}=…? " if near else ""
        return f"{key}: unknown group; {hint}groups: {', '.join(choices)}"
    name = value.strip("\"'")
    if name in choices[group] or (value.startswith("[") and at):
        return ""
    return f"{key}: {wrong_name(group, name, extra_dir, choices)}"


def _parse_error(override: str) -> Exception | None:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    try:
        OverridesParser.create().parse_override(override)
    except Exception as error:  # also a ValueError, of a number with thousands of digits
        return error
    return None


def _shown(file: Path, extra_dir: Path | None) -> str:
    return str(file.relative_to(extra_dir.parent)) if extra_dir else str(file)


def _reason(error: Exception, overrides: Sequence[str], extra_dir: Path | None) -> str:
    """Return the message of Hydra or OmegaConf, with the key that it is about and the file that sets it."""
    from conf.schema.base import successors
    from controller.config.own_files import where_set

    cause: BaseException = error
    while not str(cause).strip() and cause.__cause__ is not None:
        cause = cause.__cause__  # Hydra sometimes wraps its message in an exception without one
    message = _first_line(cause)
    if message.endswith(" raised while composing config:"):
        kind = " ".join(str(cause).partition("composing config:")[2].partition("full_key")[0].split())
        message = message.replace("ConfigTypeError raised while composing config:", kind)
        if re.search(r"DictConfig with ListConfig|ListConfig with DictConfig|incompatible container types", kind):
            message += "; a list stands where `key: value` belongs, or the other way round"
    place = None if isinstance(cause, RecursionError) else re.search(r"full_key: ([A-Za-z_]\S*)", str(cause))
    if refused := re.match(r"ConfigError raised while resolving interpolation: (.*)", message):  # by a resolver of ours
        return f"{place[1]}: {refused[1]}" if place else refused[1]
    found = re.search(r"(?:find|load) '(\w+)/([\w.-]+)'", message)
    if found and extra_dir and (folder := extra_dir / found[1] / f"{found[2]}.yaml").is_dir():
        message = f"{_shown(folder, extra_dir)} is a folder, not a file"
    named = re.findall(r"'([\w.]+)'", message)  # names from `~key` and ${key}
    renamed = ", ".join(name for key in named for name in successors(key.split(".")))
    where = f"{place[1]}: " if place else ""
    if place and (file := where_set(re.sub(r"\[(\d+)\]", r".\1", place[1]), extra_dir, overrides)):
        where += f"{file}: "
    return f"cannot compose the config: {where}{message}{f'; renamed to {renamed}' if renamed else ''}"

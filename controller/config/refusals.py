"""Why a config cannot be composed, in one line: the override or the file that is wrong, and what to write instead."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from controller.config.grammar_errors import hidden, is_secret, unparsable
from controller.config.texts import quote_numbers
from controller.core.errors import ConfigError

if TYPE_CHECKING:
    from controller.config.own_files import OwnFile

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


def several_values(key: str, value: str) -> str:
    if is_secret(key):
        return hidden(key, "has several values, which are not shown")
    from conf.schema.forms import THOUSANDS, expected
    from conf.schema.text_keys import types_at

    types = types_at((*key.split("."),))
    cure = "an interval is for sweep.search, with -m" if "interval(" in value else "for a sweep add -m"
    listed = f", for a list write '{key}=[{value}]'" if not types or expected(types).startswith("a list") else ""
    listed = f""", for one text '{key}="{value}"'""" if {*types} == {str} and '"' not in value else listed
    decimal = f", for a decimal write a point: {key}={value.replace(',', '.')}"
    point = decimal if float in types and re.fullmatch(r"\d+,\d+", value) else ""
    if {int, float} & {*types} and THOUSANDS.fullmatch(value):
        point = f", for thousands no comma: {key}={value.replace(',', '')}"
    return f"{key}: {value!r} is several values; {cure}{listed}{point}"


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
        if said := _wrong_choice(override, overrides, extra_dir, choices):
            return said
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        if refused := _parse_error(quote_numbers(override)):
            return unparsable(key, value, refused)
        if f"'{override}'" in str(error) and "Ambiguous value" in str(error):
            return several_values(key, value)
    return _reason(error, overrides, extra_dir)


def _wrong_choice(
    override: str, overrides: Sequence[str], extra_dir: Path | None, choices: Mapping[str, Sequence[str]]
) -> str:
    """Return what is wrong with an override that chooses a file of a group; empty if nothing is."""
    from conf.schema.foreign_keys import OTHER_FLAGS
    from conf.schema.forms import misspelled, program_line
    from conf.schema.text_keys import types_at
    from controller.config.own_defaults import wrong_name

    key, equals, value = override.lstrip("+~").partition("=")
    group, at, _ = key.partition("@")
    if "." in group or not equals:
        return ""
    if group not in choices:
        begun = [group for group, names in choices.items() if key.startswith(group) and value in names]
        if begun and not types_at((begun[0], key.removeprefix(begun[0]).lstrip("_"))):
            return f"{key}: unknown group; did you mean {'+' * (begun[0] == 'experiment')}{begun[0]}={value}?"
        meant = keys_meant(key, value, [word for word in overrides if word != override], extra_dir)
        if (line := program_line(value)) and (not meant or meant[0].startswith("program.")):
            return f"{key}: unknown group; did you mean `{line}`?"
        near = [group for group, names in choices.items() if value in names]
        if meant and not (len(near) == 1 and meant[0].endswith("=…")):
            return f"{key}: unknown group; did you mean {' or '.join(meant)}?"
        if said := OTHER_FLAGS.get(f"--{key.replace('_', '-')}"):
            return f"{key}: unknown group; {said}"
        longer = misspelled(key, choices) or [each for each in choices if each.startswith(key)]
        is_sure = longer and (len(key) > 4 or value in choices[longer[0]])  # mode=x is not model=x
        near = near if len(near) == 1 else longer if is_sure else []
        hint = f"did you mean {near[0]}={value if value in choices[near[0]] else '…'}? " if near else ""
        said = "a key stands behind its section, as in loop.steps=300"
        return f"{key}: unknown group; {hint}{said}; groups: {', '.join(choices)}"
    name = value.strip("\"'")
    if name in choices[group] or (value.startswith("[") and at):
        return ""
    return f"{key}: {wrong_name(group, name, extra_dir, choices)}"


def keys_meant(name: str, value: str, overrides: Sequence[str], extra_dir: Path | None) -> list[str]:
    """Return `key=value` for each key that a word means: of the overrides' config if it has one, else of any."""
    from conf.schema.unknown_keys import assignment, takes
    from controller.config.compose import compose_raw

    raw = None
    with suppress(ConfigError):  # then keys of any config are better than none
        raw = compose_raw(overrides, extra_dir=extra_dir) if overrides else None
    meant = keys_called(name, raw, value) or keys_called(name, given=value)
    taking = [each for each in meant if takes(each, value)] or (meant if len(meant) == 1 else [])
    return [assignment(each, value) for each in taking]


def keys_called(name: str, raw: Any = None, given: Any = True) -> list[str]:
    """Return the dotted keys that a word without a section means: `lr`, `wandb_entity`, `loop/steps`, `max_steps`.

    raw: the composed data, which have the keys; None: keys of any config.
    """
    from conf.schema.text_keys import types_at
    from conf.schema.unknown_keys import inside_keys, keys_named

    dotted = name.replace("/", ".")
    if "." in dotted:
        return [dotted] if types_at((*dotted.split("."),)) else []
    return keys_named(name, raw, given) or inside_keys(name, raw)


def _parse_error(override: str) -> Exception | None:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    try:
        OverridesParser.create().parse_override(override)
    except Exception as error:  # also a ValueError, of a number with thousands of digits
        return error
    return None


def _reason(error: Exception, overrides: Sequence[str], extra_dir: Path | None) -> str:
    """Return the message of Hydra or OmegaConf, with the key that it is about and the file that sets it."""
    from controller.config.own_files import where_set

    cause: BaseException = error
    while not str(cause).strip() and cause.__cause__ is not None:
        cause = cause.__cause__  # Hydra sometimes wraps its message in an exception without one
    message, text = (str(cause).strip() or repr(cause)).splitlines()[0], str(cause)
    place = None if isinstance(cause, RecursionError) else re.search(r"full_key: ([A-Za-z_]\S*)", text)
    key = re.sub(r"\[(\d+)\]", r".\1", place[1]) if place else ""
    if refused := re.match(r"ConfigError raised while resolving interpolation: (.*)", message):  # by a resolver of ours
        return f"{key}: {refused[1]}" if key else refused[1]
    where = f"{key}: " if key else ""
    if key and (file := where_set(key, extra_dir, overrides)):
        where += f"{file}: "
    if said := _in_our_words(" ".join(text.partition("full_key")[0].split()), key, extra_dir, overrides):
        return f"{where}{said}"
    found = re.search(r"(?:find|load) '(\w+)/([\w.-]+)'", message)
    file = extra_dir / found[1] / f"{found[2]}.yaml" if found and extra_dir else None
    if file is not None and (file.is_dir() or file.is_symlink()):
        what = "a folder, not a file" if file.is_dir() else "a link to a file that does not exist"
        return f"{file.relative_to(extra_dir.parent) if extra_dir else file} is {what}"
    return f"cannot compose the config: {where}{message}"


def _in_our_words(message: str, key: str, extra_dir: Path | None, overrides: Sequence[str]) -> str:
    """Return what Hydra and OmegaConf often say, with the cure; empty for another message."""
    from conf.schema.forms import expected
    from conf.schema.text_keys import types_at

    if found := re.search(r"Interpolation key '(.+?)' not found", message):
        return _no_such_key(found[1], key, extra_dir, overrides)
    if found := re.search(r"Could not delete from config\. '(.+?)' does not exist", message):
        return f"~{found[1]}: there is no such key to remove{_near_key(found[1], '; did you mean ~{}?')}"
    if re.search(r"DictConfig with ListConfig|ListConfig with DictConfig|incompatible container types", message):
        types = types_at((*key.split("."),))
        return (
            f"must be {expected(types)}"
            if types
            else "a list stands where `key: value` belongs, or the other way round"
        )
    for pattern, said in IN_OUR_WORDS:
        if found := re.search(pattern, message):
            return said.format(*found.groups(), key=re.sub(r"\.\d+$", "", key))
    return ""


COMPUTED = "${{…}} is one key's value, and nothing is computed; write the result"
IN_OUR_WORDS = (
    (r"Environment variable '(.+?)' not found", "the variable {0} is not set here; set it, or write a default: "
     "${{oc.env:{0},DEFAULT}}"),
    (r"missing \d+ required positional argument", "the name is missing: ${{oc.env:NAME}} reads a variable"),
    (r"Unsupported interpolation type e?n?v?(\S*)", "there is no such ${{…:…}}; ${{oc.env:NAME}} reads a variable, "
     "${{KEY}} another key"),
    (r"HydraConfig was not set", "Slipway takes no settings of Hydra, so ${{hydra:…}} has no value; write it out"),
    (r"token recognition error at: ' ?[(*/%+-]", COMPUTED),
    (r"no viable alternative at input|mismatched input|token recognition error|extraneous input", "no }} closes the "
     "${{; a text with it is written \\${{"),
    (r"Recursive interpolation", "${{…}} refers to {key} itself; write the value"),
    (r"Could not delete '(.+?)=(.+?)'", "~{0}={1}: it is not {1} that is chosen; ~{0} removes what is"),
    (r"Could not override '(\w+)'", "{0} is no group that a config chooses; put its keys into an experiment, or write "
     "{0}.KEY=…"),
    (r"list index out of range|list assignment index|is not an int|not a valid list index", "set the whole list: "
     "'{key}=[…]'"),
)  # fmt: skip
"""What is searched for in a message, and what is said in its place."""


def _no_such_key(name: str, key: str, extra_dir: Path | None, overrides: Sequence[str]) -> str:
    """Say why ${name} in a key has no value: its file has no base, or the name is a variable's or misspelled."""
    from conf.schema.text_keys import types_at
    from controller.config.compose import NOT_SECRET, SECRET_NAME
    from controller.config.own_files import without_base
    from controller.config.run_yaml import PLACEHOLDER

    section = name.partition(".")[0]
    before = re.sub(r"-\d+$", "", name)  # as of gpt-2, which is a name, unless it is a number's
    if re.search(r"[*/+]", name) or (before != name and {int, float} & {*types_at((*before.split("."),))}):
        return COMPUTED.format()
    if file := without_base(section, extra_dir, overrides):
        return f"{file.shown}: lacks {name}; {base_cure(section, file)}"
    if PLACEHOLDER.fullmatch(f"{{{name}}}") and key.startswith(("env.vars", "program")):
        return f"there is no key {name}; what Slipway fills in has no $: {{{name}}}"
    if name in os.environ or re.fullmatch(r"[A-Z][A-Z0-9_]*", name):
        if is_secret(key):
            return f"there is no key {name}; the source of a secret is env:{name}"
        if SECRET_NAME.search(name) and name not in NOT_SECRET:
            return f"there is no key {name}; a secret is passed on by env.secrets.{name}=env"
        return f"there is no key {name}; the environment's variable is ${{oc.env:{name}}}"
    return f"there is no key {name}{_near_key(name, '; did you mean ${{{}}}?')}"


def base_cure(section: str, file: OwnFile) -> str:
    """Say how a file of a group begins that is to have the keys of the bundled file with which it shares the most."""
    from controller.config.compose import CONFIG_DIR, config_groups

    own = {text for key, value in file.root.value for text in (key.value, f"{key.value}: {value.value}")}
    names, texts, alike = config_groups()[section], dict[str, set[str]](), dict[str, set[str]]()
    for name in names:
        lines = (CONFIG_DIR / section / f"{name}.yaml").read_text().splitlines()
        texts[name] = {text for line in lines for text in (line, line.partition(":")[0])}
        alike[name] = own & texts[name]
    if kind := next((text for text in own if text.startswith("kind: ")), ""):
        named = {name for name in names if any(text.startswith("kind: ") for text in texts[name])}
        names = [name for name in names if kind in alike[name]] or [name for name in names if name not in named]
    names = sorted(names, key=lambda name: (-len(alike[name]), f"kind: {name}" != kind))
    others = f", or with another of {', '.join(names[1:])}" if names[1:] else ""
    return f"begin it with `defaults: [{names[0]}, _self_]`{others}"


def _near_key(name: str, form: str) -> str:
    """Return which key is meant by an unknown one, in a form; empty if none is near."""
    from conf.schema.unknown_keys import unknown_key

    found = re.search(r"did you mean ([\w.]+)", unknown_key({}, name.split("."), None))
    return form.format(found[1]) if found else ""

"""What a key means that the config does not have: one of the kinds that it names, in its section or in another.

What is proposed is a key that this config has; a key of another loop or optimizer would be refused next.
"""

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

import conf
from conf.schema.config import Config
from conf.schema.foreign_keys import FOREIGN, OTHER_FLAGS
from conf.schema.forms import repaired
from conf.schema.text_keys import alternatives, types_at, types_below

NEAR = 0.65
"""Least similarity of a key to what was typed."""
UNLIKELY = ("sweep.", "code.")
"""Sections whose keys are called as things are elsewhere: params, url, resources."""
NEARER = 0.85
"""The same where another section has a key of just that name."""
FEW = 30
"""Most keys of a section that a message lists."""
SIMPLE = re.compile(r"[\w.+-]+")
"""A value that stands for itself: no list, sweep or interpolation."""


def unknown_key(raw: dict[str, Any], path: Sequence[str], given: Any) -> str:
    """Return what is wrong with a key, and which one is meant.

    Args:
        raw: the composed data.
        path: parts of the key.
        given: its value.
    """
    section, name, inside = path[0], path[-1], "".join(f"{part}." for part in path[:-1])
    if "." in name and section == "sweep":
        return f"unknown key; a key that the sweep varies stands below params: `{name}: …`"
    if "." in name:
        nested = name.replace(".", ": {") + ": …" + "}" * name.count(".")
        return f"a key of a file has no dots; write {nested}, or a line for each part"
    known = _keys_here(raw, path[:-1])
    foreign = foreign_keys(raw, name, section)
    own = [each for each in foreign if each.startswith(f"{section}.")]
    if name in Config.model_fields and not own and not difflib.get_close_matches(name, known, n=1, cutoff=0.9):
        return f"unknown key; {name} is a section of its own, at the left margin of a file: {name}.…=…"
    if len(path) == 2 and name == "name" and (folder := Path(conf.__file__).with_name(section)).is_dir():
        file = given if (folder / f"{given}.yaml").is_file() else "NAME"
        way = f"{section}={file}, in a file `override /{section}: {file}` in `defaults`"
        return f"unknown key; a file of the group is chosen: {way}"
    found = find_keys(name, raw, section)
    elsewhere = [each for each in found if each.startswith(f"{section}.") or not each.startswith(UNLIKELY)]
    elsewhere = [each for each in elsewhere if not choices_at(each) or takes(each, given)]
    refusing = {each for each in known if choices_at(f"{inside}{each}") and not takes(f"{inside}{each}", given)}
    longer = [e for e in known if e.lower() == name.lower() or (e.startswith(f"{name}_") and e not in refusing)]
    if len(longer) == 1:
        return f"unknown key; did you mean {inside}{longer[0]}?"
    same = own or [each for each in elsewhere if each.startswith(f"{section}.")]
    cutoff = NEARER if elsewhere else NEAR
    near = [] if same else difflib.get_close_matches(name, known - refusing, n=1, cutoff=cutoff)
    parts = [f"{section}.{each}" for each in sorted(known) if name.lower() in each.split("_")]
    of_value = [f"{inside}{each}" for each in sorted(known) if given in choices_at(f"{inside}{each}")]
    leaves = {key: None for leaf in (given if isinstance(given, dict) else ()) for key in keys_named(str(leaf), raw)}
    few = (each[: 3 * (len(each) < 4)] for each in (of_value, parts, [*leaves]))
    meant = same or [f"{inside}{each}" for each in near] or foreign or elsewhere or next(filter(None, few), [])
    if meant:
        return f"unknown key; did you mean {' or '.join(each.removesuffix('=…') for each in meant)}?"
    if said := OTHER_FLAGS.get(f"--{name.replace('_', '-')}"):
        return f"unknown key; {said}"
    listed = f"choices: {', '.join(sorted(known))}" if len(known) <= FEW else f"`slipway help {inside[:-1]}` lists them"
    return f"unknown key; {listed}"


def keys_named(name: str, raw: Any) -> list[str]:
    """Return the dotted keys that a word without a section means, ours or another tool's."""
    foreign = foreign_keys(raw, name)
    return [*dict.fromkeys([*foreign, *(find_keys(name, raw) if len(foreign) != 1 else ())])]


def choices_at(key: str) -> list[Any]:
    """Return the words that a key takes if it takes nothing else."""
    types = types_at((*key.split("."),))
    is_closed = all(get_origin(each) is Literal for each in types)
    return [*dict.fromkeys(choice for each in types for choice in get_args(each))] if is_closed else []


def takes(key: str, given: Any) -> bool:
    """Return whether a key takes a value that was typed for another; one of text takes each, and so do lists."""
    types = types_at((*key.partition("=")[0].split("."),))
    is_plain = types and all(each in (int, float, bool) or get_origin(each) is Literal for each in types)
    text = str(given).lower()
    if "=" in key or not is_plain or not SIMPLE.fullmatch(text) or text in ("null", "none"):
        return True
    is_switch = text in ("true", "false")
    return (bool in types) if is_switch else any(repaired(each, str(given)) is not None for each in types)


def assignment(keys: str, given: str) -> str:
    """Return `key=value` for a key, or for each of `A and B`; what it takes in place of a value that it does not."""
    words = ((key, given if takes(key, given) else "|".join(map(str, choices_at(key)))) for key in keys.split(" and "))
    return " ".join(key if "=" in key else f"{key}={word or '…'}" for key, word in words)


def foreign_keys(raw: Any, name: str, section: str = "") -> list[str]:
    """Return what another tool's key is called in this config."""
    meant = FOREIGN.get(name.lower(), "")
    here = [each for each in meant.split(" or ") if all(_is_here(raw, key) for key in each.split(" and "))]
    return here or find_keys(meant.partition("=")[0].rpartition(".")[2], raw, section)


def _is_here(raw: Any, key: str) -> bool:
    *section, name = key.partition("=")[0].split(".")
    return name in _keys_here(raw, section)


def _keys_here(raw: Any, section: Sequence[str]) -> set[str]:
    """Return the keys of a section of the kinds that the data name; of every kind where they name none."""
    models: list[Any] = [Config]
    for part in section:
        models = [each for model in _chosen(models, raw) for each in types_below(model, part)]
        raw = raw[int(part)] if isinstance(raw, list) else raw.get(part) if isinstance(raw, dict) else None
    return {name for model in _chosen(models, raw) if is_model(model) for name in model.model_fields}


def _chosen(types: Sequence[Any], raw: Any) -> Sequence[Any]:
    """Return those of the types that have the kind of the data, or all."""
    kind = raw.get("kind") if isinstance(raw, dict) else None
    return [each for each in types if kind in kinds_of([each])] or types


def is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def kinds_of(types: Sequence[Any]) -> list[str]:
    """Return the kinds of a section by its types; none if it has but one."""
    fields = [each.model_fields["kind"].annotation for each in types if is_model(each) and "kind" in each.model_fields]
    return [*dict.fromkeys(kind for annotation in fields for kind in get_args(annotation))]


def sibling_keys(path: Sequence[str]) -> set[str]:
    """Return the keys the schema allows in place of the last one in `path`, for every kind of the section."""
    return {name for each in types_at((*path[:-1],)) if is_model(each) for name in each.model_fields}


def find_keys(name: str, raw: Any = None, section: str = "") -> list[str]:
    """Return up to three dotted keys that end in `name`, for a user who omitted the section.

    Args:
        name: last part of the key.
        raw: the composed data, whose kinds decide which keys there are.
        section: section that has it first; then it is `run`, whose names and numbers are those of everything.
    """
    found: dict[str, None] = {}
    todo: list[tuple[str, type[BaseModel], Any]] = [("", Config, raw)]
    while todo:
        prefix, model, data = todo.pop(0)
        for key, info in model.model_fields.items():
            path = f"{prefix}{key}"
            if key == name and prefix:
                found[path] = None
            if get_origin(info.annotation) is not tuple and path.count(".") < 2:  # items of a list have no keys
                below = data.get(key) if isinstance(data, dict) else None
                models = [each for each in alternatives(info.annotation) if is_model(each)]
                todo += [(f"{path}.", each, below) for each in _chosen(models, below)]
    for first in (f"{section}.", "run."):
        if of_first := [each for each in found if each.startswith(first)]:
            return of_first[:3]
    return list(found)[:3]

"""What a key means that the config does not have: one of the kinds that it names, in its section or in another.

What is proposed is a key that this config has; a key of another loop or optimizer would be refused next.
"""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel

import conf
from conf.schema.config import Config
from conf.schema.foreign_keys import FOREIGN
from conf.schema.text_keys import alternatives, types_at, types_below

NEAR = 0.65
"""Least similarity of a key to what was typed."""
UNLIKELY = ("sweep.", "code.")
"""Sections whose keys are called as things are elsewhere: params, url, resources."""
NEARER = 0.85
"""The same where another section has a key of just that name."""


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
    longer = [each for each in known if each.lower() == name.lower() or each.startswith(f"{name}_")]
    if len(longer) == 1:
        return f"unknown key; did you mean {inside}{longer[0]}?"
    same = own or [each for each in elsewhere if each.startswith(f"{section}.")]
    cutoff = NEARER if elsewhere else NEAR
    near = [] if same else difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    parts = [f"{section}.{each}" for each in sorted(known) if name.lower() in each.split("_")]
    meant = same or [f"{inside}{each}" for each in near] or foreign or elsewhere or parts[: 3 * (len(parts) < 4)]
    if meant:
        return f"unknown key; did you mean {' or '.join(meant)}?"
    return f"unknown key; choices: {', '.join(sorted(known))}"


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

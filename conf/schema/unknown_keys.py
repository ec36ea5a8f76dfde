"""What a key means that the config does not have: one of the kinds that it names, in its section or in another.

What is proposed is a key that this config has; a key of another loop or optimizer would be refused next.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

import conf
from conf.schema.config import Config
from conf.schema.foreign_keys import FOREIGN, OTHER_FLAGS
from conf.schema.forms import misspelled, program_line, repaired
from conf.schema.text_keys import alternatives, types_at, types_below

NEAR = 0.65
"""Least similarity of a key to what was typed."""
UNLIKELY = ("sweep.", "code.", "model.experts.", "cloud.port", "network.mode")
"""Keys that are called as things are elsewhere: params, url, resources, port."""
NEARER = 0.85
"""The same where another section has a key of just that name."""
FEW = 30
"""Most keys of a section that a message lists."""
OFF = ("false", "no", "off", "none", "null", "0")
"""Values that turn another tool's switch off."""
GENERAL = ("auto", "none", "full")
"""Choices that say nothing of their key."""
TRAINING = ("data", "loop", "model", "optimizer")
OF_PODS = ("tpu.", "cloud.", "budget.")
"""What is unknown in a section of the training means no key of these."""
SIMPLE = re.compile(r"[\w.+-]+")
"""A value that stands for itself: no list, sweep or interpolation."""


def unknown_key(raw: dict[str, Any], path: Sequence[str], given: Any) -> str:
    """Return what is wrong with a key, and which one is meant.

    Args:
        raw: the composed data.
        path: parts of the key.
        given: its value.
    """
    section, name, inside = path[0], _snake(path[-1]), "".join(f"{part}." for part in path[:-1])
    if "." in name and section == "sweep":
        return f"unknown key; a key that the sweep varies stands below params: `{name}: …`"
    if "." in name:
        nested = name.replace(".", ": {") + ": …" + "}" * name.count(".")
        return f"a key of a file has no dots; write {nested}, or a line for each part"
    known = _keys_here(raw, path[:-1])
    foreign = foreign_keys(raw, name, section, given)
    own = [each for each in foreign if each.startswith(f"{section}.")]
    if name in Config.model_fields and not own and not misspelled(name, known, 0.9):
        return f"unknown key; {name} is a section of its own, at the left margin of a file: {name}.…=…"
    if section == "env" and len(path) == 2 and path[1].isupper():
        return f"unknown key; did you mean env.vars.{path[1]}, or env.secrets.{path[1]}, which is never recorded?"
    group = section if len(path) == 2 else next((each for each in Config.model_fields if name.startswith(each)), name)
    folder = Path(conf.__file__).with_name(group)
    is_file = re.fullmatch(r"[\w-]+", str(given)) is not None and (folder / f"{given}.yaml").is_file()
    names_file = len(path) == 2 and (name == "name" or (name == "size" and section in ("model", "tpu")))
    if len(path) < 3 and folder.is_dir() and (names_file or (is_file and name.startswith(group))):
        file = given if is_file else "NAME"
        way = f"{group}={file}, in a file `override /{group}: {file}` in `defaults`"
        return f"unknown key; a file of the group is chosen: {way}"
    found = find_keys(name, raw, section) or (inside_keys(name, raw) if len(path) == 1 else [])
    elsewhere = [each for each in found if each.startswith(f"{section}.") or not each.startswith(UNLIKELY)]
    elsewhere = [each for each in elsewhere if not choices_at(each) or takes(each, given)]
    refusing = {each for each in known if choices_at(f"{inside}{each}") and not takes(f"{inside}{each}", given)}
    longer = [e for e in known if e == name or (e.startswith(f"{name}_") and e not in refusing)]
    if not foreign:
        longer = longer or [e for e in known if len(e) > 2 and re.fullmatch(f"{e}[a-z]+", name)]  # dimension is dim
    if len(longer) == 1:
        return f"unknown key; did you mean {inside}{longer[0]}?"
    same = own or [each for each in elsewhere if each.startswith(f"{section}.")]
    cutoff = NEARER if elsewhere else NEAR
    is_foreign = len(path) == 1 and foreign and name in FOREIGN  # so envs is not env
    near = [] if same or is_foreign else misspelled(name, known - refusing, cutoff)[:1]
    parts = [f"{inside}{each}" for each in sorted(known) if name.lower() in each.split("_")]
    if section in TRAINING:
        foreign = [each for each in foreign if not each.startswith(OF_PODS)]
    word = str(given).lower()
    of_value = [f"{inside}{each}" for each in sorted(known) if word in choices_at(f"{inside}{each}")]
    named = [keys_named(str(leaf), raw, value) for leaf, value in given.items()] if isinstance(given, dict) else []
    leaves = [*dict.fromkeys(keys[0] for keys in named if len(keys) == 1)]
    few, parts = of_value[: 3 * (len(of_value) < 4)], parts[: 3 * (len(parts) < 4)]
    sure = few if len(few) == 1 and word not in GENERAL else []
    meant = sure or same or [f"{inside}{each}" for each in near] or (parts if not elsewhere else [])
    of_name = [f"{inside}{each}={name}" for each in sorted(known) if name in choices_at(f"{inside}{each}")]
    meant = meant or leaves[:3] or of_name[:2] or foreign or elsewhere or few
    if len(path) == 1 and meant in ([], ["program.command"]) and (line := program_line(str(given))):
        return f"unknown key; did you mean `{line}`?"
    if meant:
        return f"unknown key; did you mean {' or '.join(each.removesuffix('=…') for each in meant)}?"
    said = OTHER_FLAGS.get(f"--{name.replace('_', '-')}")
    if said and name not in FOREIGN:
        return f"unknown key; {said}"
    listed = f"choices: {', '.join(sorted(known))}" if len(known) <= FEW else f"`slipway help {inside[:-1]}` lists them"
    return f"unknown key; {listed}"


def keys_named(name: str, raw: Any, given: Any = True) -> list[str]:
    """Return the dotted keys that a word without a section means, ours or another tool's."""
    foreign = foreign_keys(raw, name, given=given)
    found = [each for each in find_keys(name, raw) if each not in UNLIKELY]
    return [*dict.fromkeys([*foreign, *(found if len(foreign) != 1 else ())])]


def inside_keys(name: str, raw: Any) -> list[str]:
    """Return the keys that `lora_alpha` or `wandb_entity` means: the last part, inside a section of the first."""
    section, _, rest = name.partition("_")
    if rest and types_at((section, rest)):
        return [f"{section}.{rest}"]
    return [key for key in find_keys(rest, raw) if section in key.split(".")]


def choices_at(key: str) -> list[Any]:
    """Return the words that a key takes if it takes nothing else."""
    types = types_at((*key.split("."),))
    is_closed = all(get_origin(each) is Literal for each in types)
    return [*dict.fromkeys(choice for each in types for choice in get_args(each))] if is_closed else []


def takes(key: str, given: Any) -> bool:
    """Return whether a key takes a value that was typed for another; one of text takes each, and so do lists."""
    types = types_at((*key.partition("=")[0].split("."),))
    if types and all(map(is_model, types)) and SIMPLE.fullmatch(str(given)) and given not in ("true", "false"):
        return str(given) in kinds_of(types)
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


def foreign_keys(raw: Any, name: str, section: str = "", given: Any = True) -> list[str]:
    """Return what another tool's key is called in this config; of a switch, what its value means."""
    plain = _snake(name)
    written = FOREIGN.get(plain) or next((FOREIGN[near] for near in misspelled(plain, FOREIGN, 0.9)), "")
    meant, is_switch, off = written.partition("|")
    if is_switch and str(given).lower() in OFF:
        meant = f"{meant.partition('=')[0]}={off}"
    here = [each for each in meant.split(" or ") if all(_is_here(raw, key) for key in each.split(" and "))]
    return here or find_keys(meant.partition("=")[0].rpartition(".")[2], raw, section)


def _snake(name: str) -> str:
    """Return a name such as maxSteps or max-steps as keys are written."""
    return re.sub(r"(?<=[a-z\d])(?=[A-Z])", "_", name).replace("-", "_").lower()


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
    """Return those of the types that have the kind of the data, or need none; all without data, or if none has."""
    kind = raw.get("kind") if isinstance(raw, dict) else ""
    kinds = {each: kinds_of([each]) for each in types}
    is_free = {each: not (kinds[each] and each.model_fields["kind"].is_required()) for each in types}
    return [each for each in types if kind in kinds[each] or (kind is None and is_free[each])] or types


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

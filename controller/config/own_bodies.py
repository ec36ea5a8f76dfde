"""What is wrong with the keys of a file of the user's: none of the config, at the wrong margin, or of another shape."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel

from controller.config.own_defaults import Groups
from controller.config.yaml_errors import WRONG_SPACE, closed_up, wrong_space

if TYPE_CHECKING:
    from controller.config.own_files import OwnFile

HEADER = "# @package _global_"
NULL = "tag:yaml.org,2002:null"


def wrong_body(file: OwnFile, groups: Groups, base: Groups) -> Iterator[str]:
    """Yield what is wrong with the keys at the left margin of a file."""
    from conf.schema.config import Config
    from conf.schema.unknown_keys import sibling_keys

    is_section = file.group in Config.model_fields
    names = [str(key.value) for key, _ in file.root.value]
    based = any(isinstance(entry, yaml.ScalarNode) and entry.value != "_self_" for entry in file.defaults)
    own = {*names} & sibling_keys([file.group, ""]) - Config.model_fields.keys()
    if file.is_global and is_section and (own or based):
        yield f"{file.shown}, line 1: remove {HEADER!r}; a file of {file.group} begins with the keys of {file.group}"
        return
    if any(WRONG_SPACE.search(name) for name in names):  # what stands below them is not what it looks like
        for key, _ in file.root.value:
            if found := WRONG_SPACE.search(str(key.value)):
                yield f"{file.place(key)}: {wrong_space(found[0])}"
        return
    for key, value in file.root.value:
        if str(key.value) == file.group and isinstance(value, yaml.MappingNode) and not (file.is_global and is_section):
            yield f"{file.place(key)}: {file.group}: remove this line, and move its keys to the left margin"
        elif file.is_global and (said := _wrong_top(str(key.value), value, groups, base)):
            yield f"{file.place(key)}: {said}"


def _wrong_top(name: str, value: yaml.Node, groups: Groups, base: Groups) -> str:
    """Return what is wrong with a key of the whole config that a file sets: a group, or no section at all."""
    from conf.schema.config import Config
    from conf.schema.text_keys import types_at
    from conf.schema.unknown_keys import unknown_key

    is_known, is_null = name in Config.model_fields, value.tag == NULL
    if is_null and isinstance(value, yaml.ScalarNode) and is_known:
        return (
            ""
            if value.value
            else f"{name}: is empty, which removes the section; leave the line out, or write null if it is meant"
        )
    if name in base and isinstance(value, yaml.ScalarNode) and not is_null:
        if closed_up(value.value) or WRONG_SPACE.search(value.value):
            return ""  # `wrong_shapes` says it
        word, _, rest = value.value.partition(" ")
        if rest and types_at((name, word)):
            return f"{name}: a colon is missing: `{word}: {rest}`"
        says = "" if value.value in groups[name] else f"; choices: {', '.join(groups[name])}"
        return f"{name} is a group; put `- override /{name}: {value.value}` under `defaults`{says}"
    if name in base and not is_known and not is_null:
        return f"{name} is a group; put `- override /{name}: NAME` under `defaults`"
    if name == "hydra":
        return "hydra: Slipway takes no settings of Hydra; leave the section out"
    if is_known or name in groups or name == "defaults" or "." in name:  # the schema says how to write a dot
        return ""
    if _has_anchor(value):
        return f"{name}: unknown key; put the anchor where its section stands first, as in `loop: &name`"
    stem = value.value.removesuffix(".yaml") if isinstance(value, yaml.ScalarNode) else ""
    if stem in groups.get("experiment", ()):
        return f"{name}: unknown key; a base is named in `defaults: [{stem}, _self_]`"
    if near := difflib.get_close_matches(name, ["defaults"], n=1, cutoff=0.65):
        return f"{name}: unknown key; did you mean {near[0]}?"
    return f"{name}: {unknown_key({}, [name], yaml.SafeLoader('').construct_document(value))}"


def _has_anchor(node: yaml.Node) -> bool:
    mark = node.start_mark
    return mark.buffer is not None and mark.buffer[mark.pointer : mark.pointer + 1] == "&"


def wrong_shapes(file: OwnFile) -> Iterator[str]:
    """Yield where a list stands for a mapping of the schema, or a mapping for a list: Hydra cannot merge these."""
    from conf.schema.config import Config

    def walk(node: yaml.Node, annotation: Any, key: str) -> Iterator[str]:
        models, shapes = _shapes(annotation)
        if shapes == {"mapping"} and isinstance(node, yaml.SequenceNode):
            yield f"{file.place(node)}: {key}: must be `key: value` lines, not a list"
        elif shapes == {"list"} and isinstance(node, yaml.MappingNode):
            yield f"{file.place(node)}: {key}: must be a list, not `key: value` lines"
        elif isinstance(node, yaml.ScalarNode):
            yield from _wrong_scalar(file, node, key, is_section="mapping" in shapes)
        elif isinstance(node, yaml.MappingNode):
            for name, child in node.value:
                if found := WRONG_SPACE.search(str(name.value)):
                    yield f"{file.place(name)}: {key}: {wrong_space(found[0])}"
                    continue
                fields = [m.model_fields[name.value] for m in models if str(name.value) in m.model_fields]
                if fields:
                    yield from walk(child, Union[tuple(f.annotation for f in fields)], f"{key}.{name.value}")  # noqa: UP007

    for name, node in file.root.value if file.is_global else [(yaml.ScalarNode("", file.group), file.root)]:
        if name.value in Config.model_fields:
            yield from walk(node, Config.model_fields[name.value].annotation, name.value)


def _wrong_scalar(file: OwnFile, node: yaml.ScalarNode, key: str, *, is_section: bool) -> Iterator[str]:
    """Yield a space that is none before a value, and `key:value` in place of a section."""
    search = WRONG_SPACE.search if is_section else WRONG_SPACE.match
    if node.value == "???":
        yield f"{file.place(node)}: {key}: ??? is no value; write it, or leave the line out"
    elif found := re.search(r"(?<!\\)\$\{(\{[^{}]*\})\}", node.value):
        yield f"{file.place(node)}: {key}: one brace is enough: ${found[1]}"
    elif node.style is None and (found := search(node.value)):
        yield f"{file.place(node)}: {key}: {wrong_space(found[0])}"
    elif is_section and node.style is None and (said := closed_up(node.value)):
        yield f"{file.place(node)}: {key}: {said}"


def _shapes(annotation: Any) -> tuple[list[type[BaseModel]], set[str]]:
    """Return the models that an annotation allows, and which of mapping, list and other its values may be."""
    origin = get_origin(annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation], {"mapping"}
    if origin in (Union, UnionType, Annotated):
        parts = [*map(_shapes, get_args(annotation)[: 1 if origin is Annotated else None])]
        return [model for models, _ in parts for model in models], {shape for _, shapes in parts for shape in shapes}
    if annotation is NoneType:
        return [], set()
    kinds = {dict: "mapping", Mapping: "mapping", tuple: "list", list: "list", frozenset: "list", Sequence: "list"}
    return [], {kinds.get(origin, "other")}

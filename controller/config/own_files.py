"""A user's own YAML files: what is wrong in them, with file and line, before Hydra reads them; and where a key is set.

Hydra names neither the file nor the line, and often not the word. Only files that the overrides choose are read, and
those that these choose in turn.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel

from controller.core.errors import ConfigError

Groups = Mapping[str, Sequence[str]]
"""Names of files by group, bundled and the user's own."""
HEADER = "# @package _global_"
PACKAGE = re.compile(r"#\s*@package\s+_global_\s*$")
BYTE_ORDER_MARKS = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")
"""Of UTF-8 and UTF-16."""
DEFAULT = re.compile(r"(?P<words>(?:(?:optional|override)\s+)*)(?P<root>/?)(?P<group>[\w/-]+)(?P<at>@[\w.]*)?$")
"""Key of an entry of `defaults`, such as `override /model` or `/model@loop.teacher`."""


@dataclass(frozen=True)
class OwnFile:
    """One of the user's files that are composed, as YAML's nodes, which know their lines."""

    group: str
    shown: str
    """`slipway/experiment/mine.yaml`."""
    root: yaml.MappingNode
    is_global: bool
    """Whether its keys are those of the whole config."""

    def place(self, node: yaml.Node) -> str:
        return f"{self.shown}, line {node.start_mark.line + 1}"

    @property
    def defaults(self) -> list[yaml.Node]:
        found = next((value for key, value in self.root.value if key.value == "defaults"), None)
        return found.value if isinstance(found, yaml.SequenceNode) else []

    def find(self, path: Sequence[str]) -> yaml.Node | None:
        """Return the node of the key, or of the innermost section on its way that the file has; None if it has none."""
        if not self.is_global:
            if path[:1] != [self.group]:
                return None
            path = path[1:]
        at: yaml.Node = self.root
        found: yaml.Node | None = None
        for part in path:
            if isinstance(at, yaml.SequenceNode) and part.isdigit() and int(part) < len(at.value):
                found = at = at.value[int(part)]
                continue
            pair = next((p for p in at.value if p[0].value == part), None) if isinstance(at, yaml.MappingNode) else None
            if pair is None:
                return found if found is not None and not isinstance(at, yaml.MappingNode) else None
            found, at = pair
        return found


def check_own_files(folder: Path, overrides: Iterable[str], groups: Groups, base: Groups) -> None:
    """Check the files that overrides choose in the user's folder, and those that these choose.

    Args:
        folder: the user's folder, `./slipway`.
        overrides: as typed; others than `group=name` are skipped.
        groups: all choices.
        base: the choices of the groups that Slipway's own config has.

    Raises:
        ConfigError: with every problem found, each with file and line.
    """
    problems = [
        problem
        for file in read_own_files(folder, overrides)
        for problem in (
            *_shadowed(file, base),
            *_wrong_defaults(file, folder, groups, base),
            *_wrong_body(file, groups, base),
            *_wrong_shapes(file),
        )
    ]
    if problems:
        raise ConfigError(problems)


def _shadowed(file: OwnFile, base: Groups) -> Iterator[str]:
    name = file.shown.rpartition("/")[2].removesuffix(".yaml")
    if name in base.get(file.group, ()):
        yield f"{file.shown}: is never read, since Slipway has its own {file.group}={name}; rename the file"


def where_set(key: str, folder: Path | None, overrides: Sequence[str]) -> str:
    """Return file and line where the user's files set a key last; empty if they do not, or an override does."""
    if folder is None or any(_sets(override, key) for override in overrides):
        return ""
    files, path = [*read_own_files(folder, overrides)], key.split(".")
    for file in reversed(files):
        if (node := file.find(path)) is not None:
            return file.place(node)
    for file in files:  # while a group is composed, Hydra names its keys without it
        if (node := file.find([file.group, *path])) is not None:
            return file.place(node)
    return ""


def _sets(override: str, key: str) -> bool:
    name, equals, _ = override.lstrip("+~").partition("=")
    return bool(equals) and f"{key}.".startswith(f"{name}.") and "." in name


def read_own_files(folder: Path, overrides: Iterable[str]) -> Iterator[OwnFile]:
    """Yield the files of the user's that are composed, each behind those that it is based on.

    Raises:
        ConfigError: a file is no YAML mapping in UTF-8, empty, or an experiment without its header.
    """
    todo = []
    for override in overrides:
        group, _, name = override.lstrip("+").partition("=")
        todo.append((group.partition("@")[0], name.strip("\"'").removesuffix(".yaml")))
    seen: set[tuple[str, str]] = set()

    def walk(group: str, name: str) -> Iterator[OwnFile]:
        path = folder / group / f"{name}.yaml"
        if (group, name) in seen or not re.fullmatch(r"\w+/[\w.-]+", f"{group}/{name}") or not path.is_file():
            return
        seen.add((group, name))
        file = _read(path, group, f"{folder.name}/{group}/{path.name}")
        for entry in file.defaults:
            if isinstance(entry, yaml.ScalarNode):
                yield from walk(group, entry.value.removesuffix(".yaml"))
            elif isinstance(entry, yaml.MappingNode):
                for key, value in entry.value:
                    if (found := DEFAULT.match(str(key.value))) and isinstance(value, yaml.ScalarNode):
                        yield from walk(found["group"], value.value)
        yield file

    for group, name in todo:
        yield from walk(group, name)


def _read(path: Path, group: str, shown: str) -> OwnFile:
    content = path.read_bytes()
    if content.startswith(BYTE_ORDER_MARKS):
        raise ConfigError(f"{shown}: begins with a byte-order mark; save it as UTF-8 without one")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ConfigError(f"{shown}, line {line}: is not UTF-8 ({error.reason}); save the file as UTF-8") from None
    lines = [line.strip() for line in text.splitlines()]
    is_experiment = group == "experiment"
    if all(not line or line.startswith("#") for line in lines):
        if is_experiment:
            raise ConfigError(f"{shown}: is empty; begin with {HEADER!r} and set what differs, such as loop.steps")
        return OwnFile(group, shown, yaml.MappingNode("tag:yaml.org,2002:map", []), False)
    is_global = bool(PACKAGE.match(next(line for line in lines if line)))
    if is_experiment and not is_global:  # Hydra ignores it below another comment
        raise ConfigError(
            f"{shown}: must begin with the line {HEADER!r}; without it, its keys are those of a section `experiment`"
        )
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        twins = [] if root is None else [*_twins(root)]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        said = " ".join(f"{error.context or ''} {error.problem or ''}".split())
        hint = "; indent with spaces" if "'\\t'" in said else ""
        raise ConfigError(f"{shown}, line {mark.line + 1 if mark else '?'}: {said}{hint}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{shown}: {' '.join(str(error).split())}") from None
    if not isinstance(root, yaml.MappingNode):
        place, kind = (f", line {root.start_mark.line + 1}", _kind(root)) if root else ("", "nothing")
        raise ConfigError(f"{shown}{place}: must be `key: value` lines, not {kind}")
    for first, again in twins:
        line = again.start_mark.line + 1
        raise ConfigError(f"{shown}, line {line}: {again.value} stands in line {first.start_mark.line + 1} already")
    return OwnFile(group, shown, root, is_global)


def _twins(node: yaml.Node, above: tuple[yaml.Node, ...] = ()) -> Iterator[tuple[yaml.Node, yaml.Node]]:
    """Yield keys that stand twice in one mapping. Raises RecursionError for an alias of what it stands in."""
    if isinstance(node, yaml.ScalarNode):
        return
    if any(node is one for one in above):
        raise RecursionError("an alias stands in what it means")
    known: dict[str, yaml.Node] = {}
    for item in node.value:
        if isinstance(node, yaml.MappingNode):
            key, item = item
            is_name = isinstance(key, yaml.ScalarNode) and key.value != "<<"
            if is_name and (first := known.setdefault(key.value, key)) is not key:
                yield first, key
        yield from _twins(item, (*above, node))


def _kind(node: yaml.Node) -> str:
    return "a list" if isinstance(node, yaml.SequenceNode) else f"{node.value!r}"


def _wrong_defaults(file: OwnFile, folder: Path, groups: Groups, base: Groups) -> Iterator[str]:
    """Yield what is wrong with the files that a file chooses in `defaults`."""
    for key, value in file.root.value:
        if key.value == "defaults" and not isinstance(value, yaml.SequenceNode):
            yield f"{file.place(key)}: defaults must be a list: `- override /model: tiny`, or the name of a base"
    for entry in file.defaults:
        pairs = entry.value if isinstance(entry, yaml.MappingNode) else [(entry, entry)]
        for key, value in pairs:
            if said := _wrong_default(file, key, value, folder, groups, base):
                yield f"{file.place(key)}: {said}"


def _wrong_default(file: OwnFile, key: yaml.Node, value: yaml.Node, folder: Path, groups: Groups, base: Groups) -> str:
    """Return what is wrong with an entry of `defaults`, and what to write; empty if nothing is."""
    if not isinstance(key, yaml.ScalarNode):
        return f"defaults: {_kind(key)} is no name of a file"
    if key is value:
        name = key.value.removesuffix(".yaml")
        if key.tag != "tag:yaml.org,2002:str":
            return f"defaults: {key.value} is no name of a file"
        if name == "_self_" or "/" in name or "$" in name or name in groups.get(file.group, ()):
            return ""
        if name in base:
            return f"{name} is a group; name a file of it, as in `override /{name}: {base[name][0]}`"
        return wrong_name(file.group, name, folder, groups)
    found = DEFAULT.match(" ".join(key.value.split()))
    if found is None:
        return f"defaults: {key.value!r} is no group; write `override /model: tiny`"
    group, words = found["group"], found["words"].split()
    is_null = value.tag == "tag:yaml.org,2002:null"
    name = value.value if isinstance(value, yaml.ScalarNode) and not is_null else "…"
    if group not in groups and not found["root"] and f"{file.group}/{group}" in groups:
        return ""
    if "/" in group or (folder / file.group / group).is_dir():
        return ""
    if group not in groups:
        near = difflib.get_close_matches(group, groups, n=1)
        hint = f"did you mean {' '.join([*words, f'/{near[0]}'])}? " if near else ""
        return f"{group}: unknown group; {hint}groups: {', '.join(groups)}"
    if "override" in words and group not in base:
        return f"{group}: the config has no such group to override; write `/{group}: {name}`"
    if not found["root"]:
        prefix = "" if "override" not in words and (found["at"] or group not in base) else "override "
        return f"{group} is a group of the whole config; write `{prefix}/{group}{found['at'] or ''}: {name}`"
    if "override" not in words and not found["at"] and group in base:
        return f"{group}: is chosen already, and a file can only override it; write `override /{group}: {name}`"
    names = value.value if isinstance(value, yaml.SequenceNode) else [] if is_null else [value]
    for each in names:
        if not isinstance(each, yaml.ScalarNode):
            return f"{group}: {_kind(each)} is no name of a file"
        if (
            "$" not in each.value
            and "optional" not in words
            and (each.value.removesuffix(".yaml") not in groups[group])
        ):
            return wrong_name(group, each.value, folder, groups)
    return ""


def wrong_name(group: str, name: str, folder: Path | None, groups: Groups) -> str:
    """Say that a group has no such file, what is meant, and the choices; for the command line and files alike."""
    near = difflib.get_close_matches(name.removesuffix(".yaml").replace("v5e", "v5litepod"), groups[group], n=1)
    hint = f"did you mean {group}={near[0]}? " if near else ""
    hint = f"~{group} removes it; " if name.lower() == "null" else hint
    hint = f"{found}; " if (found := _elsewhere(folder, group, name, groups)) else hint
    shown = [each for each in groups[group] if group != "scale" or not each.startswith("tiny_")]  # `tiny` chooses these
    return f"no {group} named {name!r}; {hint}choices: {', '.join(shown)}"


def _elsewhere(folder: Path | None, group: str, name: str, groups: Groups) -> str:
    """Return where the file lies that is meant, and how to move it; empty if there is none."""
    stem = name.removesuffix(".yml").removesuffix(".yaml")
    if folder is None or not re.fullmatch(r"[\w.-]+", stem):
        return ""
    for file in sorted(folder.glob("*/*")) if folder.is_dir() else ():
        if file.stem != stem or file.suffix.lower() not in (".yml", ".yaml"):
            continue
        shown = f"{folder.name}/{file.parent.name}/{file.name}"
        if file.parent.name == group and file.suffix != ".yaml":
            return f"{shown} must be renamed to end in .yaml"
        if file.parent.name not in groups or difflib.get_close_matches(file.parent.name, [group], n=1):
            return f"{shown} lies in a folder of another name; move it to {folder.name}/{group}/{stem}.yaml"
    if (lone := folder / f"{stem}.yaml").is_file() or (lone := folder.parent / f"{stem}.yaml").is_file():
        return f"{lone.relative_to(folder.parent)} is in no group; move it to {folder.name}/{group}/{stem}.yaml"
    for above in [*folder.resolve().parents][1:4]:
        if (there := above / folder.name / group / f"{stem}.yaml").is_file():
            return f"{there} exists, and {folder.name}/ is looked for in the current folder; run slipway in {above}"
    return ""


def _wrong_body(file: OwnFile, groups: Groups, base: Groups) -> Iterator[str]:
    """Yield what is wrong with the keys of the whole config that a file sets: a group, or no section at all."""
    from conf.schema.config import Config
    from conf.schema.problems import find_keys

    if not file.is_global:
        return
    for key, value in file.root.value:
        name = str(key.value)
        is_null = value.tag == "tag:yaml.org,2002:null"
        if name in base and isinstance(value, yaml.ScalarNode) and not is_null:
            shown = value.value
            says = "" if shown in groups[name] else f"; choices: {', '.join(groups[name])}"
            yield f"{file.place(key)}: {name} is a group; put `- override /{name}: {shown}` under `defaults`{says}"
        elif name not in Config.model_fields and name not in groups and name not in ("defaults", "hydra"):
            if "." in name:
                continue  # the schema says how to write it
            meant = find_keys(name)
            near = difflib.get_close_matches(name, [*Config.model_fields], n=1)
            hint = (
                f"did you mean {' or '.join(meant or near)}?"
                if meant or near
                else (f"sections: {', '.join(sorted(Config.model_fields))}")
            )
            yield f"{file.place(key)}: {name}: unknown key; {hint}"


def _wrong_shapes(file: OwnFile) -> Iterator[str]:
    """Yield where a list stands for a mapping of the schema, or a mapping for a list: Hydra cannot merge these."""
    from conf.schema.config import Config

    def walk(node: yaml.Node, annotation: Any, key: str) -> Iterator[str]:
        models, shapes = _shapes(annotation)
        if shapes == {"mapping"} and isinstance(node, yaml.SequenceNode):
            yield f"{file.place(node)}: {key}: must be `key: value` lines, not a list"
        elif shapes == {"list"} and isinstance(node, yaml.MappingNode):
            yield f"{file.place(node)}: {key}: must be a list, not `key: value` lines"
        elif isinstance(node, yaml.MappingNode):
            for name, child in node.value:
                fields = [m.model_fields[name.value] for m in models if str(name.value) in m.model_fields]
                if fields:
                    yield from walk(child, Union[tuple(f.annotation for f in fields)], f"{key}.{name.value}")  # noqa: UP007

    for name, node in file.root.value if file.is_global else [(yaml.ScalarNode("", file.group), file.root)]:
        if name.value in Config.model_fields:
            yield from walk(node, Config.model_fields[name.value].annotation, name.value)


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

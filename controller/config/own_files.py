"""A user's own YAML files: what is wrong in them, with file and line, before Hydra reads them; and where a key is set.

Hydra names neither the file nor the line, and often not the word. Only files that the overrides choose are read, and
those that these choose in turn.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

import conf
from controller.config.own_bodies import HEADER, wrong_body, wrong_shapes
from controller.config.own_defaults import DEFAULT, Groups, base_name, kind_of, wrong_defaults
from controller.config.yaml_errors import closed_up, explain
from controller.core.errors import ConfigError

PACKAGE = re.compile(r"#\s*@package\s+([\w.]+)\s*$")
ITEM = re.compile(r" - \S+:?")
"""Begins an item of a list that YAML reads as part of the text in the line before."""
RENTED = frozenset({"cloud", "tpu", "network"})
"""Groups whose choice says what is rented, and where."""
BYTE_ORDER_MARKS = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")
"""Of UTF-8 and UTF-16."""


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
        found: yaml.Node | None = None if path else self.root
        while path:
            if isinstance(at, yaml.SequenceNode) and path[0].isdigit() and int(path[0]) < len(at.value):
                found = at = at.value[int(path[0])]
                path = path[1:]
                continue
            pairs = reversed(at.value) if isinstance(at, yaml.MappingNode) else ()  # merged keys stand first
            names = {".".join(path[:end]): end for end in range(len(path), 0, -1)}  # one may have dots, in quotes
            pair = next((pair for pair in pairs if pair[0].value in names), None)
            if pair is None:
                return found if found is not None and not isinstance(at, yaml.MappingNode) else None
            found, at = pair
            path = path[names[pair[0].value] :]
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
            *wrong_defaults(file, folder, groups, base),
            *wrong_body(file, groups, base),
            *wrong_shapes(file),
        )
    ]
    if problems:
        raise ConfigError(problems)


def _shadowed(file: OwnFile, base: Groups) -> Iterator[str]:
    name = file.shown.rpartition("/")[2].removesuffix(".yaml")
    near = [] if file.group in base or file.is_global else difflib.get_close_matches(file.group, base, n=1, cutoff=0.8)
    if near:
        folder = file.shown.partition("/")[0]
        raise ConfigError(f"{file.shown}: {folder}/{file.group} is no group; did you mean {folder}/{near[0]}?")
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


def overruled(folder: Path | None, overrides: Sequence[str]) -> dict[str, str]:
    """Return, by key, which single values of a typed cloud, TPU or network an own experiment replaces, and where.

    Of other groups, such as a loop, an experiment's values are meant to win.
    """
    typed = {key: value for key, _, value in (word.lstrip("+").partition("=") for word in overrides)}
    chosen = {group: name for group, name in typed.items() if group in RENTED and re.fullmatch(r"[\w-]+", name)}
    found: dict[str, str] = {}
    if folder is None or not chosen:
        return found
    for file in read_own_files(folder, overrides):
        content = yaml.safe_load(yaml.serialize(file.root)) if file.is_global else {}
        for group, name in chosen.items():
            paths = [root / group / f"{name}.yaml" for root in (Path(conf.__file__).parent, folder)]
            choice = next((yaml.safe_load(path.read_text("utf-8")) for path in paths if path.is_file()), {})
            for key, own in (content.get(group) or {}).items():
                value, full = choice.get(key), f"{group}.{key}"
                if isinstance(value, str | int | float) and full not in typed:
                    found.pop(full, None)
                    if own != value and (node := file.find([group, key])) is not None:
                        said = f"is not that of {group}={name}: {file.place(node)}, replaces it"
                        found[full] = f"{said}; set {full}={value} too"
    return found


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

    def walk(group: str, name: str, above: tuple[str, ...] = (), origin: str = "") -> Iterator[OwnFile]:
        path, here = folder / group / f"{name}.yaml", f"{group}/{name}"
        if here in above:
            way = [each.removeprefix(f"{group}/") for each in (*above[above.index(here) :], here)]
            if path.name in {each.name for each in (Path(conf.__file__).parent / group).glob("*.yaml")}:
                raise ConfigError(f"{folder.name}/{here}.yaml: Slipway has its own {group}={name}; rename yours")
            raise ConfigError(f"{origin}: defaults: includes itself ({' → '.join(way)}); remove it")
        if (group, name) in seen or not re.fullmatch(r"\w+/[\w.-]+", here) or not path.is_file():
            return
        seen.add((group, name))
        file = _read(path, group, f"{folder.name}/{group}/{path.name}")
        for entry in file.defaults:
            if isinstance(entry, yaml.ScalarNode):
                yield from walk(group, base_name(group, entry.value), (*above, here), file.place(entry))
            elif isinstance(entry, yaml.MappingNode):
                for key, value in entry.value:
                    if (found := DEFAULT.match(str(key.value))) and isinstance(value, yaml.ScalarNode):
                        yield from walk(found["group"], value.value, (*above, here), file.place(key))
        yield file

    for group, name in todo:
        yield from walk(group, name)


def without_base(section: str, folder: Path | None, overrides: Sequence[str]) -> OwnFile | None:
    """Return the user's file that a section is made of alone, if it builds on none and has no other; else None."""
    found = [file for file in read_own_files(folder, overrides) if file.group == section] if folder else []
    return found[0] if len(found) == 1 and not found[0].is_global and not found[0].defaults else None


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
    header = _header_of(group)
    if all(not line or line.startswith("#") for line in lines):
        if is_experiment:
            raise ConfigError(f"{shown}: is empty; begin with {HEADER!r} and set what differs, such as loop.steps")
        return OwnFile(group, shown, yaml.MappingNode("tag:yaml.org,2002:map", []), False)
    package = PACKAGE.match(next(line for line in lines if line))  # Hydra ignores it below another comment
    is_global = package is not None and package[1] == "_global_"
    if (header and package is None) or (is_experiment and not is_global):
        raise ConfigError(
            f"{shown}: must begin with the line {header!r}; without it, its keys are those of a section `{group}`"
        )
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        slips = [] if root is None else [*_slips(root)]
        if root is not None and not slips:
            _merge(root)
            yaml.SafeLoader("").construct_document(root)  # what only loading finds, such as a tag of nothing
    except yaml.YAMLError as error:
        line, said = explain(error, text)
        raise ConfigError(f"{shown}{f', line {line}' if line else ''}: {said}") from None
    except RecursionError as error:
        raise ConfigError(f"{shown}: {error}") from None
    if not isinstance(root, yaml.MappingNode):
        place, kind = (f", line {root.start_mark.line + 1}", kind_of(root)) if root else ("", "nothing")
        hint = f"; {said}" if isinstance(root, yaml.ScalarNode) and (said := closed_up(root.value)) else ""
        raise ConfigError(f"{shown}{place}: must be `key: value` lines, not {kind}{hint}")
    for node, said in slips:
        raise ConfigError(f"{shown}, line {node.start_mark.line + 1}: {said}")
    return OwnFile(group, shown, root, is_global)


def _header_of(group: str) -> str:
    """Return the line with which the bundled files of a group begin that are no section of the config, else ""."""
    bundled = next(iter(sorted(Path(conf.__file__).parent.glob(f"{group}/*.yaml"))), None)
    first = bundled.read_text("utf-8").partition("\n")[0] if bundled else ""
    return first if PACKAGE.match(first) else ""


def _slips(node: yaml.Node, above: tuple[yaml.Node, ...] = ()) -> Iterator[tuple[yaml.Node, str]]:
    """Yield keys that stand twice in one mapping or are no words, and items that are a part of the text above them.

    Raises RecursionError for an alias in itself.
    """
    if isinstance(node, yaml.ScalarNode):
        if node.style is None and node.end_mark.line > node.start_mark.line and (item := ITEM.search(node.value)):
            said = f"`{item[0].strip()}` below it stands further right, and so is a part of it; write it in one column"
            yield node, said
        return
    if any(node is one for one in above):
        raise RecursionError("an alias stands in what it means")
    known: dict[str, yaml.Node] = {}
    for item in node.value:
        if isinstance(node, yaml.MappingNode):
            key, item = item
            if isinstance(key, yaml.MappingNode) and key.flow_style:
                yield key, "{{ }} are of templates; write ${KEY}, the value of another key, or ${oc.env:NAME}"
            elif not isinstance(key, yaml.ScalarNode):
                yield key, f"{kind_of(key)} cannot be a key"
            elif key.value != "<<" and (first := known.setdefault(key.value, key)) is not key:
                yield key, f"{key.value} stands in line {first.start_mark.line + 1} already"
        yield from _slips(item, (*above, node))


def _merge(node: yaml.Node) -> None:
    """Put the keys that `<<` merges into each mapping, before its own."""
    if isinstance(node, yaml.MappingNode):
        yaml.constructor.SafeConstructor().flatten_mapping(node)
    for item in node.value if not isinstance(node, yaml.ScalarNode) else ():
        _merge(item[1] if isinstance(node, yaml.MappingNode) else item)

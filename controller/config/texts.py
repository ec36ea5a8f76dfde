"""Values of keys that take text keep the characters that were written.

YAML reads `3.10`, `no`, `12:30` and `007` as 3.1, False, 750 and 7, and Hydra's grammar does so with some of them: what
is written for a key that takes text is put back before anything is merged. Names of groups are text too.
"""

import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from controller.core.errors import ConfigError

NUMBER = re.compile(r"[+-]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(e[+-]?\d[\d_]*)?|[+-]?(inf|nan)|true|false", re.IGNORECASE)
"""What Hydra's grammar may read as a number or a boolean."""
OTHER_BASE = re.compile(r"(?<![\w.:])[+-]?(0[0-7_]+|\d[\d_]*(:[0-5]?\d)+(\.\d*)?)(?![\w:])")
"""What YAML 1.1 may read as a number to the base 60 or 8: https://yaml.org/type/int.html."""
EXPONENT = re.compile(r"[+-]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][+-]?\d+\Z")
"""A number that YAML 1.1 takes for text without a dot and a sign, as in 1.0e+3."""
HOME = re.compile(r"(?:file:)?~[\w./-]+")
"""A path below a home, whose ~ Hydra's grammar does not take."""
SPACE = re.compile(r"\s*")
CALL = r"\w+\((?:[^()]|\([^()]*\))*\)"
INTERPOLATION, DOUBLE, SINGLE = r"\$\{(?:[^{}]|\{[^{}]*\})*\}", r'"(?:\\.|[^"\\])*"', r"'(?:\\.|[^'\\])*'"
WORD = re.compile(
    rf"""({CALL}|{INTERPOLATION}|{DOUBLE}|{SINGLE}|\\.|[^,\]}})"'\\\s]|\s+(?![\s,\]}})]|$))*""", re.DOTALL
)
"""A value that is no list or mapping, such as a call or an interpolation, without the spaces after it."""
NAME = re.compile(r"\s*([^:{}\[\],]*?)\s*:")
"""A key of a mapping."""
CHOICE = re.compile(r"(\s*(choice|shuffle|sort)\()+")


def quote_numbers(override: str) -> str:
    """Quote what Hydra would read as a number in an override, where a key takes text or the name of a group's file.

    The arguments of functions stay as they are, those of `choice`, `shuffle` and `sort` aside.
    """
    key, equals, value = override.partition("=")
    path = tuple(key.lstrip("+~").split("."))
    is_group = "@" in key or len(path) == 1
    if not equals:
        return override
    if is_group and re.fullmatch(r"null|~", value.strip(), re.IGNORECASE):
        return f'{key}="{value.strip()}"'
    made: list[str] = []
    start = CHOICE.match(value)
    at = start.end() if start else 0
    made.append(value[:at])
    while at < len(value):
        at = _copy(value, at, path, is_group, made)
        made.append(value[at : at + 1])
        at += 1
    return f"{key}={''.join(made)}"


def unquoted(prefix: str, value: str) -> str:
    """Return a value of a sweep as it was before `quote_numbers`, which will quote it again in its run."""
    bare = value[1:-1]
    return bare if quote_numbers(f"{prefix}{bare}") == f"{prefix}{value}" else value


def _copy(value: str, at: int, path: tuple[str, ...], is_group: bool, made: list[str]) -> int:
    """Append the element that begins at a position, its numbers quoted where the schema takes text; return its end."""
    from conf.schema.text_keys import is_text

    begin, at = at, SPACE.match(value, at).end()  # pyright: ignore[reportOptionalMemberAccess] - it matches anything
    made.append(value[begin:at])
    opening = value[at : at + 1]
    if opening not in ("[", "{"):
        word = WORD.match(value, at)[0]  # pyright: ignore[reportOptionalSubscript] - as above
        as_text = (NUMBER.fullmatch(word) and (is_group or is_text(path))) or HOME.fullmatch(word)
        made.append(f'"{word}"' if as_text else word)
        return at + len(word)
    closing, number = {"[": "]", "{": "}"}[opening], 0
    while at < len(value) and value[at] != closing:
        made.append(value[at])
        at += 1
        name = NAME.match(value, at) if opening == "{" else None
        if name is not None:
            made.append(name[0])
            at = name.end()
        at = _copy(value, at, (*path, name[1] if name else str(number)), False, made)
        begin, at = at, SPACE.match(value, at).end()  # pyright: ignore[reportOptionalMemberAccess]
        made.append(value[begin:at])
        number += 1
        if value[at : at + 1] not in (",", closing):
            break  # Hydra's parser says what is wrong
    made.append(value[at : at + 1])
    return at + 1


def restore_texts(config: Any, plain: Any, file: Path, package: str) -> None:
    """Set the text that a file has where its loaded config has something else for a key that takes text.

    Args:
        config: the loaded file, inside its package.
        plain: the same as plain data.
        file: the file itself.
        package: dotted key below which its content stands.

    Raises:
        ConfigError: the file has a number to the base 60 or 8, such as 1:30 or 010.
    """
    from conf.schema.text_keys import is_text

    places: list[tuple[Any, ...]] = []
    numbers: list[tuple[tuple[Any, ...], float]] = []
    for path, value in _unquoted(plain, ()):
        if is_text(tuple(map(str, path))):
            places.append(path)
        elif not isinstance(value, bool):
            numbers.append((path, value))
    if not (places or numbers) or not file.is_file():  # it is one of Hydra's own
        return
    written = file.read_text("utf-8")
    doubtful = numbers if OTHER_BASE.search(written) else []
    if not places and not doubtful:
        return
    loader = _yaml_loader()(written)
    root, above = loader.get_single_node(), len([*filter(None, package.split("."))])
    for path, number in doubtful:
        text = _written(loader, root, path[above:])
        if OTHER_BASE.fullmatch(text) and (":" in text or int(text.replace("_", "")) != number):
            key = ".".join(map(str, path))
            shown = f"{'/'.join(file.parts[-3:])}, line {_node(loader, root, path[above:]).start_mark.line + 1}"
            raise ConfigError(f"{shown}: {key}: YAML reads {text} as {number:g}; write the number that is meant")
    for path in places:
        node = config
        for part in path[:-1]:
            node = node[part]
        node[path[-1]] = _written(loader, root, path[above:])


@cache
def _yaml_loader() -> Any:
    """Return a loader of YAML that reads keys as OmegaConf does: 1e3 is a number, and 2026-11-29 is none."""
    from yaml import SafeLoader

    class Loader(SafeLoader):
        pass

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", EXPONENT, list("-+.0123456789"))
    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in known if tag != "tag:yaml.org,2002:timestamp"]
        for first, known in Loader.yaml_implicit_resolvers.items()
    }
    return Loader


def _unquoted(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], float]]:
    """Yield the numbers and booleans, with their places."""
    if isinstance(value, dict | list):
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _unquoted(child, (*path, key))
    elif isinstance(value, bool | int | float):
        yield path, value


def _written(loader: Any, node: Any, path: Sequence[Any]) -> str:
    """Return the characters of the scalar at a place of a YAML document."""
    return _node(loader, node, path).value


def _node(loader: Any, node: Any, path: Sequence[Any]) -> Any:
    from yaml import MappingNode

    for part in path:
        if isinstance(node, MappingNode):
            loader.flatten_mapping(node)
            node = next(child for name, child in reversed(node.value) if loader.construct_object(name) == part)
        else:
            node = node.value[part]
    return node

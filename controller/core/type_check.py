"""Check parsed JSON against the types of a TypedDict: what another process wrote may be anything."""

import typing
from collections.abc import Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

from controller.core.printable import one_line

MAX_DEPTH = 64
"""Levels of nesting of a value of any type; deeper ones could exhaust the stack of whoever writes them again."""


def type_problem(value: Any, kind: Any, name: str = "it") -> str:
    """Return how a value differs from a type, naming the part that does; "" if it does not.

    Args:
        value: parsed JSON.
        kind: a TypedDict, dict, list, union, Any or a JSON type; integers are floats too. Unknown keys are allowed.
        name: of the value, for the message.
    """
    if kind is Any:
        return "" if _is_shallow(value, MAX_DEPTH) else f"{name} is nested too deeply"
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if origin in (typing.Union, UnionType):
        problems = [type_problem(value, each, name) for each in inner if (each is NoneType) == (value is None)]
        return "" if "" in problems else (problems or [_differs(name, value)])[0]
    if typing.is_typeddict(kind):
        return _keys_problem(value, kind, name)
    accepted = (int, float) if origin is float else (origin,)
    if not isinstance(value, accepted) or (isinstance(value, bool) and origin is not bool):
        return _differs(name, value)
    if isinstance(value, list) and inner:
        return _first(type_problem(each, inner[0], f"{name}[{i}]") for i, each in enumerate(value))
    if isinstance(value, dict) and inner:
        return _first(type_problem(each, inner[1], f"{name}.{one_line(key):.40}") for key, each in value.items())
    return ""


def _keys_problem(value: Any, kind: Any, name: str) -> str:
    if not isinstance(value, dict):
        return _differs(name, value)
    hints = _hints(kind)
    if missing := sorted(kind.__required_keys__ - value.keys()):
        return f"{name} has no {missing[0]}"
    return _first(type_problem(value[key], hint, f"{name}.{key}") for key, hint in hints.items() if key in value)


@cache
def _hints(kind: Any) -> Mapping[str, Any]:
    return typing.get_type_hints(kind)


def _first(problems: typing.Iterable[str]) -> str:
    return next((problem for problem in problems if problem), "")


def _differs(name: str, value: Any) -> str:
    return f"{name} is {type(value).__name__}"


def _is_shallow(value: Any, levels: int) -> bool:
    """Return whether lists and objects are nested at most so many levels deep."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels > 0 and all(_is_shallow(each, levels - 1) for each in inner)

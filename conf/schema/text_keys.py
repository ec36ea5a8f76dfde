"""Which types a key of the config takes; those that take text and no number keep the characters that were written."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from conf.schema.config import Config


@cache
def is_text(path: tuple[str, ...]) -> bool:
    """Return whether a key takes text, and nothing that YAML or Hydra would read as a number or a boolean.

    path: parts of the dotted key; those of a list are its numbers, from 0.
    """
    kinds = types_at(path)
    return any(map(_holds_text, kinds)) and not any(kind in (int, float, bool, Any, object) for kind in kinds)


@cache
def types_at(path: tuple[str, ...]) -> list[Any]:
    """Return the types that a key may have, one for each alternative, None aside; none for an unknown key."""
    kinds: list[Any] = [Config]
    for part in path:
        kinds = [kind for parent in kinds for kind in types_below(parent, part)]
    return kinds


def types_below(kind: Any, part: str) -> list[Any]:
    """Return the types that a part of a key may have below one of another type."""
    return [each for child in _children(kind, part) for each in alternatives(child)]


def _children(kind: Any, part: str) -> Iterator[Any]:
    """Yield what stands below a part of a key."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        if part in kind.model_fields:
            yield kind.model_fields[part].annotation
        return
    origin, inner = get_origin(kind), [one for one in get_args(kind) if one is not ...]
    if isinstance(origin, type) and issubclass(origin, Mapping):
        yield inner[1]
    elif isinstance(origin, type) and issubclass(origin, (Sequence, frozenset, set)) and part.isdigit():
        fixed = origin is tuple and ... not in get_args(kind)
        yield from inner[int(part) : int(part) + 1] if fixed else inner


def alternatives(annotation: Any) -> Iterator[Any]:
    """Yield the types that an annotation allows, None aside."""
    if get_origin(annotation) is Annotated:
        yield from alternatives(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, UnionType):
        for one in get_args(annotation):
            yield from alternatives(one)
    elif annotation is not NoneType:
        yield annotation


def _holds_text(kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return all(isinstance(choice, str) for choice in get_args(kind))
    return isinstance(kind, type) and issubclass(kind, str)

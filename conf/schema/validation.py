"""Validation of composed data: every problem at once, each on one line with its key and the cure."""

import json
import re
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ValidationError

from conf.schema.base import key_path
from conf.schema.config import Config
from conf.schema.problems import ConfigProblem, problems_of
from conf.schema.text_keys import types_at

LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def validate(raw: dict[str, Any]) -> tuple[Config | None, list[ConfigProblem]]:
    """Validate composed data. Return the config, or None, and every problem.

    If the only problems are unknown keys, validate again without them, so that the caller can also run the checks
    between sections and report everything at once.
    """
    if problems := [*_unprintable_values(raw), *problems_of(raw, [*_misread_numbers(raw)])]:
        return None, problems
    try:
        config = Config.model_validate(raw)
        problems = [*_booleans_as_numbers(raw, config)]
        return (None if problems else config), problems
    except ValidationError as error:
        found = error.errors()
    problems = problems_of(raw, found)
    unknown = [key_path(raw, each) for each in found if each["type"] == "extra_forbidden"]
    if len(unknown) < len(found):
        return None, problems
    try:
        return Config.model_validate(_drop_paths(raw, unknown)), problems
    except ValidationError:
        return None, problems


def _unprintable_values(value: Any, key: str = "") -> Iterator[ConfigProblem]:
    """Yield keys and values that no file, argument or variable can contain. Training text may contain NUL."""
    if isinstance(value, str) and not key.startswith("data.") and "\0" in value:
        yield ConfigProblem(key, "contains a NUL character, which arguments, variables and paths cannot")
    if isinstance(value, str) and LONE_SURROGATE.search(value):
        yield ConfigProblem(key, "contains a lone surrogate, which files cannot")
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for name, child in items:
        inner = f"{key}.{name}".lstrip(".")
        yield from _unprintable_values(str(name), inner)
        yield from _unprintable_values(child, inner)


ZERO_FIRST = re.compile(r"[+-]?0[0_]*[+-].*")


def _misread_numbers(value: Any, path: tuple[Any, ...] = ()) -> Iterator[dict[str, Any]]:
    """Yield an error as of pydantic for texts such as 0-3, of which it drops the zero and reads -3."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, child in items:
        yield from _misread_numbers(child, (*path, name))
    if isinstance(value, str) and ZERO_FIRST.fullmatch(value):
        types = types_at((*map(str, path),))
        if int in types and str not in types:
            yield {"type": "int_parsing", "loc": path, "input": value}


def _booleans_as_numbers(raw: Any, made: Any, key: str = "") -> Iterator[ConfigProblem]:
    """Yield the keys whose boolean pydantic has made a number."""
    made = vars(made) if isinstance(made, BaseModel) else made
    if isinstance(raw, bool) and type(made) in (int, float):
        text = json.dumps(raw)
        yield ConfigProblem(key, f"must be a number, not {text}; YAML reads yes and on as true, no and off as false")
    elif isinstance(raw, dict) and isinstance(made, dict):
        for name in filter(made.__contains__, raw):
            yield from _booleans_as_numbers(raw[name], made[name], f"{key}.{name}".lstrip("."))
    elif isinstance(raw, list) and isinstance(made, tuple | list):
        for number, (child, inner) in enumerate(zip(raw, made, strict=False)):
            yield from _booleans_as_numbers(child, inner, f"{key}.{number}")


def _drop_paths(raw: dict[str, Any], paths: list[list[str]]) -> dict[str, Any]:
    clean = json.loads(json.dumps(raw))
    for path in paths:
        at = clean
        for part in path[:-1]:
            at = at[int(part)] if isinstance(at, list) else at[part]
        at.pop(path[-1], None)
    return clean

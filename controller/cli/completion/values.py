"""The values that a key may have, where they can be counted: from the schema that is made for editors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from controller.config.editor_schemas import FOLDER, WHOLE


def values_of(key: str) -> list[str]:
    """Of `cleanup.on_success` delete and keep; of a number, or of an unknown key, nothing."""
    whole = json.loads((FOLDER / f"{WHOLE}.json").read_bytes())
    places = [whole]
    for part in key.split("."):
        places = [model[part] for place in places for model in _models(place, whole) if part in model]
    return list(dict.fromkeys(word for place in places for word in _words(place)))


def _models(value: dict[str, Any], whole: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The properties of every section that this may be."""
    if "$ref" in value:
        yield from _models(whole["$defs"][value["$ref"].rpartition("/")[2]], whole)
    for inner in value.get("anyOf", ()):
        yield from _models(inner, whole)
    if "properties" in value:
        yield value["properties"]


def _words(value: dict[str, Any]) -> Iterator[str]:
    yield from (each for each in [*value.get("enum", ()), value.get("const")] if isinstance(each, str))
    if value.get("type") == "boolean":
        yield from ("true", "false")
    if value.get("type") == "null":
        yield "null"
    for inner in value.get("anyOf", ()):
        yield from _words(inner)

"""The values that a key may have, where they can be counted: from the schema that is made for editors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from controller.config.editor_schemas import CONFIG_SCHEMA, FOLDER


def allowed_values(key: str) -> list[str]:
    """Of `cleanup.on_success` delete and keep; of a number, or of an unknown key, nothing."""
    whole = json.loads((FOLDER / f"{CONFIG_SCHEMA}.json").read_bytes())
    places = [whole]
    for part in key.split("."):
        places = [model[part] for place in places for model in _object_schemas(place, whole) if part in model]
    return list(dict.fromkeys(word for place in places for word in _literal_values(place)))


def _object_schemas(value: dict[str, Any], whole: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The properties of every section that this may be."""
    if "$ref" in value:
        yield from _object_schemas(whole["$defs"][value["$ref"].rpartition("/")[2]], whole)
    for inner in value.get("anyOf", ()):
        yield from _object_schemas(inner, whole)
    if "properties" in value:
        yield value["properties"]


def _literal_values(value: dict[str, Any]) -> Iterator[str]:
    yield from (each for each in [*value.get("enum", ()), value.get("const")] if isinstance(each, str))
    if value.get("type") == "boolean":
        yield from ("true", "false")
    if value.get("type") == "null":
        yield "null"
    for inner in value.get("anyOf", ()):
        yield from _literal_values(inner)

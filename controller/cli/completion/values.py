"""Possible values of a key, where they are few, from the JSON schema made for editors."""

import json
from collections.abc import Iterator
from typing import Any

from controller.config.editor_schemas import CONFIG_SCHEMA, FOLDER


def allowed_values(key: str) -> list[str]:
    """Return delete and keep for `cleanup.on_success`; nothing for a number or an unknown key."""
    whole = json.loads((FOLDER / f"{CONFIG_SCHEMA}.json").read_bytes())
    places = [whole]
    for part in key.split("."):
        places = [model[part] for place in places for model in _object_schemas(place, whole) if part in model]
    return list(dict.fromkeys(word for place in places for word in _literal_values(place)))


def _object_schemas(value: dict[str, Any], whole: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the properties of every section that a value may be."""
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

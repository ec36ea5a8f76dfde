"""What the schema says of config keys: type, bounds and purpose, for `slipway help KEY` and the site's reference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

Schema = Mapping[str, Any]
BOUNDS = {
    "minimum": "≥ {}",
    "exclusiveMinimum": "> {}",
    "maximum": "≤ {}",
    "exclusiveMaximum": "< {}",
    "pattern": "`{}`",
}
"""Keywords of JSON Schema that limit a value, and how they are written."""


class Key(NamedTuple):
    """A key of the config, or of one kind of a section.

    Attributes:
        path: `tpu.zone`; `NAME` stands for the name of an entry, `[]` for an item of a list.
        kind: of the section, such as `kind=adamw`; empty if it has only one.
        about: what the section is.
    """

    path: str
    type: str
    help: str
    kind: str
    about: str

    def matches(self, typed: str) -> bool:
        """Return whether a typed key means this one; any word stands for `NAME`, a number for `[]`."""
        words, own = typed.split("."), self.path.replace("[]", ".[]").split(".")
        return len(words) == len(own) and all(
            word == part or part == "NAME" or (part == "[]" and word.isdigit())
            for word, part in zip(words, own, strict=True)
        )


def all_keys() -> Iterator[Key]:
    """Yield every key that a YAML file or an override may set, section by section."""
    from conf.schema.config import Config

    schema = Config.model_json_schema()
    models = schema["$defs"]
    for section, value in schema["properties"].items():
        found = list(_models(value, models))
        if not found:
            yield Key(section, _type(value, models), value.get("description", ""), "", "")
        for name in found:
            kind = models[name]["properties"].get("kind", {}).get("const")
            title = "" if len(found) == 1 else f"kind={kind}" if kind else name
            about = models[name].get("description", "")
            for path, kinds, text in _rows(section, models[name], models, (name,)):
                yield Key(path, kinds, text, title, about)


def _rows(prefix: str, model: Schema, models: Schema, seen: tuple[str, ...]) -> Iterator[tuple[str, str, str]]:
    for key, value in model["properties"].items():
        path = f"{prefix}.{key}"
        yield path, _type(value, models), value.get("description", "")
        nested = [name for name in _models(value, models) if name not in seen]
        for name in nested:
            suffix = "" if "$ref" in value or len(nested) == 1 else f" ({_kind(name, models)})"
            for inner, kinds, text in _rows(_nested_path(path, value), models[name], models, (*seen, name)):
                yield inner, kinds, f"{text}{suffix}"


def _nested_path(path: str, value: Schema) -> str:
    """Return the path of what is inside: of an item of a list, of an entry of a mapping, or of the section itself."""
    options = [value, *value.get("anyOf", ())]
    if any(option.get("type") == "array" for option in options):
        return f"{path}[]"
    if any(map(_entries, options)):
        return f"{path}.NAME"
    return path


def _models(value: Schema, models: Schema) -> Iterator[str]:
    """Yield the names of the object schemas that a value may have."""
    if "$ref" in value:
        name = value["$ref"].rpartition("/")[2]
        if "properties" in models[name]:
            yield name
    for keyword in ("oneOf", "anyOf", "prefixItems"):
        for option in value.get(keyword, ()):
            yield from _models(option, models)
    for inner in (value.get("items"), _entries(value)):
        if isinstance(inner, Mapping):
            yield from _models(inner, models)


def _entries(value: Schema) -> Schema | None:
    """Return the schema of the entries of a mapping whose names are the user's; None if it is something else."""
    found = [value.get("additionalProperties"), *value.get("patternProperties", {}).values()]
    return next((inner for inner in found if isinstance(inner, Mapping)), None)


def _kind(name: str, models: Schema) -> str:
    return models[name]["properties"].get("kind", {}).get("const", name)


def _type(value: Schema, models: Schema) -> str:
    """Return a value's type and bounds."""
    if "$ref" in value:
        target = models[value["$ref"].rpartition("/")[2]]
        return "section" if "properties" in target else _type(target, models)
    for keyword in ("oneOf", "anyOf"):
        if keyword in value:
            return " or ".join(dict.fromkeys(_type(option, models) for option in value[keyword]))
    if "enum" in value or "const" in value:
        return ", ".join(f"`{choice}`" for choice in value.get("enum", [value.get("const")]))
    sort = value.get("type", "any")
    if sort == "array":
        items = value.get("items")
        return f"list of {_type(items, models)}" if isinstance(items, Mapping) else "list"
    if sort == "object":
        inner = _entries(value)
        return "mapping" if inner is None else f"mapping to {_type(inner, models)}"
    bounds = " ".join(text.format(value[word]) for word, text in BOUNDS.items() if word in value)
    return f"{sort} {bounds}".strip()

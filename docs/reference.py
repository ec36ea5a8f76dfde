"""Reference pages of the site, from the verbs and from the schema of the config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from controller.cli.flags import GROUPS, VERBS, Flag, Verb

BOUNDS = {
    "minimum": "≥ {}",
    "exclusiveMinimum": "> {}",
    "maximum": "≤ {}",
    "exclusiveMaximum": "< {}",
    "pattern": "`{}`",
}
"""Keywords of JSON Schema that limit a value, and how the page writes them."""
COMMANDS_HEAD = """# Commands

<!-- Made from controller/cli/flags.py when the site is built. -->

`slipway [VERB] [--flags] [+experiment=NAME] [group=choice …] [key.path=value …]`. The default verb is `up`.
`slipway VERB --help` prints the same on a terminal. How overrides work: [configuration](../configuration.md).
"""
KEYS_HEAD = """# Config keys

<!-- Made from conf/schema/ when the site is built. -->

Every key that a YAML file or an override may set, with its type, its bounds and what it does. Values are in the YAML
files of `conf/`; `slipway plan --save FILE` writes all of them, as composed. A section with several kinds has a table
for each.
"""


def commands_page() -> str:
    """Return the page of all verbs and their flags."""
    parts = [COMMANDS_HEAD]
    for group, title in GROUPS.items():
        parts.append(f"\n## {title.capitalize()}\n")
        parts += [_verb(name, verb) for name, verb in VERBS.items() if verb.group == group]
    return "\n".join(parts)


def _verb(name: str, verb: Verb) -> str:
    lines = [f"### slipway {name}", "", f"{verb.help[:1].upper()}{verb.help[1:]}. More: [{verb.page}](../{verb.page})."]
    lines += ["", "| flag | |", "|---|---|", *map(_flag, verb.flags)] if verb.flags else []
    lines += ["", "```", *(_example(name, words) for words in verb.examples), "```", ""]
    return "\n".join(lines)


def _flag(flag: Flag) -> str:
    value = flag.argparse_options.get("metavar", "")
    names = ", ".join(
        f"`{f'{name} {value}'.strip() if name.startswith('-') else value or name}`" for name in flag.names
    )
    return f"| {names} | {_cell(flag.help)} |"


def _example(name: str, words: str) -> str:
    return f"slipway {words}" if name == "up" else f"slipway {name} {words}".rstrip()


def keys_page() -> str:
    """Return the page of all config keys."""
    from conf.schema.config import Config

    schema = Config.model_json_schema()
    parts = [KEYS_HEAD]
    for section, value in schema["properties"].items():
        parts.append(f"\n## {section}\n")
        models = list(_models(value, schema["$defs"]))
        if not models:
            parts.append(f"{_cell(value.get('description', ''))} {_type(value, schema['$defs'])}\n")
        for name in models:
            parts.append(_model(section, name, schema["$defs"], titled=len(models) > 1))
    return "\n".join(parts)


def _model(section: str, name: str, models: Mapping[str, Any], *, titled: bool) -> str:
    """Return the table of one kind of a section, with the keys of what it contains."""
    model = models[name]
    kind = model["properties"].get("kind", {}).get("const")
    heading = [f"### {section}: kind={kind}" if kind else f"### {section}: {name}", ""] if titled else []
    about = [_cell(model.get("description", "")), ""]
    rows = [f"| `{key}` | {kinds} | {text} |" for key, kinds, text in _rows(section, model, models, (name,))]
    return "\n".join([*heading, *about, "| key | type | |", "|---|---|---|", *rows, ""])


def _rows(
    prefix: str, model: Mapping[str, Any], models: Mapping[str, Any], seen: tuple[str, ...]
) -> Iterator[tuple[str, str, str]]:
    for key, value in model["properties"].items():
        path = f"{prefix}.{key}"
        yield path, _type(value, models), _cell(value.get("description", ""))
        nested = [name for name in _models(value, models) if name not in seen]
        for name in nested:
            suffix = "" if "$ref" in value or len(nested) == 1 else f" ({_kind(name, models)})"
            for inner, kinds, text in _rows(_nested_path(path, value), models[name], models, (*seen, name)):
                yield inner, kinds, f"{text}{suffix}"


def _nested_path(path: str, value: Mapping[str, Any]) -> str:
    """Return the path of what is inside: of an item of a list, of an entry of a mapping, or of the section itself."""
    options = [value, *value.get("anyOf", ())]
    if any(option.get("type") == "array" for option in options):
        return f"{path}[]"
    if any(isinstance(option.get("additionalProperties"), dict) for option in options):
        return f"{path}.NAME"
    return path


def _models(value: Mapping[str, Any], models: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of the object schemas that a value may have."""
    if "$ref" in value:
        name = value["$ref"].rpartition("/")[2]
        if "properties" in models[name]:
            yield name
    for keyword in ("oneOf", "anyOf", "prefixItems"):
        for option in value.get(keyword, ()):
            yield from _models(option, models)
    for keyword in ("items", "additionalProperties"):
        if isinstance(value.get(keyword), Mapping):
            yield from _models(value[keyword], models)


def _kind(name: str, models: Mapping[str, Any]) -> str:
    return models[name]["properties"].get("kind", {}).get("const", name)


def _type(value: Mapping[str, Any], models: Mapping[str, Any]) -> str:
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
        inner = value.get("additionalProperties")
        return f"mapping to {_type(inner, models)}" if isinstance(inner, Mapping) else "mapping"
    bounds = " ".join(text.format(value[word]) for word, text in BOUNDS.items() if word in value)
    return _cell(f"{sort} {bounds}".strip())


def _cell(text: str) -> str:
    """Return text that one cell of a Markdown table can hold."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")

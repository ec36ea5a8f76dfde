"""Write JSON schemas of the YAML files for editors: `python -m controller.config.editor_schemas`.

A group's file holds part of its section and the rest comes from its `defaults`, so nothing is required, and any value
may be an interpolation. Only `slipway plan` checks constraints between values. docs/configuration.md
"""

import json
from pathlib import Path
from typing import Any

from conf.strict_json import dumps

FOLDER = Path(__file__).parent / "schemas"
ROOT = Path(__file__).parents[2]
CONFIG_SCHEMA = "config"
"""Schema of files that hold parts of any section."""
GROUPS = ("assets", "cloud", "data", "loop", "mesh", "model", "network", "optimizer", "program", "sweep", "tpu")
"""Groups whose files hold part of the section of that name."""
FILE_PATTERNS = {
    CONFIG_SCHEMA: ["{0}/config.yaml", "{0}/experiment/*.yaml", "{0}/scale/**/*.yaml"],
    "prompt": ["{0}/prompt/*.yaml"],
    **{group: [f"{{0}}/{group}/**/*.yaml"] for group in GROUPS},
}
"""Files that each schema applies to, below `conf` here and below `slipway` in the user's own repository."""
INTERPOLATION = {"type": "string", "pattern": r"\$\{|^\?\?\?$"}
DEFAULTS_LIST_SCHEMA = {
    "type": "array",
    "description": "Files of this group to merge before this file's values, or `override /group: choice`.",
}
"""Hydra's defaults list: https://hydra.cc/docs/advanced/defaults_list/"""
DROPPED_KEYWORDS = frozenset({"required", "discriminator", "title", "default", "description"})


def schemas() -> dict[str, dict[str, Any]]:
    """Return every schema by name. CONFIG_SCHEMA holds all models; the schemas of groups refer to it."""
    from conf.schema.config import Config

    whole = Config.model_json_schema()
    models = {name: _all_optional(model) for name, model in whole["$defs"].items()}
    made = {CONFIG_SCHEMA: {**_with_defaults(_all_optional(whole)), "$defs": models}}
    for group in GROUPS:
        made[group] = _group_schema([models[name] for name in _referenced_models(whole["properties"][group])])
    made["prompt"] = _group_schema([models["Prompt"]])
    return made


def schema_files() -> dict[Path, str]:
    """Return the files to commit: the schemas, and the VS Code settings that point to them."""
    found = {FOLDER / f"{name}.json": _json(schema) for name, schema in schemas().items()}
    return found | {ROOT / ".vscode" / "settings.json": _json(editor_settings(FOLDER.relative_to(ROOT)))}


def editor_settings(folder: Path) -> dict[str, Any]:
    """Return settings for yaml-language-server that map schemas to files.

    Args:
        folder: where the schemas are, relative to the opened folder or absolute.
    """
    prefix = "" if folder.is_absolute() else "./"
    mapping = {
        f"{prefix}{folder / name}.json": [glob.format(root) for root in ("conf", "slipway") for glob in globs]
        for name, globs in FILE_PATTERNS.items()
    }
    return {"yaml.schemas": mapping}


def _group_schema(models: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the schema of a group's file: part of one of these models, which refer to the config schema."""
    files = [_with_defaults(model) for model in models]
    made = {"anyOf": files} if len(files) > 1 else files[0]
    return json.loads(dumps(made).replace('"#/$defs/', f'"{CONFIG_SCHEMA}.json#/$defs/'))


def _with_defaults(model: dict[str, Any]) -> dict[str, Any]:
    return {**model, "properties": {"defaults": DEFAULTS_LIST_SCHEMA, **model["properties"]}}


def _all_optional(model: dict[str, Any]) -> dict[str, Any]:
    """Return a section's schema in which no property is required."""
    properties = {name: _value(value) for name, value in model["properties"].items()}
    return {"type": "object", **_describe(model), "additionalProperties": False, "properties": properties}


def _value(value: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that allows the value, an interpolation, or `???` for a value that must be given."""
    kept = {key: inner for key, inner in value.items() if key not in DROPPED_KEYWORDS}
    kinds = [_value(inner) for key in ("oneOf", "anyOf") for inner in kept.pop(key, ())]
    for key in ("items", "additionalProperties"):
        if isinstance(kept.get(key), dict):
            kept[key] = _value(kept[key])
    if "prefixItems" in kept:
        kept["prefixItems"] = [_value(inner) for inner in kept["prefixItems"]]
    if kept == {"type": "string"} or "$ref" in kept or not (kept or kinds):
        return {**kept, **_describe(value)}
    kinds = [each for each in kinds if each != INTERPOLATION] if kinds else [kept]
    flat = [inner for each in kinds for inner in (each["anyOf"] if set(each) == {"anyOf"} else [each])]
    return {"anyOf": [*(each for each in flat if each != INTERPOLATION), INTERPOLATION], **_describe(value)}


def _describe(value: dict[str, Any]) -> dict[str, Any]:
    return {"description": value["description"]} if "description" in value else {}


def _referenced_models(value: dict[str, Any]) -> list[str]:
    """Return the names of the models that a section may have."""
    if "$ref" in value:
        return [value["$ref"].rpartition("/")[2]]
    return [name for key in ("oneOf", "anyOf") for inner in value.get(key, ()) for name in _referenced_models(inner)]


def _json(document: dict[str, Any]) -> str:
    return f"{dumps(document, indent=1)}\n"


def main() -> None:
    for file, text in schema_files().items():
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)


if __name__ == "__main__":
    main()

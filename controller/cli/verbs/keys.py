"""`slipway help KEY`: what a key is, and what sets it. `slipway plan --config`: every value, and what sets it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from conf.schema.unknown_keys import unknown_key
from conf.strict_json import dumps
from controller.cli.keys import Key, all_keys
from controller.cli.main import Command
from controller.config.origins import composed_with_origins, leaves, values_of_files
from controller.core.errors import ConfigError
from controller.core.text import width_of, wrap

MOST_FILES = 8
"""Files that `help KEY` lists."""
ORIGIN_AT = 56
"""Column at which `plan --config` names the file, where the value is not longer."""


def print_config(command: Command) -> int:
    """Print each value of the composed config as an override, and the file that sets it."""
    options = command.options
    if options.run_id:
        raise ConfigError("--config: takes overrides, not --run; the config of a run is in its run.yaml")
    config, _ = options.config(resolve=False)
    known = {} if options.plan_file else composed_with_origins(options.overrides, _own_folder())
    told = str(options.plan_file) if options.plan_file else ""
    found = {}
    for key, value in leaves(config.model_dump(mode="json")):
        origin = known[key][1] if key in known else told or _origin_above(key, known)
        origin = origin or ("the model's config.json" if key.startswith("model.") else "default")
        found[key] = {"value": value, "origin": origin}
    if command.flags.json:
        print(dumps(found, indent=1))
        return 0
    for key, each in found.items():
        override = f"{key}={_shown(each['value'])}"
        print(f"{override:<{ORIGIN_AT}}  # {each['origin']}")
    return 0


def _origin_above(key: str, known: dict[str, tuple[Any, str]]) -> str:
    """Return what sets the section of a key that validation has completed; empty if nothing does."""
    parts = key.split(".")
    above = (known.get(".".join(parts[:end])) for end in range(len(parts) - 1, 0, -1))
    return next((found[1] for found in above if found is not None), "")


def print_key(command: Command, typed: str) -> int:
    """Print what the schema and the files say of a key, and its value with the overrides; of a section, its keys.

    Raises:
        ConfigError: there is no such key.
    """
    keys = list(all_keys())
    found = [key for key in keys if key.matches(typed)]
    if not found:  # an entry of a mapping, such as env.vars.MY_NAME
        found = [key for key in keys if key.matches(typed.rpartition(".")[0]) and "mapping" in key.type]
    inside = [key for key in keys if key.path.startswith(f"{typed}.")]
    if not found and not inside:
        meant = unknown_key({}, typed.split("."), None).partition("; ")[2]
        raise ConfigError(f"{typed}: is neither a verb nor a key of the config; {meant}")
    set_by = [(file, value) for file, values in values_of_files(_own_folder()) for value in _below(typed, values)]
    composed = composed_with_origins(command.overrides, _own_folder()) if command.overrides else {}
    values = {key: value for key, (value, _) in composed.items()}
    origins = dict.fromkeys(by for key, (_, by) in composed.items() if f"{key}.".startswith(f"{typed}."))
    now = next(((value, " and ".join(origins)) for value in _below(typed, values)), None)
    if command.flags.json:
        files = [{"file": file, "value": value} for file, value in set_by]
        document = {"key": typed, "kinds": [key._asdict() for key in found or inside], "set_by": files}
        print(dumps(document | ({"value": now[0], "origin": now[1]} if now else {}), indent=1))
        return 0
    print("\n".join(_about_key(typed, found, set_by, now) if found else _about_section(typed, inside)))
    return 0


def _below(typed: str, values: dict[str, Any]) -> Iterator[Any]:
    """Yield the value of a key, or what is below it, if there is any."""
    if typed in values:
        yield values[typed]
    elif below := {key[len(typed) + 1 :]: value for key, value in values.items() if key.startswith(f"{typed}.")}:
        yield below


def _about_key(typed: str, found: list[Key], set_by: list[tuple[str, Any]], now: tuple[Any, str] | None) -> list[str]:
    from conf.schema.training.run_yaml import RunFile

    rows = [(key.kind, f"{key.type}. {key.help}".strip()) for key in found]
    texts = list(dict.fromkeys(text for _, text in rows))
    lines = [typed]
    for text in texts:
        of = ", ".join(kind for kind, each in rows if each == text and kind)
        lines.append(f"  {text}" + (f" ({of})" if of and len(texts) > 1 else ""))
    if now is not None:
        lines.append(f"now      {_shown(now[0])}, by {now[1]}")
    for at, (file, value) in enumerate(set_by[:MOST_FILES]):
        lines.append(f"{'' if at else 'set by':<9}{file}: {_shown(value)}")
    if len(set_by) > MOST_FILES:
        lines.append(f"         and {len(set_by) - MOST_FILES} more files")
    reader = "the trainer, on every worker" if typed.partition(".")[0] in RunFile.model_fields else "the controller"
    lines.append(f"read by  {reader}")
    return [wrap(line, width_of(sys.stdout), 9) for line in lines]


def _about_section(typed: str, inside: list[Key]) -> list[str]:
    """Return a line for each key of a section, once where several kinds have the same."""
    lines, kinds = [typed], dict.fromkeys(key.kind for key in inside if key.kind)
    if len(kinds) > 1:
        lines.append(f"  has {len(kinds)} kinds: {', '.join(kinds)}")
    for path in dict.fromkeys(key.path for key in inside):
        same = [key for key in inside if key.path == path]
        of = f" ({', '.join(dict.fromkeys(key.kind for key in same))})" if 0 < len(same) < len(kinds) else ""
        lines.append(f"  {path}  {same[0].type}. {same[0].help}{of}")
    return [wrap(line, width_of(sys.stdout), 6) for line in lines]


def _shown(value: Any) -> str:
    return value if isinstance(value, str) and value else dumps(value)


def _own_folder() -> Path | None:
    folder = Path.cwd() / "slipway"
    return folder if folder.is_dir() else None

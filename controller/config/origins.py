"""Where each value of a composed config comes from: the last composed file that has it, or the command line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from controller.config.compose import (
    CONFIG_DIR,
    compose_raw,
    config_groups,
    guarded_variables,
    initialize_hydra,
    normalize_override,
    register_resolvers,
    scale_overrides,
    search_path_override,
)
from controller.config.refusals import explained
from controller.config.texts import quote_numbers
from controller.core.errors import ConfigError

TYPED = "the command line"
GLOBAL = "# @package _global_"


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value that is no section, by its dotted key; empty sections too."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from leaves(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key, value


def composed_with_origins(overrides: Sequence[str], extra_dir: Path | None) -> dict[str, tuple[Any, str]]:
    """Return each value of the composed config, before validation, and what it comes from, by its key.

    A value under a key that no file and no override has is computed: its origin is empty.

    Raises:
        ConfigError: Hydra could not compose the config.
    """
    data = compose_raw(overrides, extra_dir=extra_dir)
    origins: dict[str, str] = {}
    for file, package in _files(overrides, extra_dir):
        origins |= dict.fromkeys((key for key, _ in file_values(file, package)), _shown(file))
    typed = [word.partition("=")[0].lstrip("+") for word in overrides if "=" in word and word[0] != "~"]
    groups = config_groups(extra_dir)
    keys = [key for key in typed if key not in groups and "@" not in key]

    def origin(key: str) -> str:
        parts = key.split(".")
        above = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
        if any(each in keys for each in above):
            return TYPED
        return next((origins[each] for each in above if each in origins), "")

    return {key: (value, origin(key)) for key, value in leaves(data)}


def file_values(file: Path, package: str) -> Iterator[tuple[str, Any]]:
    """Yield the values of one YAML file by their keys in the whole config.

    Raises:
        ConfigError: it is no YAML mapping.
    """
    try:
        document = yaml.safe_load(_read(file)) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{_shown(file)}: is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{_shown(file)}: is no mapping of keys to values")
    yield from leaves({key: value for key, value in document.items() if key != "defaults"}, package)


def values_of_files(extra_dir: Path | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each file of all groups, the user's own first, and its values by their keys in the whole config."""
    for root in filter(None, (extra_dir, CONFIG_DIR)):
        for file in [*root.glob("config.yaml"), *sorted(root.glob("*/*.yaml"))]:
            is_global = file.parent == root or _read(file).startswith(GLOBAL)
            yield _shown(file), dict(file_values(file, "" if is_global else file.parent.name))


def _read(file: Path) -> str:
    try:
        return file.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{_shown(file)}: cannot be read: {error}") from None


def _files(overrides: Sequence[str], extra_dir: Path | None) -> Iterator[tuple[Path, str]]:
    """Yield the files that Hydra composes, in its order, and the section that each fills; "" is the whole config."""
    from hydra import compose
    from hydra.core.global_hydra import GlobalHydra
    from hydra.types import RunMode

    chosen = [word for word in map(normalize_override, overrides) if not word.startswith("++")]
    wanted = [*map(quote_numbers, chosen), *search_path_override(extra_dir)]
    register_resolvers()
    with explained(chosen, extra_dir, config_groups), guarded_variables(), initialize_hydra():
        made = compose("config", overrides=wanted, return_hydra_config=True)
        wanted += scale_overrides(made.hydra.runtime.choices, extra_dir)
        loader = GlobalHydra.instance().config_loader()
        found = loader.compute_defaults_list("config", overrides=wanted, run_mode=RunMode.RUN).defaults
    for default in found:
        for root in filter(None, (CONFIG_DIR, extra_dir)):
            file = root / f"{default.config_path}.yaml"
            if default.config_path and file.is_file():
                yield file, (default.package or "").removeprefix("_global_").strip(".")
                break


def _shown(file: Path) -> str:
    """Return a file's path as one types it: below the current folder, or below the folder with `conf`."""
    for folder in (Path.cwd(), CONFIG_DIR.parent):
        if file.resolve().is_relative_to(folder):
            return str(file.resolve().relative_to(folder))
    return str(file)

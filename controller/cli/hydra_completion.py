"""Complete groups, choices and keys with Hydra's own completion.

https://hydra.cc/docs/tutorials/basic/running_your_app/tab_completion/
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.plugins.completion_plugin import DefaultCompletionPlugin
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from controller.config.compose import (
    OVERRIDE,
    initialize_hydra,
    normalize_override,
    register_resolvers,
    search_path_override,
)
from controller.config.editor_schemas import CONFIG_SCHEMA, FOLDER

HYDRA_KEY = "hydra"


def complete_override(word: str, before: Sequence[str], folder: Path) -> list[str]:
    """Return completions for an override; a key is followed by `=` or `.`.

    Args:
        word: as typed so far, `+exp`, `loop=gr`, `optimizer.lr=`.
        before: the words on its left; only the files that they choose matter.
        folder: the current folder.
    """
    register_resolvers()
    with initialize_hydra():
        completion = _OverrideCompleter(GlobalHydra.instance().hydra.config_loader)  # pyright: ignore[reportOptionalMemberAccess]
        files = [*filter(None, map(_group_file, before)), *search_path_override(folder / "slipway")]
        return completion.complete(word, files)


class _OverrideCompleter(DefaultCompletionPlugin):
    """Hydra's completion without its limits: `_query` splits at every space, and fails if any value is wrong."""

    def complete(self, word: str, files: list[str]) -> list[str]:
        first, comma, last = word.rpartition(",") if "=" in word else ("", "", word)
        if comma:  # further values of a sweep
            key = first.partition("=")[0]
            choices, _ = self._query_config_groups(f"{key}={last}", "config", files)
            return [f"{first},{choice.partition('=')[2]}" for choice in choices]
        sign = "+" * (len(word) - len(word.lstrip("+")))
        bare = word[len(sign) :]
        found, is_group = self._query_config_groups(bare, "config", files)
        if not is_group:
            found = [*found, *self._complete_keys(bare, files)]
        return sorted({f"{sign}{each}" for each in found if not each.startswith(HYDRA_KEY)})

    def _complete_keys(self, word: str, files: list[str]) -> list[str]:
        from hydra.types import RunMode

        try:
            composed: Any = self.config_loader.load_configuration("config", files, RunMode.RUN)
            found = self._get_matches(composed, word)
        except (HydraException, OmegaConfBaseException, YAMLError, AttributeError, AssertionError):
            return []  # a word on the left is wrong, or there is no such section
        key, equals, _ = word.partition("=")
        return [*found, *(f"{key}={each}" for each in allowed_values(key) if equals)]


def _group_file(word: str) -> str | None:
    """Return `group=choice` from an override, with the first of several choices; values do not affect the keys."""
    match = OVERRIDE.match(word)
    if match is None or not match["value"] or "." in match["key"] or match["sign"] == "~":
        return None
    return normalize_override(word).partition(",")[0]


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

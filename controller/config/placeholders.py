"""Expand `{bucket}`, `{run_dir}` and `{assets.models.NAME}` in variables and commands, once the plan knows them."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from controller.core.errors import ConfigError
from controller.core.text import object_url

PLACEHOLDER = re.compile(r"\{(bucket|run_id|run_dir|assets\.(?:datasets|models|tokenizers)\.[^{}]*)\}")
"""Other braces, such as those of JSON, stay unchanged."""


@dataclass(frozen=True)
class Placeholders:
    """Values of the placeholders. `assets` maps `datasets.NAME`, `models.NAME` or `tokenizers.NAME` to a URL."""

    bucket: str
    run_id: str
    run_dir: str
    assets: Mapping[str, str]

    def fill(self, text: str, key: str) -> str:
        """Replace the placeholders of one value. Raises ConfigError if there is no such asset; names `key`."""
        return PLACEHOLDER.sub(lambda match: self._place(match[1], key), text)

    def fill_all(self, values: Iterable[str], key: str) -> tuple[str, ...]:
        return tuple(self.fill(word, key) for word in values)

    def environment(self, own: Mapping[str, str]) -> dict[str, str]:
        """Return the program's environment: `env.vars`, and the variables that every program gets."""
        nested: dict[str, dict[str, str]] = {}
        for path, url in self.assets.items():
            group, _, name = path.partition(".")
            nested.setdefault(group, {})[name] = url
        told = {
            "SLIPWAY_BUCKET": object_url(self.bucket),
            "SLIPWAY_RUN_URL": self.run_dir,
            "SLIPWAY_ASSETS": json.dumps(nested, sort_keys=True),
        }
        return told | {name: self.fill(value, f"env.vars.{name}") for name, value in own.items()}

    def _place(self, word: str, key: str) -> str:
        simple = {"bucket": object_url(self.bucket), "run_id": self.run_id, "run_dir": self.run_dir}
        if word in simple:
            return simple[word]
        path = word.removeprefix("assets.")
        if path not in self.assets:
            raise ConfigError(f"{key}: {{{word}}}: no such asset; choices: {', '.join(self.assets) or 'none'}")
        return self.assets[path]

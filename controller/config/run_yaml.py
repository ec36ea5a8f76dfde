"""What a pod gets of the config: bucket, `run.yaml`, variables and commands, with values only the controller knows."""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from conf.formats import FORMAT
from conf.schema.cloud import HereCloud
from conf.schema.config import Config
from conf.schema.topology import YamlDumper
from conf.strict_json import dumps
from controller.core.errors import ConfigError
from controller.core.text import object_url

ASSET = "assets://"


def render(config: Config, run_id: str, bucket: str, prefixes: Mapping[str, str]) -> str:
    """Return the text of `run.yaml`.

    `prefixes` maps each asset to its copy in the bucket; `assets://NAME/FILE` is rewritten to it.
    """
    plain = config.model_dump(mode="json")
    content: dict[str, Any] = {
        "format": FORMAT,
        "id": run_id,
        "name": config.run.name,
        "seed": config.run.seed,
        "dir": run_url(config, bucket, run_id),
        "compile_cache": config.run.compile_cache,
        "pod": pod_facts(config),
    }
    sections = ("model", "data", "loop", "optimizer", "mesh", "checkpoint", "logging")
    declared = [*config.assets.datasets, *config.assets.models, *config.assets.tokenizers]
    try:
        content |= {name: _resolve(plain[name], bucket, prefixes, name) for name in sections if plain[name] is not None}
    except UnknownAssetError as unknown:
        raise ConfigError(unknown.explained(declared)) from None
    return yaml.dump(content, Dumper=YamlDumper, sort_keys=False)


def pod_facts(config: Config) -> dict[str, Any]:
    """Return the section `pod`: the hardware that the program is to find."""
    topology = config.topology
    return {
        "accelerator_type": topology.accelerator_type,
        "workers": topology.workers,
        "devices": topology.devices,
        "backend": backend(config),
        "hbm_bytes_per_chip": topology.hbm_bytes_per_chip,
        "bf16_flops_per_chip": topology.bf16_flops_per_chip,
    }


def bucket_name(config: Config, project: str) -> str:
    """Return a bucket name that is unlikely to be taken: bucket names are global across Google Cloud.

    For `cloud=here` it is the absolute path of a folder.
    """
    if isinstance(config.cloud, HereCloud):
        folder = config.cloud.folder or f"{config.run.state_dir}/here/store"
        return str(Path(folder).expanduser().absolute())
    location = config.cloud.bucket_location or config.region
    return config.cloud.bucket or f"{project.replace(':', '-').replace('.', '-')}-slipway-{location}"


def run_url(config: Config, bucket: str, run_id: str) -> str:
    """Return the folder where the program keeps checkpoints and results."""
    results = config.cloud.results if isinstance(config.cloud, HereCloud) else None
    return f"{results.rstrip('/') if results else object_url(bucket)}/runs/{run_id}"


def backend(config: Config) -> str:
    """Return what `jax.default_backend()` says on the workers."""
    if isinstance(config.cloud, HereCloud):
        return config.cloud.backend
    return "cpu" if config.cloud.kind == "local" else "tpu"


class UnknownAssetError(Exception):
    """A key names an asset that is not there."""

    def __init__(self, key: str, value: str, name: str) -> None:
        super().__init__(f"{key}: {value} refers to an unknown asset {name!r}")
        self.key, self.value, self.name = key, value, name

    def explained(self, declared: Sequence[str]) -> str:
        """Return the line for the user. declared: names of the config's assets."""
        near = difflib.get_close_matches(self.name, declared, n=1)
        hint = f"did you mean {ASSET}{near[0]}/…? " if near else ""
        section, _, name = self.key.partition(".")
        kinds = {"tokenizer": "tokenizers", "weights": "models"}
        other = "datasets" if section == "data" else "<datasets, models or tokenizers>"
        kind = kinds.get(name.rpartition(".")[2], other)
        add = f"assets.{kind}.{self.name}.path=FOLDER"
        return (
            f"{self} (assets: {', '.join(declared) or 'none'}); {hint}set {self.key} to a path or gs://…, or add the "
            f"asset: {add}"
        )


def _resolve(value: Any, bucket: str, prefixes: Mapping[str, str], key: str) -> Any:
    if isinstance(value, dict):
        return {k: _resolve(v, bucket, prefixes, f"{key}.{k}") for k, v in value.items()}
    if isinstance(value, list):
        return [_resolve(v, bucket, prefixes, key) for v in value]
    if isinstance(value, str) and value.startswith(ASSET):
        name, _, file = value.removeprefix(ASSET).partition("/")
        if name not in prefixes:
            raise UnknownAssetError(key, value, name)
        return object_url(bucket, f"{prefixes[name]}/{file}").removesuffix("/")
    return value


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
            "SLIPWAY_ASSETS": dumps(nested, sort_keys=True),
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

"""Write `run.yaml`: the config for the pod, completed with values that only the controller knows."""

from collections.abc import Mapping
from typing import Any

import yaml

from conf.formats import FORMAT
from conf.schema.config import Config
from conf.schema.infra.cloud import HereCloud
from conf.schema.infra.topology import YamlDumper
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
    content |= {name: _resolve(plain[name], bucket, prefixes, name) for name in sections if plain[name] is not None}
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


def run_url(config: Config, bucket: str, run_id: str) -> str:
    """Return the folder where the program keeps checkpoints and results."""
    results = config.cloud.results if isinstance(config.cloud, HereCloud) else None
    return f"{results.rstrip('/') if results else object_url(bucket)}/runs/{run_id}"


def backend(config: Config) -> str:
    """Return what `jax.default_backend()` says on the workers."""
    if isinstance(config.cloud, HereCloud):
        return config.cloud.backend
    return "cpu" if config.cloud.kind == "local" else "tpu"


def _resolve(value: Any, bucket: str, prefixes: Mapping[str, str], key: str) -> Any:
    if isinstance(value, dict):
        return {k: _resolve(v, bucket, prefixes, f"{key}.{k}") for k, v in value.items()}
    if isinstance(value, list):
        return [_resolve(v, bucket, prefixes, key) for v in value]
    if isinstance(value, str) and value.startswith(ASSET):
        name, _, file = value.removeprefix(ASSET).partition("/")
        if name not in prefixes:
            choices = ", ".join(prefixes) or "none"
            raise ConfigError(
                f"{key}: {value} refers to an unknown asset {name!r} (assets: {choices}); set {key} to a path or "
                f"gs://…, or add the asset: assets.<datasets, models or tokenizers>.{name}.path=FOLDER"
            )
        return object_url(bucket, f"{prefixes[name]}/{file}").removesuffix("/")
    return value

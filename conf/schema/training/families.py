"""The families of models, for who reads a model from elsewhere: the switches of conf/model/family/, without Hydra."""

from functools import cache
from pathlib import Path
from typing import Any

import yaml

import conf

FAMILY_FOLDER = Path(conf.__file__).with_name("model") / "family"


def family_names() -> list[str]:
    """gemma2, gemma3, gpt2, llama3, nanochat, qwen2, qwen3."""
    return sorted(file.stem for file in FAMILY_FOLDER.glob("*.yaml"))


def family_switches(name: str) -> dict[str, Any]:
    """All keys of `conf.schema.training.model.Model` but the sizes."""
    return dict(_read(name))


@cache
def _read(name: str) -> dict[str, Any]:
    return yaml.safe_load((FAMILY_FOLDER / f"{name}.yaml").read_text())

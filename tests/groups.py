"""YAML files, and the groups of conf/ as Hydra composes them, without Hydra."""

from pathlib import Path
from typing import Any

import yaml

from conf.schema.topology import YamlLoader
from tests.paths import ROOT

CONF = ROOT / "conf"


def load_yaml(file: Path) -> Any:
    """The content of a YAML file, by the fast loader: every process of the suite reads some while it collects."""
    return yaml.load(file.read_text(), Loader=YamlLoader)


def load_group(path: str) -> dict[str, Any]:
    """A YAML group of conf/, e.g. model/tiny, with what it is made of, as Hydra composes it."""
    raw = load_yaml(CONF / f"{path}.yaml")
    bases = [base.removesuffix("@_here_") for base in raw.pop("defaults", []) if base != "_self_"]
    for base in bases:
        raw = load_group(f"{Path(path).parent}/{base}") | raw
    return raw

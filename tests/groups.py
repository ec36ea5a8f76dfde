"""The YAML groups of conf/, as Hydra composes them, without Hydra."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tests.paths import ROOT

CONF = ROOT / "conf"


def load_group(path: str) -> dict[str, Any]:
    """A YAML group of conf/, e.g. model/tiny, with what it is made of, as Hydra composes it."""
    raw = yaml.safe_load((CONF / f"{path}.yaml").read_text())
    bases = [base.removesuffix("@_here_") for base in raw.pop("defaults", []) if base != "_self_"]
    for base in bases:
        raw = load_group(f"{Path(path).parent}/{base}") | raw
    return raw

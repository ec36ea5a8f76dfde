"""What hatchling adds to a wheel: `slipway` and `hydra_plugins` at the top of site-packages.

The table of sources in pyproject.toml cannot say it: there a folder's rule holds for all folders below it. An editable
installation needs no copy, because it has this folder on `sys.path`; so this module's name must be nobody else's.
"""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Tops(BuildHookInterface):
    """Called by hatchling before it builds a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add both folders to a wheel of the version `standard`; the other one is `editable`."""
        if version == "standard":
            here = Path(__file__).parent
            build_data["force_include"] |= {str(here / name): name for name in ("hydra_plugins", "slipway")}

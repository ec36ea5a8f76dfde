"""Documents of format 1, as they lie on disk and go over the wire: these files change only with the format."""

import json
from typing import Any

from tests.paths import ROOT


def golden(name: str) -> Any:
    return json.loads((ROOT / "tests" / "golden" / f"{name}.json").read_bytes())

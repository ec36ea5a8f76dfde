"""The loops: a module each, of the name that `loop.kind` gives.

Each has `run(experiment, mesh, log)` and `programs(experiment, mesh)`, what it compiles.
"""

from __future__ import annotations

import importlib
from typing import Any


def load_loop(kind: str) -> Any:
    """The module of a loop. Only this one is imported: each brings its own half of the program."""
    return importlib.import_module(f"trainer.loops.{kind}")
